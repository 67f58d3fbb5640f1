"""What the transports share: lanes, limits, the one silent resend, the checks. A library brings only `_exchange`."""

from __future__ import annotations

import abc
import re
import ssl
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from workers.errors import AttemptFailed
from workers.transport.answers import check_whole
from workers.transport.limits import Lanes, Watch
from workers.transport.types import Answer, Call

USER_AGENT: Final = "headrace"
IDLE_DISCARD_S: Final = 4.0  # servers commonly drop idle connections after 5 s
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LINE_ENDS: Final = ("\r", "\n", "\0")
_BODY_METHODS: Final = frozenset({"POST", "PUT", "PATCH"})
OURS: Final = frozenset({"accept-encoding", "host", "content-length", "transfer-encoding", "connection", "expect"})


class Stale(Exception):
    """The connection was closed before any byte of an answer. `reused`: it had served another call before."""

    def __init__(self, detail: str, reused: bool) -> None:
        super().__init__(detail)
        self.detail, self.reused = detail, reused


class LeanTransport(abc.ABC):
    """A transport over some HTTP library.

    slots         connections at most
    idle_discard  seconds after which an idle connection is used no more
    ca_file       PEM file of further authorities to trust; None trusts the usual ones only
    """

    def __init__(self, slots: int, idle_discard: float = IDLE_DISCARD_S, ca_file: str | None = None) -> None:
        if slots < 1:
            raise ValueError(f"slots {slots}: must be 1 or more")
        self.slots, self.idle_discard, self.ca_file = slots, idle_discard, ca_file
        self.keep = slots  # not kept to here: the libraries decide
        self._lanes = Lanes(slots, idle_discard)

    async def send(self, call: Call) -> Answer:
        _check_host(call.url)
        with Watch(call.timeouts) as watch:
            kept = await self._lanes.enter()
            reusable = False
            try:
                answer = await self._tried_twice(call, watch, kept)
                reusable = answer.headers.get("connection", "").lower() != "close"
                return check_whole(answer)
            finally:
                self._lanes.leave(reusable)

    async def _tried_twice(self, call: Call, watch: Watch, kept: bool) -> Answer:
        try:
            return await self._exchange(call, watch, kept)
        except Stale as stale:
            if not stale.reused:
                raise AttemptFailed("cut", stale.detail) from stale
        try:
            return await self._exchange(call, watch, kept)
        except Stale as stale:
            raise AttemptFailed("cut", f"{stale.detail}, and so again on the resend") from stale

    @abc.abstractmethod
    async def _exchange(self, call: Call, watch: Watch, kept: bool) -> Answer:
        """Send once. Raises AttemptFailed, or Stale. `kept`: an idle connection may be there."""

    @abc.abstractmethod
    async def aclose(self) -> None: ...


def ascii_host(name: str) -> str:
    """As resolvers are asked for it. A name that cannot exist is the fault of the endpoint's address, not the task's.

    Raises AttemptFailed `connect`.
    """
    try:
        return name.encode("idna").decode("ascii")
    except UnicodeError:
        raise AttemptFailed("connect", "its host is no name that can exist; correct the endpoint's url") from None


@lru_cache(maxsize=1024)
def _check_host(url: str) -> None:
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return  # each library says what is wrong with it
    if ":" not in name:
        ascii_host(name)


def headers_of(call: Call) -> list[tuple[str, str]]:
    """The headers to send: the call's, without those that belong to the connection, and ours.

    Raises AttemptFailed `task_error` for one that could become two: libraries differ in what they say of it, and some
    repeat its value, which may be a key.
    """
    for name, value in call.headers:
        if not _HEADER_NAME.fullmatch(name):
            raise AttemptFailed("task_error", f"not the name of a header: {name!r}")
        if any(end in value for end in _LINE_ENDS):
            raise AttemptFailed("task_error", f"the value of header {name} holds a line end or a NUL")
    headers = [(name, value) for name, value in call.headers if name.lower() not in OURS]
    headers.append(("Accept-Encoding", "identity"))
    if not any(name.lower() == "user-agent" for name, _ in headers):
        headers.append(("User-Agent", USER_AGENT))
    return headers


def body_of(call: Call) -> bytes | None:
    """The body to send; None sends none."""
    return call.body if call.body or call.method in _BODY_METHODS else None


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context
