"""A call as the bytes that go out, checked so that nothing in it can become a second header or a second request."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

from workers.errors import AttemptFailed
from workers.transport.lean import OURS, USER_AGENT, ascii_host, body_of
from workers.transport.types import Call

_URL: Final = re.compile(
    r"(?i:(?P<scheme>https?))://(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<name>[^\s/?\#@:\[\]]+))(?::(?P<port>\d{1,5}))?"
    r"(?P<target>[/?][!-\"$-~]*)?(?:\#[!-~]*)?"
)
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_AGENT: Final = f"User-Agent: {USER_AGENT}\r\n"


class Origin(NamedTuple):
    """Where connections go. `host` is a name or an address without brackets."""

    tls: bool
    host: str
    port: int


@lru_cache(maxsize=1024)
def begin(method: str, url: str) -> tuple[Origin, str]:
    """Whom to ask, and the request's first lines. Raises AttemptFailed `task_error`."""
    found = _URL.fullmatch(url)
    if found is None or int(found["port"] or 1) > 65_535:
        raise AttemptFailed("task_error", "not a URL: it must be http or https, absolute and percent-encoded")
    if not _TOKEN.fullmatch(method) or method == "CONNECT":
        raise AttemptFailed("task_error", f"not a method: {method!r}")
    tls = found["scheme"].lower() == "https"
    host = found["six"] or ascii_host(found["name"])
    usual = 443 if tls else 80
    port = int(found["port"] or usual)
    shown = (f"[{host}]" if found["six"] else host) + ("" if port == usual else f":{port}")
    target = found["target"] or "/"
    if target[0] == "?":
        target = f"/{target}"
    return Origin(tls, host, port), f"{method} {target} HTTP/1.1\r\nHost: {shown}\r\nAccept-Encoding: identity\r\n"


@lru_cache(maxsize=1024)
def _field(name: str) -> tuple[str, bool]:
    """What stands before its value, "" for a header that is ours to send; and whether it is the User-Agent."""
    if not _TOKEN.fullmatch(name):
        raise AttemptFailed("task_error", f"not the name of a header: {name!r}")
    lowered = name.lower()
    return ("" if lowered in OURS else f"{name}: "), lowered == "user-agent"


def head_of(call: Call, begun: str) -> bytes:
    """Everything before the body; `begun` comes from `begin`. Raises AttemptFailed `task_error`."""
    parts = [begun]
    agent = _AGENT
    lines = 4  # method, host, encoding, the empty one
    for name, value in call.headers:
        prefix, is_agent = _field(name)
        if prefix:
            parts.append(f"{prefix}{value}\r\n")
            lines += 1
            if is_agent:
                agent = ""
    if agent:
        parts.append(agent)
        lines += 1
    body = body_of(call)
    if body is not None:
        parts.append(f"Content-Length: {len(body)}\r\n")
        lines += 1
    parts.append("\r\n")
    head = "".join(parts)
    if head.count("\n") != lines or head.count("\r") != lines or "\0" in head:
        raise AttemptFailed("task_error", "a header's value holds a line end or a NUL")
    try:
        return head.encode()
    except UnicodeEncodeError:
        raise AttemptFailed("task_error", "a header's value is not Unicode text") from None
