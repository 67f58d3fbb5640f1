"""One HTTP/1.1 connection: writes a call, reads its answer with httptools' parser (llhttp, strict), keeps the limits.

Refused as `malformed`, besides what llhttp refuses: other transfer codings than chunked, chunked under HTTP/1.0, other
versions, a switch of protocols, headers or chunk framing without end. What comes unasked closes the connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import lru_cache
from typing import Final, cast

import httptools

from workers.errors import AttemptFailed, FailureKind
from workers.transport.answers import Collector, check_head, has_body
from workers.transport.lean import Stale
from workers.transport.limits import LATE_S, SPARE_S, UNMET
from workers.transport.types import Answer, Call

MAX_HEADERS: Final = 128
MAX_HEAD_BYTES: Final = 32_768  # of headers, or of chunk framing and trailers with no body in between
_JOINED_BYTES: Final = 65_536  # bodies up to this go out in one write with the head
_H: Final = ord("H")


@lru_cache(maxsize=1024)
def _lowered(name: bytes) -> str:
    return name.decode("latin-1").lower()


class Connection(asyncio.Protocol):
    """Serves one call at a time: `send`, await the future, and look at `usable` before the next.

    `gone` is called once, when the connection is closed; `lost` is done then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, gone: Callable[[Connection], None]) -> None:
        self.loop = loop
        self.lost: asyncio.Future[None] = loop.create_future()
        self.closed = False
        self.idle_since = 0.0
        self._gone = gone
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = 0.0
        self._spared = False  # its limit rang late once
        self._served = 0
        self._busy = False  # with a call whose answer is not whole
        self._keep = False

    @property
    def made(self) -> bool:
        """Was it ever open?"""
        return self._transport is not None

    @property
    def usable(self) -> bool:
        """May it serve another call? Only after a whole answer."""
        return self._keep and not self.closed

    def send(self, call: Call, head: bytes, started: float) -> asyncio.Future[Answer]:
        """Write the request; the future ends with the answer, AttemptFailed or Stale. Cancel it and `close`."""
        assert self._transport is not None
        self._call, self._started = call, started
        self._headers: dict[str, str] = {}
        self._body: Collector | None = None
        self._status = self._fields = self._field_bytes = self._unfruitful = 0
        self._begun = self._interim = self._until_closed = self._keep = False
        self._busy, self._answer = True, self.loop.create_future()
        self._end = started + call.timeouts.attempt
        self._arm(started + call.timeouts.first_byte, "first_byte_timeout")
        body = call.body
        if len(body) <= _JOINED_BYTES:
            self._transport.write(head + body if body else head)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return self._answer

    def close(self) -> None:
        """At once, whatever is under way; for the second time does nothing."""
        if not self.closed:
            self.closed, self._busy = True, False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._transport is not None:
                self._transport.abort()

    def fail(self, failure: AttemptFailed | Stale) -> None:
        """End the call, if there is one, and the connection."""
        if self._busy and not self._answer.done():
            self._answer.set_exception(failure)
        self.close()

    # what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self.closed:  # given up while it was being opened
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._busy:
            self.close()
            return
        if not self._begun:
            self._begun = True
            if data[0] != _H:  # llhttp takes RTSP and ICE for HTTP, and skips empty lines
                self.fail(AttemptFailed("malformed", "not HTTP: the answer does not start with HTTP/1"))
                return
        self._unfruitful += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(AttemptFailed("malformed", f"not HTTP: {error}", headers=self._headers))
        self._look()

    def _look(self) -> None:
        """After each piece: is it over, or may it go on?"""
        if not self._busy:
            if not self._keep:
                self.close()
        elif self._unfruitful > MAX_HEAD_BYTES:
            self.fail(AttemptFailed("malformed", f"over {MAX_HEAD_BYTES} bytes of headers or chunk framing"))
        elif self._status:
            self._arm(self.loop.time() + self._call.timeouts.idle, "idle_timeout")

    def eof_received(self) -> None:
        self._ended(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended(error)
        self._gone(self)
        if not self.lost.done():
            self.lost.set_result(None)

    def _ended(self, error: Exception | None) -> None:
        """The other side closed, or the network broke."""
        why = f"closed ({error})" if error else "closed"
        if not self._busy:
            self.close()
        elif isinstance(error, ssl.SSLError):
            self.fail(AttemptFailed("tls", str(error)))
        elif not self._begun:
            self.fail(Stale(f"{why} before any byte of an answer", reused=self._served > 0))
        elif not self._status:
            self.fail(AttemptFailed("cut", f"{why} within the headers of the answer"))
        elif self._until_closed and error is None:
            self._finish(keep=False)
            self.close()
        else:
            self.fail(AttemptFailed("cut", f"{why} before the body was whole", status=self._status))

    # what the parser calls; an exception here would be wrapped, so failures are set, and the rest is skipped

    def on_message_begin(self) -> None:
        if not self._busy:
            self._keep = False  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._busy:
            return
        self._fields += 1
        self._field_bytes += len(name) + len(value)
        if self._fields > MAX_HEADERS or self._field_bytes > MAX_HEAD_BYTES:
            self.fail(AttemptFailed("malformed", f"over {MAX_HEADERS} headers or {MAX_HEAD_BYTES} bytes of them"))
        elif not self._status:  # else it is a trailer
            key, text, headers = _lowered(name), value.decode("latin-1"), self._headers
            headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def on_headers_complete(self) -> None:
        if not self._busy:
            return
        status, headers, call = self._parser.get_status_code(), self._headers, self._call
        if 100 <= status < 200 and status != 101:
            self._interim = True
            return
        try:
            self._check_framing(status)
            check_head(call, status, headers)
        except AttemptFailed as failure:
            self.fail(failure)
            return
        self._status, self._unfruitful = status, 0
        self._first_byte_after = self.loop.time() - self._started
        self._body = Collector(call, status, headers)
        if call.method == "HEAD":
            self._finish(self._parser.should_keep_alive())
            self._parser = httptools.HttpResponseParser(self)  # this one waits for the body that Content-Length told
        else:
            framed = "content-length" in headers or "transfer-encoding" in headers
            self._until_closed = not framed and has_body(call, status)

    def on_body(self, chunk: bytes) -> None:
        if not self._busy or self._body is None:
            self._keep = False
            return
        self._unfruitful = 0
        try:
            if not self._body.add(chunk):
                self._finish(keep=False)
        except AttemptFailed as failure:
            self.fail(failure)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim, self._headers = False, {}
        elif self._busy:
            self._finish(self._parser.should_keep_alive())

    def _check_framing(self, status: int) -> None:
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0") or status < 100:
            raise AttemptFailed("malformed", f"not HTTP: version {version}, status {status}")
        coding = self._headers.get("transfer-encoding")
        if coding is None:
            return
        if coding.lower() != "chunked" or version == "1.0" or "content-length" in self._headers:
            raise AttemptFailed("malformed", f"the length of the answer is in doubt: transfer-encoding {coding!r}")

    def _finish(self, keep: bool) -> None:
        assert self._transport is not None
        assert self._body is not None
        self._busy = False
        self._served += 1
        # an answer that came before the request was out: the rest of the request would be taken for the next one
        self._keep = keep and not self._transport.get_write_buffer_size()
        if not self._answer.done():
            took = self.loop.time() - self._started
            answer = Answer(self._status, self._headers, self._body.body(), self._first_byte_after, took)
            self._answer.set_result(answer)

    # the limits: one timer for the life of the connection, set anew only if it would ring too late

    def _arm(self, due: float, kind: FailureKind) -> None:
        self._due, self._kind = (due, kind) if due < self._end else (self._end, "attempt_timeout")
        self._spared = False
        if self._timer is None or self._due < self._rings_at:
            if self._timer is not None:
                self._timer.cancel()
            self._rings_at = self._due
            self._timer = self.loop.call_at(self._due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if not self._busy:
            return
        now = self.loop.time()
        if now < self._due:
            self._arm(self._due, self._kind)
        elif now - self._due > LATE_S and not self._spared:
            self._spared = True
            self._rings_at = now + SPARE_S
            self._timer = self.loop.call_at(self._rings_at, self._ring)
        else:
            self.fail(AttemptFailed(self._kind, f"{UNMET[self._kind]} after {now - self._started:.3g} s"))
