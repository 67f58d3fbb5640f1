"""What overrides the file: the environment, then flags. Later layers win, key by key.

    HEADRACE_CONFIG                 the file to read when no -c is given
    HEADRACE_REDIS_URL, REDIS_URL   redis.url (the first one wins)
    HEADRACE_REDIS_USERNAME         redis.username
    HEADRACE_REDIS_PASSWORD[_FILE]  redis.password, redis.password_file
    HEADRACE_REDIS_SENTINEL_USERNAME, HEADRACE_REDIS_SENTINEL_PASSWORD[_FILE]   redis.sentinel_username, and so on
    HEADRACE_PROCESSES              processes
    HEADRACE_API_TOKEN[_FILE]       api.token, api.token_file
    HEADRACE_LISTEN                 api.host and api.port as HOST:PORT
    HEADRACE_LOG_LEVEL, HEADRACE_LOG_FORMAT   log.level, log.format
    HEADRACE_ENDPOINT               comma-separated URLs, used when the file names no enabled endpoint
    HEADRACE_ENDPOINT_API_KEY[_FILE], HEADRACE_SLOTS   api_key and max_concurrent of those endpoints
    HEADRACE_POOL                   the pool they belong to (default: the file's only pool, else `default`)

An empty variable is an unset one. HEADRACE_PORT and the like are left alone on purpose: Kubernetes sets them for a
service named headrace.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from broker.addresses import endpoint_id, endpoint_url, redis_address
from broker.configfile import Findings, Node, from_python
from broker.errors import Problem
from broker.quoting import UNSAID, key_name, quoted

PREFIX = "HEADRACE_"
DEFAULT_POOL = "default"
KEYS = {
    "REDIS_URL": "redis.url",
    "HEADRACE_REDIS_URL": "redis.url",
    "HEADRACE_REDIS_USERNAME": "redis.username",
    "HEADRACE_REDIS_PASSWORD": "redis.password",
    "HEADRACE_REDIS_PASSWORD_FILE": "redis.password_file",
    "HEADRACE_REDIS_SENTINEL_USERNAME": "redis.sentinel_username",
    "HEADRACE_REDIS_SENTINEL_PASSWORD": "redis.sentinel_password",
    "HEADRACE_REDIS_SENTINEL_PASSWORD_FILE": "redis.sentinel_password_file",
    "HEADRACE_PROCESSES": "processes",
    "HEADRACE_API_TOKEN": "api.token",
    "HEADRACE_API_TOKEN_FILE": "api.token_file",
    "HEADRACE_LOG_LEVEL": "log.level",
    "HEADRACE_LOG_FORMAT": "log.format",
}
OTHERS = (
    "HEADRACE_CONFIG", "HEADRACE_LISTEN", "HEADRACE_ENDPOINT", "HEADRACE_ENDPOINT_API_KEY",
    "HEADRACE_ENDPOINT_API_KEY_FILE", "HEADRACE_SLOTS", "HEADRACE_POOL",
)  # fmt: skip
_FROM_KUBERNETES = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_\w+)")
_LISTEN = re.compile(r"(?:(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]*):)?(\d{1,5})")


def apply_environ(tree: Node, environ: Mapping[str, str], findings: Findings) -> None:
    """Lays the variables over the tree, in place."""
    given: dict[str, Node] = {}
    for name, key in KEYS.items():
        if value := environ.get(name):
            given[key] = from_python(value, key, f"environment {name}")
    if listen := environ.get("HEADRACE_LISTEN"):
        match = _LISTEN.fullmatch(listen)
        if match is None:
            place = "environment HEADRACE_LISTEN"
            message = f"must be HOST:PORT, such as 127.0.0.1:8080, not {quoted(listen) or UNSAID}"
            findings.problems.append(Problem(place, None, "", message))
        else:
            host, port = match[1], match[2]
            given["api.port"] = from_python(port, "api.port", "environment HEADRACE_LISTEN")
            if host:
                given["api.host"] = from_python(host.strip("[]"), "api.host", "environment HEADRACE_LISTEN")
    _lay_over(tree, given)
    _warn_of_slips(environ, findings)


def apply_overrides(tree: Node, overrides: Mapping[str, Any], findings: Findings) -> None:
    """Lays flags over the tree, in place. Dotted keys; `pools.*.retry.max_attempts` means every pool; None is unset."""
    given: dict[str, Node] = {}
    for key, value in overrides.items():
        if value is None:
            continue
        node = from_python(value, key, "command line")
        if not key.startswith("pools.*."):
            given[key] = node
            continue
        for name in _pools(tree):
            rest = key.removeprefix("pools.*.")
            given[f"pools.{name}.{rest}"] = from_python(value, f"pools.{key_name(name)}.{rest}", "command line")
    _lay_over(tree, given)


def _lay_over(tree: Node, given: Mapping[str, Node]) -> None:
    for key in given:
        # a secret and its _file are two spellings of one setting
        for other in (key.removesuffix("_file"), f"{key}_file"):
            if other != key and other not in given:
                _drop(tree, other)
    url = given.get("redis.url")
    for kind in _passwords(url) if url is not None else ():
        for key in (f"redis.{kind}password", f"redis.{kind}password_file", f"redis.{kind}username"):
            if key not in given:
                _drop(tree, key)
    for key, node in given.items():
        _set(tree, key, node)


def _passwords(node: Node) -> list[str]:
    """Which passwords a Redis URL has: "" the servers', "sentinel_" the Sentinels'."""
    try:
        address = redis_address(str(node.value))
    except ValueError:
        return []
    return [kind for kind in ("", "sentinel_") if getattr(address, f"{kind}password") is not None]


def _pools(tree: Node) -> dict[str, Node]:
    pools = tree.value.get("pools") if isinstance(tree.value, dict) else None
    return pools.value if pools is not None and isinstance(pools.value, dict) else {}


def _split(tree: Node, key: str) -> list[str]:
    """The steps of a dotted key; a pool's name may contain dots, so known names are matched first."""
    if key.startswith("pools."):
        rest = key.removeprefix("pools.")
        for name in sorted(_pools(tree), key=len, reverse=True):
            if rest == name or rest.startswith(f"{name}."):
                return ["pools", name, *(step for step in rest[len(name) + 1 :].split(".") if step)]
    return key.split(".")


