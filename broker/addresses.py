"""Where servers are: what an endpoint's URL and a Redis URL may look like, and when two are the same."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?\.?")
_LABEL_CHARS = 63
_SOCKET_PATH_BYTES = 107  # what a socket's address has room for, on Linux
_PATH = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@%/-]*")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_REDIS_SCHEMES = {"valkey": "redis", "valkeys": "rediss"}
REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
# What a Redis URL may set behind its '?'. redis-py takes any of its settings from there, over ours: `decode_responses`
# would garble every reply, a timeout end the calls that wait.
REDIS_OPTIONS = (
    "db", "protocol", "client_name", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs",
    "ssl_check_hostname", "ssl_min_version",
)  # fmt: skip
_OPTION_VALUES = {
    "db": ("[0-9]{1,9}", "a number"),
    "protocol": ("[23]", "2 or 3"),
    "ssl_cert_reqs": ("none|optional|required", "none, optional or required"),
    "ssl_check_hostname": ("(?i:true|yes|1|false|no|0)", "true or false"),
    "ssl_min_version": ("77[12]", "771 (TLS 1.2) or 772 (TLS 1.3)"),
}
_UNENCODED = (
    "has '/', '?', '#' or '@' where none may be: in a user or password write %2F, %3F, %23 and %40, or give them as "
    "redis.username and redis.password"
)
_OF_SENTINELS = ("sentinel_username", "sentinel_password")
_SERVICE = re.compile(r"[A-Za-z0-9_.-]+")
_CREDENTIALS = re.compile(r"(?<=://)\S*@")  # up to the last one: a password may hold `/`, `?`, `#` and `@`
_QUERY_PASSWORD = re.compile(r"(?i)((?:[?&])[a-z_]*password=)[^&\s]*")

EMBEDDED = "embedded"


def endpoint_url(text: str) -> str:
    """The URL as headrace uses it: scheme and host in lower case, no slash at the end.

    Only http(s)://host[:port][/path]. Raises ValueError, one line, which never repeats the text.
    """
    if not text.isascii() or any(c <= " " or c == "\x7f" for c in text):
        raise ValueError("must not contain spaces or characters outside ASCII (write the host name in punycode)")
    parts = _split(text)
    if parts.scheme not in _DEFAULT_PORTS:
        raise ValueError("must start with http:// or https://")
    if "@" in parts.netloc:
        raise ValueError("must not contain a user or password: use api_key, or an Authorization header in `headers`")
    if "?" in text or "#" in text:
        raise ValueError("must not contain a query ('?') or a fragment ('#')")
    host, port = _host_and_port(parts)
    path = parts.path.rstrip("/")
    if not _PATH.fullmatch(path) or any(re.sub("(?i)%2e", ".", p) in (".", "..") for p in path.split("/")):
        raise ValueError("has a path with characters that need percent-encoding, or with '.' or '..' segments")
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{path}"


def server_key(url: str) -> str:
    """The same for two endpoint URLs exactly when they mean the same server and path. `url` as by `endpoint_url`."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    with contextlib.suppress(ValueError):
        host = ipaddress.ip_address(host).compressed
    return f"{parts.scheme}://{host}:{parts.port or _DEFAULT_PORTS[parts.scheme]}{parts.path}"


def endpoint_id(url: str) -> str:
    """An id made of host, port and path: `10.0.0.7:8000/v1` gives `10-0-0-7-8000-v1`. At most 64 characters."""
    parts = urlsplit(url)
    port = parts.port or _DEFAULT_PORTS[parts.scheme]
    name = re.sub(r"[^A-Za-z0-9_]+", "-", f"{parts.hostname}-{port}{parts.path}").strip("-")
    return name[:64].strip("-") or "endpoint"


def _split(text: str) -> SplitResult:
    try:
        return urlsplit(text)
    except ValueError:
        raise ValueError("is not a URL (are the brackets of an IPv6 address balanced?)") from None


