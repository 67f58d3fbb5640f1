"""The transport over pyreqwest (reqwest, hyper and rustls below it).

What it does by itself: drops kept connections it knows to be closed; resends if a kept connection is closed before the
request was written; strict parsing, at most 100 headers. What is enforced here: the resend once it was written,
`slots`, all limits but `connect`, the cap on the body, `identity`.

What it cannot do (0.15): a canceled request runs on in its thread until the endpoint answers or `attempt` has passed,
so cancels and first-byte timeouts do not close the connection. That is why "auto" does not choose it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Final

from pyreqwest import exceptions
from pyreqwest.client import Client, ClientBuilder
from pyreqwest.request import StreamRequest
from pyreqwest.response import Response

from workers.errors import AttemptFailed
from workers.transport.answers import Collector, check_head, has_body, plain_headers
from workers.transport.lean import LeanTransport, Stale, body_of, headers_of
from workers.transport.limits import Watch
from workers.transport.types import Answer, Call

# A kept connection that was closed under us shows at once; what breaks later broke over this request.
STALE_WITHIN_S: Final = 1.0
_READ_BUFFER: Final = 65_536


class PyreqwestTransport(LeanTransport):
    """See LeanTransport. The connect limit is the one of the first call; another value means a new client."""

    _client: Client | None = None
    _connect = 0.0

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _open(self, connect: float) -> Client:
        builder = (
            ClientBuilder()
            .no_proxy()
            .follow_redirects(False)
            .default_cookie_store(False)
            .referer(False)
            .gzip(False)
            .brotli(False)
            .zstd(False)
            .deflate(False)
            .http1_only()
            .connect_timeout(timedelta(seconds=connect))
            .pool_idle_timeout(timedelta(seconds=self.idle_discard))
            .pool_max_idle_per_host(self.slots)
        )
        if self.ca_file is not None:
            builder = builder.add_root_certificate_pem(Path(self.ca_file).read_bytes())
        return builder.build()

    async def _exchange(self, call: Call, watch: Watch, kept: bool) -> Answer:
        client = self._client
        if client is None or self._connect != call.timeouts.connect:
            client = self._client = self._open(call.timeouts.connect)
            self._connect = call.timeouts.connect
        began = watch.elapsed()
        try:
            async with _request(client, call) as response:
                return await _read(call, response, watch)
        except exceptions.PyreqwestError as error:
            raise _translated(error, kept and watch.elapsed() - began < STALE_WITHIN_S) from error


def _request(client: Client, call: Call) -> StreamRequest:
    builder = client.request(call.method, call.url).headers(headers_of(call))
    body = body_of(call)
    if body is not None:
        builder = builder.body_bytes(body)
    # The rest of the limit, for requests that were canceled here and run on there.
    builder = builder.timeout(timedelta(seconds=call.timeouts.attempt + 1.0))
    # Without this the library collects 64 KB before it shows the headers: a slow answer would seem to be none.
    return builder.streamed_read_buffer_limit(0).build_streamed()


def _legible(response: Response) -> Iterable[tuple[str, str]]:
    """Its headers but for values outside ASCII, which the library cannot show."""
    try:
        return list(response.headers.items())
    except ValueError:
        legible = []
        for name in set(response.headers):
            with suppress(ValueError):
                legible += [(name, value) for value in response.get_header_all(name)]
        return legible


async def _read(call: Call, response: Response, watch: Watch) -> Answer:
    first_byte_after = watch.heard()
    headers = plain_headers(_legible(response))
    check_head(call, response.status, headers)
    collector = Collector(call, response.status, headers)
    if has_body(call, response.status):
        reader = response.body_reader
        while (chunk := await reader.read_chunk()) is not None:
            watch.heard()
            if not collector.add(chunk.to_bytes()):
                break
    return Answer(response.status, headers, collector.body(), first_byte_after, watch.elapsed())


_NOT_TLS = re.compile(r"refused|unreachable|dns|reset|timed out", re.IGNORECASE)
_TLS = re.compile(r"certificate|handshake|tls|corrupt message", re.IGNORECASE)
_ENDED = re.compile(r"end of file|unexpected eof|closed|reset|broken pipe", re.IGNORECASE)


def _translated(error: exceptions.PyreqwestError, reused: bool) -> AttemptFailed | Stale:
    """pyreqwest's exception in our terms. Its classes are coarse; the causes hyper and rustls give tell the rest."""
    details = error.details["causes"] if isinstance(error, exceptions.DetailedPyreqwestError) else None
    causes = [cause["message"] for cause in details or ()]
    text = causes[-1] if causes else error.message
    everything = " / ".join(causes)
    if isinstance(error, exceptions.ConnectTimeoutError):
        return AttemptFailed("connect_timeout", "no connection in time")
    if isinstance(error, exceptions.RequestTimeoutError):
        return AttemptFailed("attempt_timeout", text)
    if isinstance(error, exceptions.BuilderError):
        return AttemptFailed("task_error", f"not a request: {text}")
    if "(Connect)" in everything:
        tls = _TLS.search(everything) and not _NOT_TLS.search(text)
        return AttemptFailed("tls" if tls else "connect", text)
    if "(SendRequest)" in everything and isinstance(error, exceptions.NetworkError):
        return Stale(text, reused)
    if isinstance(error, exceptions.ClientClosedError):
        return AttemptFailed("cut", "the transport was closed")
    ended = isinstance(error, exceptions.NetworkError) or ("reading a body" in everything and _ENDED.search(text))
    return AttemptFailed("cut" if ended else "malformed", text)
