"""How an attempt can fail, and what follows: one table, read by retry, breaker and history.

Foreign exceptions become an AttemptFailed in the transport, statuses here, applications' own errors in the adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import Final, Literal

from broker.errors import EndpointError

FailureKind = Literal[
    "connect",  # refused, unreachable, no such name
    "connect_timeout",
    "first_byte_timeout",
    "idle_timeout",  # between two chunks
    "attempt_timeout",  # the pool's limit for the whole attempt
    "own_timeout",  # the task's own, shorter limit for the whole attempt
    "cut",  # closed before the answer was whole
    "malformed",  # not HTTP, or not what its headers said
    "tls",
    "redirect",
    "http_5xx",
    "rate_limited",  # 429
    "http_4xx",
    "auth",  # 401, 403
    "again",  # 408, 409, 425
    "too_large",  # the answer is over the pool's result limit
    "task_error",  # the work cannot become a request
    "app_error",  # a 200 whose body says that it failed
]
Fault = Literal["task", "endpoint", "none"]
Action = Literal["retry", "dead_letter", "pause"]
BreakerEffect = Literal["count", "open", "ignore"]

DEFAULT_PAUSE_S: Final = 1.0
MIN_PAUSE_S: Final = 0.5  # `Retry-After: 0` asks for a spin, which no attempt would ever end
MAX_RETRY_AFTER_S: Final = 600.0  # as long as the breaker's longest cooldown; then it is asked again
MAX_DETAIL_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class Rule:
    """What follows from a kind of failure.

    fault    whose: 'task', 'endpoint', or 'none' (nobody's, or it cannot be told)
    action   'retry' (counts an attempt, elsewhere if possible), 'dead_letter' (at once), or 'pause' (the endpoint takes
             nothing for a while; the task goes back and no attempt is counted)
    breaker  'count' (towards opening), 'open' (at once), 'ignore'
    """

    fault: Fault
    action: Action
    breaker: BreakerEffect


_ENDPOINT = Rule("endpoint", "retry", "count")
_TASK = Rule("task", "dead_letter", "ignore")
_UNDECIDED = Rule("none", "retry", "ignore")

RULES: Final[Mapping[FailureKind, Rule]] = MappingProxyType(
    {
        "connect": _ENDPOINT,
        "connect_timeout": _ENDPOINT,
        "first_byte_timeout": _ENDPOINT,
        "idle_timeout": _ENDPOINT,
        "attempt_timeout": _ENDPOINT,
        # A few tasks with a limit no endpoint can meet must not take every endpoint out.
        "own_timeout": _UNDECIDED,
        "cut": _ENDPOINT,
        "malformed": _ENDPOINT,
        "tls": _ENDPOINT,
        # Never followed: that would send the endpoint's key elsewhere. One endpoint behind a login page must not turn
        # a whole queue into dead letters.
        "redirect": _ENDPOINT,
        "http_5xx": _ENDPOINT,
        "rate_limited": Rule("none", "pause", "ignore"),
        "http_4xx": _TASK,
        # Our key is wrong there, for every task.
        "auth": Rule("endpoint", "retry", "open"),
        "again": _UNDECIDED,
        # Whose fault cannot be told from one answer; an endpoint that sends nothing else must not get the whole queue.
        "too_large": _ENDPOINT,
        "task_error": _TASK,
        # The body does not tell a bad input from a bad server, and bad inputs must not open breakers.
        "app_error": _UNDECIDED,
    }
)


class AttemptFailed(EndpointError):
    """One attempt failed.

    kind         see FailureKind; `rule` is its row in RULES
    detail       one line, without payload
    status       of the answer, None if there was none
    retry_after  seconds the endpoint asked for, None if it did not
    body         of the answer, b"" if there was none
    headers      of the answer, names lower-cased
    """

    def __init__(
        self,
        kind: FailureKind,
        detail: str = "",
        *,
        status: int | None = None,
        retry_after: float | None = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.kind: FailureKind = kind
        self.detail = one_line(detail)
        self.status = status
        self.retry_after = retry_after
        self.body = body
        self.headers: Mapping[str, str] = {} if headers is None else headers
        super().__init__(f"{kind}: {self.detail}" if self.detail else kind)

    @property
    def rule(self) -> Rule:
        return RULES[self.kind]

    def __reduce__(self) -> tuple[object, ...]:  # keyword-only fields do not survive BaseException's own
        return (_rebuild, (self.kind, self.detail, self.status, self.retry_after, self.body, dict(self.headers)))


def _rebuild(
    kind: FailureKind,
    detail: str,
    status: int | None,
    retry_after: float | None,
    body: bytes,
    headers: Mapping[str, str],
) -> AttemptFailed:
    return AttemptFailed(kind, detail, status=status, retry_after=retry_after, body=body, headers=headers)


def one_line(text: str, limit: int = MAX_DETAIL_CHARS) -> str:
    """The text on one line, unprintable characters as '?', at most `limit` characters."""
    line = " ".join(text[: 4 * limit].split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= limit else line[: limit - 3] + "..."


_AGAIN = frozenset({408, 409, 425})
_AUTH = frozenset({401, 403})

_REMEDIES: Final[Mapping[FailureKind, str]] = MappingProxyType(
    {
        "auth": ": the endpoint refuses our key; check its api_key, hmac_secret or headers",
        "redirect": ": redirects are not followed; correct the endpoint's url or the task's path",
        "malformed": ": not a final HTTP status",
    }
)


def classify_status(status: int) -> FailureKind | None:
    """What a final status means; None for a success (2xx). The answer's headers never change it."""
    if 200 <= status < 300:
        return None
    if 500 <= status < 600:
        return "http_5xx"
    if status == 429:
        return "rate_limited"
    if status in _AUTH:
        return "auth"
    if status in _AGAIN:
        return "again"
    if 400 <= status < 500:
        return "http_4xx"
    if 300 <= status < 400:
        return "redirect"
    return "malformed"


def status_failure(status: int, headers: Mapping[str, str], body: bytes, now: float) -> AttemptFailed | None:
    """The failure that an answer's status and headers tell of, None for a success. `now` in Unix seconds."""
    kind = classify_status(status)
    if kind is None:
        return None
    detail = f"status {status}" + _REMEDIES.get(kind, "")
    return AttemptFailed(
        kind, detail, status=status, retry_after=parse_retry_after(headers, now), body=body, headers=headers
    )


def parse_retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds the answer asks us to wait: 0 to 600. None without the header, or if it cannot be read.

    `headers` with lower-cased names; `now` in Unix seconds. Takes whole or fractional seconds, or an HTTP date.
    """
    value = headers.get("retry-after", "").strip()
    if not value or not value.isascii():
        return None
    seconds = _seconds(value)
    if seconds is None:
        seconds = _until_date(value, now)
    return None if seconds is None else min(max(seconds, 0.0), MAX_RETRY_AFTER_S)


def _seconds(value: str) -> float | None:
    if not value.replace(".", "", 1).isdigit():
        return None
    return float(value)


def _until_date(value: str, now: float) -> float | None:
    try:
        return parsedate_to_datetime(value).timestamp() - now
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