def _host_and_port(parts: SplitResult) -> tuple[str, int | None]:
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError("has a port that is not a number from 1 to 65535") from None
    if not host:
        raise ValueError("has no host")
    if port == 0 or parts.netloc.endswith(":"):
        raise ValueError("has a port that is not a number from 1 to 65535")
    if ":" in host:
        try:
            return f"[{ipaddress.IPv6Address(host).compressed}]", port
        except ValueError:
            raise ValueError("has a host that is not a valid IPv6 address") from None
    if not is_host(host):
        raise ValueError("has a host that is not a valid name or address")
    return host, port


def is_host(text: str) -> bool:
    """Whether it is an address, or a name that a resolver can be asked for: labels of 1 to 63 characters, 253 in all.

    A name outside ASCII counts as what it is in punycode. What is none makes Python's resolver raise, not fail.
    """
    if ":" in text:
        try:
            return ipaddress.ip_address(text).version == 6
        except ValueError:
            return False
    try:
        name = text if text.isascii() else text.encode("idna").decode("ascii")
    except UnicodeError:
        return False
    labels = name.removesuffix(".").split(".")
    return _HOST.fullmatch(name) is not None and all(0 < len(label) <= _LABEL_CHARS for label in labels)


def mask_url(text: str) -> str:
    """The text with the passwords of URLs in it replaced by `***`; user names go too."""
    return _QUERY_PASSWORD.sub(r"\1***", _CREDENTIALS.sub("***@", text))


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A Redis URL taken apart: `url` without credentials (or `embedded`), and the credentials it carried.

    `username` and `password` are those of the servers with the data; Sentinels may have their own.
    """

    url: str
    username: str | None = None
    password: str | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = None


def redis_address(text: str) -> RedisAddress:
    """`embedded`, redis://, rediss://, unix://, redis+sentinel://, redis+cluster:// (or valkey://).

    Raises ValueError without secrets.
    """
    text = text.strip()
    if text.lower() == EMBEDDED:
        return RedisAddress(EMBEDDED)
    if any(c <= " " or c == "\x7f" or "\ud800" <= c <= "\udfff" for c in text):
        raise ValueError("must not contain spaces, or characters that are none")
    parts = _split(text)
    name, plus, kind = parts.scheme.partition("+")
    scheme = _REDIS_SCHEMES.get(name, name) + plus + kind
    if scheme not in REDIS_SCHEMES or "://" not in text:
        raise ValueError(
            "must be 'embedded' or start with redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"
        )
    userinfo, _, hosts = parts.netloc.rpartition("@")
    if "#" in text or (scheme != "unix" and "@" in parts.path):
        raise ValueError(_UNENCODED)
    try:
        _check_redis_hosts(scheme, hosts, parts)
    except ValueError:
        if "@" in parts.query and "@" not in parts.netloc:
            raise ValueError(_UNENCODED) from None
        raise
    user, _, password = userinfo.partition(":")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    username = query.pop("username", "") or unquote(user)
    secret = query.pop("password", "") or unquote(password)
    of_sentinels = [query.pop(name, "") or None if scheme.endswith("+sentinel") else None for name in _OF_SENTINELS]
    for name, value in query.items():
        _check_option(name, value)
    # `unix` needs its empty authority written out: urlunsplit would give unix:/path.
    bare = urlunsplit(("", hosts, parts.path, urlencode(query), "")) if hosts else f"//{parts.path}"
    if not hosts and query:
        bare += f"?{urlencode(query)}"
    return RedisAddress(f"{scheme}:{bare}", username or None, secret or None, *of_sentinels)


def _check_option(name: str, value: str) -> None:
    if name not in REDIS_OPTIONS:
        # what is no word, or stands before an '@', may be part of a password whose '?' was not percent-encoded
        told = name if re.fullmatch("[a-z_]{1,40}", name) and "@" not in value else "that"
        raise ValueError(f"must not set {told}; behind the '?' it may set {', '.join(REDIS_OPTIONS)}")
    rule = _OPTION_VALUES.get(name)
    if rule is not None and not re.fullmatch(rule[0], value):
        raise ValueError(f"must set {name} to {rule[1]}")


def _check_redis_hosts(scheme: str, hosts: str, parts: SplitResult) -> None:
    if scheme == "unix":
        path = unquote(parts.path)
        if not path.strip("/") or "\0" in path:
            raise ValueError("has no path to the socket (unix:///run/redis.sock)")
        if len(path.encode()) > _SOCKET_PATH_BYTES:
            raise ValueError(f"has a path that is too long for a socket: at most {_SOCKET_PATH_BYTES} bytes")
        if hosts:
            raise ValueError("has a host, or a user without '@'; a socket has none (unix:///run/redis.sock)")
        return
    if not hosts:
        raise ValueError("has no host")
    for host in hosts.split(",") if "+" in scheme else [hosts]:
        _redis_host(host, 0)
    path = parts.path.strip("/")
    if scheme.endswith("+sentinel"):
        service, _, path = path.partition("/")
        if not _SERVICE.fullmatch(service):
            raise ValueError("has no service that its Sentinels know (redis+sentinel://host:26379,host:26379/name/0)")
    if scheme.endswith("+cluster") and path not in ("", "0"):
        raise ValueError("has a database: a Redis Cluster has only one (redis+cluster://host:6379,host:6379)")
    if path and not re.fullmatch("[0-9]{1,9}", path):
        raise ValueError("has a database that is not a number (redis://host:6379/0)")


def _redis_host(text: str, default_port: int) -> tuple[str, int]:
    parts = _split(f"//{text}")
    try:
        ok = is_host(parts.hostname or "") and parts.port != 0 and "@" not in text
    except ValueError:
        ok = False
    if not ok:
        raise ValueError("has a host or port that is not valid")
    return parts.hostname or "", parts.port or default_port


@dataclass(frozen=True, slots=True)
class RedisNodes:
    """A URL with several addresses: Sentinels and the service they watch, or some nodes of a cluster (`service` "").

    `one` is the URL of a single server with the same credentials, database and options; its host means nothing.
    """

    nodes: tuple[tuple[str, int], ...]
    service: str
    one: str
    username: str | None = None
    password: str | None = None


def redis_nodes(url: str) -> RedisNodes | None:
    """Of redis+sentinel:// and redis+cluster://, credentials included; None of any other. Raises ValueError."""
    parts = _split(url)
    scheme, _, kind = parts.scheme.partition("+")
    if not kind:
        return None
    address = redis_address(url)
    bare = urlsplit(address.url)
    service, _, database = bare.path.strip("/").partition("/") if kind == "sentinel" else ("", "", "")
    one = urlunsplit((scheme, "node", f"/{database}", bare.query, ""))
    port = 26379 if kind == "sentinel" else 6379
    return RedisNodes(
        tuple(_redis_host(text, port) for text in bare.netloc.split(",")),
        service,
        redis_url_with(one, address.username, address.password),
        address.sentinel_username,
        address.sentinel_password,
    )


def redis_url_with(
    url: str,
    username: str | None,
    password: str | None,
    sentinel_username: str | None = None,
    sentinel_password: str | None = None,
) -> str:
    """The URL with credentials put back, percent-encoded. Secret: for the connection only, never to show."""
    given = zip(_OF_SENTINELS, (sentinel_username, sentinel_password), strict=True)
    for name, value in given if "+sentinel:" in url else ():
        if value:
            url += f"{'&' if '?' in url else '?'}{name}={quote(value, safe='')}"
    if not username and not password:
        return url
    scheme, _, rest = url.partition("://")
    credentials = quote(username or "", safe="")
    if password:
        credentials += ":" + quote(password, safe="")
    return f"{scheme}://{credentials}@{rest}"
