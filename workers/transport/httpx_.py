"""The transport over httpx: for httpx.MockTransport in tests, and for any httpx client or transport people bring.

Slow (its pool is linear in the number of connections); not for the hot path. What httpx does by itself: drops kept
connections it sees closed; closes idle ones only when the pool is next used. What is enforced here: the resend, all
limits but `connect`, `slots`, the cap on the body, `identity`, no redirects.
"""

from __future__ import annotations

import ssl
from typing import Final

import httpx

from workers.errors import AttemptFailed
from workers.transport.answers import Collector, check_head, has_body, plain_headers
from workers.transport.lean import IDLE_DISCARD_S, LeanTransport, Stale, body_of, headers_of, tls_context
from workers.transport.limits import Watch
from workers.transport.types import Answer, Call

_NEW: Final = "connection.connect_tcp.complete"
_SENT: Final = "http11.send_request_headers.started"


class HttpxTransport(LeanTransport):
    """See LeanTransport.

    `over` is an httpx.AsyncClient or any httpx.AsyncBaseTransport (httpx.MockTransport too) to send through; it keeps
    its own settings, stays the caller's and is not closed. None makes a plain transport. Of a client, redirects are not
    followed and cookies not sent, whatever it says.
    """

    def __init__(
        self,
        over: httpx.AsyncClient | httpx.AsyncBaseTransport | None = None,
        *,
        slots: int = 100,
        idle_discard: float = IDLE_DISCARD_S,
        ca_file: str | None = None,
    ) -> None:
        super().__init__(slots, idle_discard, ca_file)
        self._over = over
        self._own: httpx.AsyncHTTPTransport | None = None

    async def aclose(self) -> None:
        if self._own is not None:
            await self._own.aclose()

    def _open(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(
            max_connections=self.slots, max_keepalive_connections=self.slots, keepalive_expiry=self.idle_discard
        )
        self._own = httpx.AsyncHTTPTransport(verify=tls_context(self.ca_file), trust_env=False, limits=limits)
        return self._own

    async def _exchange(self, call: Call, watch: Watch, kept: bool) -> Answer:
        seen: set[str] = set()

        async def trace(event: str, _info: object) -> None:
            seen.add(event)

        try:
            response = await self._send(_request(call, trace))
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            reused = _SENT in seen and _NEW not in seen
            raise _unanswered(error, reused) from error
        except _FOREIGN as error:
            raise _translated(error) from error
        try:
            return await _read(call, response, watch)
        except _FOREIGN as error:
            raise _translated(error) from error
        finally:
            await response.aclose()

    async def _send(self, request: httpx.Request) -> httpx.Response:
        over = self._over or self._own or self._open()
        if isinstance(over, httpx.AsyncClient):
            return await over.send(request, stream=True, follow_redirects=False)
        return await over.handle_async_request(request)


def _request(call: Call, trace: object) -> httpx.Request:
    timeouts = {"connect": call.timeouts.connect, "pool": call.timeouts.attempt, "read": None, "write": None}
    return httpx.Request(
        call.method,
        call.url,
        headers=headers_of(call),
        content=body_of(call),
        extensions={"timeout": timeouts, "trace": trace},
    )


async def _read(call: Call, response: httpx.Response, watch: Watch) -> Answer:
    first_byte_after = watch.heard()
    headers = plain_headers(response.headers.multi_items())
    check_head(call, response.status_code, headers)
    collector = Collector(call, response.status_code, headers)
    if has_body(call, response.status_code):
        assert isinstance(response.stream, httpx.AsyncByteStream)
        async for chunk in response.stream:  # not aiter_raw(): a mocked response has been through it already
            watch.heard()
            if not collector.add(chunk):
                break
    return Answer(response.status_code, headers, collector.body(), first_byte_after, watch.elapsed())


_FOREIGN: Final = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ssl.SSLError)


def _unanswered(error: Exception, reused: bool) -> AttemptFailed | Stale:
    """Broken before the headers were in. h11 tells a closed connection by its words alone."""
    text = str(error)
    if isinstance(error, httpx.ConnectError):
        return _translated(error)
    if isinstance(error, httpx.NetworkError) or text.startswith("Server disconnected without"):
        return Stale(f"closed before an answer: {text or type(error).__name__}", reused)
    return _translated(error)


def _translated(error: Exception) -> AttemptFailed:
    """httpx's exception in our terms."""
    text = str(error) or type(error).__name__
    if _is_tls(error):
        return AttemptFailed("tls", text)
    if isinstance(error, (httpx.ConnectTimeout, httpx.PoolTimeout)):
        return AttemptFailed("connect_timeout", "no connection in time")
    if isinstance(error, httpx.ConnectError):
        return AttemptFailed("connect", text)
    if isinstance(error, httpx.TimeoutException):
        return AttemptFailed("idle_timeout", text)
    if isinstance(error, (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError)):
        return AttemptFailed("task_error", f"not a request: {text}")
    if isinstance(error, httpx.RemoteProtocolError) and not text.startswith("peer closed connection"):
        return AttemptFailed("malformed", text)
    return AttemptFailed("cut", text)


def _is_tls(error: Exception) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