def _drop(tree: Node, key: str) -> None:
    *folders, name = _split(tree, key)
    place: Node | None = tree
    for folder in folders:
        place = place.value.get(folder) if place is not None and isinstance(place.value, dict) else None
    if place is not None and isinstance(place.value, dict):
        place.value.pop(name, None)


def _set(tree: Node, key: str, node: Node) -> None:
    *folders, name = _split(tree, key)
    place = tree
    for folder in folders:
        if not isinstance(place.value, dict):
            return  # reported when it is read
        child = place.value.get(folder)
        if child is None or child.value is None:
            child = place.value[folder] = Node({}, place.child_key(folder), node.file)
        place = child
    if isinstance(place.value, dict):
        place.value[name] = node


def _warn_of_slips(environ: Mapping[str, str], findings: Findings) -> None:
    known = [name.removeprefix(PREFIX) for name in (*KEYS, *OTHERS) if name.startswith(PREFIX)]
    for name in sorted(environ):
        rest = name.removeprefix(PREFIX)
        if not name.startswith(PREFIX) or rest in known or _FROM_KUBERNETES.fullmatch(name):
            continue
        if close := difflib.get_close_matches(rest, known, n=1, cutoff=0.8):
            findings.warnings.append(f"environment {name}: not used; did you mean {PREFIX}{close[0]}?")


def single_endpoint(tree: Node, environ: Mapping[str, str], findings: Findings) -> None:
    """Single-endpoint mode: HEADRACE_ENDPOINT serves when the file names no enabled endpoint, with a warning."""
    urls = [url.strip() for url in environ.get("HEADRACE_ENDPOINT", "").split(",") if url.strip()]
    if not urls:
        return
    place = "environment HEADRACE_ENDPOINT"
    pools = _pools(tree)
    served = [name for name, pool in pools.items() if _has_enabled(pool)]
    if served:
        findings.warnings.append(
            f"{place}: not used, there are enabled endpoints in pool {', '.join(map(key_name, served))}"
        )
        return
    name = environ.get("HEADRACE_POOL") or (next(iter(pools)) if len(pools) == 1 else DEFAULT_POOL)
    if len(pools) > 1 and not environ.get("HEADRACE_POOL"):
        message = f"no pool has an enabled endpoint; name one of {', '.join(map(key_name, pools))} in HEADRACE_POOL"
        findings.problems.append(Problem(place, None, "", message))
        return
    common = {
        "api_key": environ.get("HEADRACE_ENDPOINT_API_KEY") or None,
        "api_key_file": environ.get("HEADRACE_ENDPOINT_API_KEY_FILE") or None,
        "max_concurrent": environ.get("HEADRACE_SLOTS") or None,
    }
    add_endpoints(tree, name, urls, common, place)
    findings.warnings.append(f"{place}: single-endpoint mode, {len(urls)} endpoint(s) in pool {key_name(name)!r}")


def _has_enabled(pool: Node) -> bool:
    endpoints = pool.value.get("endpoints") if isinstance(pool.value, dict) else None
    for endpoint in endpoints.children() if endpoints is not None else []:
        switch = endpoint.value.get("enabled") if isinstance(endpoint.value, dict) else None
        if switch is None or switch.value is not False:
            return True
    return False


def add_endpoints(tree: Node, pool: str, urls: Sequence[str], common: Mapping[str, Any], place: str) -> None:
    """Adds an endpoint for each URL to the pool, its id made of host and port. The pool is made if need be."""
    if not isinstance(tree.value, dict):
        return
    pools = tree.value.setdefault("pools", Node({}, "pools", place))
    if pools.value is None:
        pools.value = {}
    if not isinstance(pools.value, dict):
        return
    node = pools.value.setdefault(pool, Node({}, pools.child_key(pool), place))
    if node.value is None:
        node.value = {}
    if not isinstance(node.value, dict):
        return
    endpoints = node.value.setdefault("endpoints", Node([], node.child_key("endpoints"), place))
    if endpoints.value is None:
        endpoints.value = []
    if isinstance(endpoints.value, list):
        taken = _ids(tree)
        for url in urls:
            key = f"{endpoints.key}[{len(endpoints.value)}]"
            values = {name: value for name, value in common.items() if value is not None}
            endpoints.value.append(from_python({"id": _fresh_id(url, taken), "url": url, **values}, key, place))


def _ids(tree: Node) -> set[str]:
    found = set()
    for pool in _pools(tree).values():
        endpoints = pool.value.get("endpoints") if isinstance(pool.value, dict) else None
        for endpoint in endpoints.children() if endpoints is not None else []:
            name = endpoint.value.get("id") if isinstance(endpoint.value, dict) else None
            if name is not None:
                found.add(name.value if isinstance(name.value, str) else name.raw)
    return found


def _fresh_id(url: str, taken: set[str]) -> str:
    try:
        base = endpoint_id(endpoint_url(url))
    except ValueError:
        base = "endpoint"  # the URL is reported when it is read
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base[:60]}-{count}"
    taken.add(name)
    return name
