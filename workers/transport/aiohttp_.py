"""The transport over aiohttp.

What aiohttp does by itself: drops kept connections it knows to be closed; resends GET, HEAD, PUT and DELETE (not POST)
once when a kept connection fails; parses strictly, at most 128 headers of 8 KB. What is enforced here: the resend of
POST, `slots`, all limits but `connect`, the cap on the body, `identity`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Final

import aiohttp
from aiohttp import http_exceptions
from multidict import CIMultiDict
from yarl import URL

from workers.errors import AttemptFailed
from workers.transport.answers import Collector, check_head, has_body, plain_headers
from workers.transport.lean import LeanTransport, Stale, body_of, headers_of, tls_context
from workers.transport.limits import Watch
from workers.transport.types import Answer, Call

DNS_TTL_S: Final = 10
MAX_HEADER_BYTES: Final = 32_768
_READ_BUFFER: Final = 65_536


class AiohttpTransport(LeanTransport):
    """See LeanTransport. Needs only aiohttp."""

    _session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=self.slots,
            keepalive_timeout=self.idle_discard,
            ttl_dns_cache=DNS_TTL_S,
            ssl=tls_context(self.ca_file),
        )
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(_note_new)
        trace.on_connection_reuseconn.append(_note_reused)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None),
            trace_configs=[trace],
            read_bufsize=_READ_BUFFER,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )

    async def _exchange(self, call: Call, watch: Watch, kept: bool) -> Answer:
        session = self._session
        if session is None:
            session = self._session = self._open()
        connection = SimpleNamespace(reused=False, made=False)
        try:
            async with session.request(
                call.method,
                URL(call.url, encoded=True),
                data=body_of(call),
                headers=CIMultiDict(headers_of(call)),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=call.timeouts.connect),
                trace_request_ctx=connection,
            ) as response:
                return await _read(call, response, watch)
        except (aiohttp.ClientError, OSError, http_exceptions.HttpProcessingError) as error:
            raise _translated(error, connection) from error


async def _note_new(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.reused, context.trace_request_ctx.made = False, True


async def _note_reused(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.reused = True


async def _read(call: Call, response: aiohttp.ClientResponse, watch: Watch) -> Answer:
    first_byte_after = watch.heard()
    headers = plain_headers(response.headers.items())
    try:
        check_head(call, response.status, headers)
        collector = Collector(call, response.status, headers)
        if has_body(call, response.status):
            async for chunk in response.content.iter_any():
                watch.heard()
                if not collector.add(chunk):
                    response.close()
                    break
    except AttemptFailed:
        response.close()  # or the unread rest would be read to keep the connection
        raise
    return Answer(response.status, headers, collector.body(), first_byte_after, watch.elapsed())


def _translated(error: Exception, connection: SimpleNamespace) -> AttemptFailed | Stale:
    """aiohttp's exception in our terms. The order matters: its classes overlap."""
    text = str(error) or type(error).__name__
    if isinstance(error, (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError)):
        return AttemptFailed("tls", text)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return AttemptFailed("connect_timeout", "no connection in time")
    if isinstance(error, aiohttp.ClientConnectorError):
        return AttemptFailed("connect", text)
    if isinstance(error, aiohttp.InvalidURL):
        return AttemptFailed("task_error", f"not a URL: {text}")
    if isinstance(error, aiohttp.ClientPayloadError):
        return _payload_failure(error)
    if isinstance(error, aiohttp.ServerDisconnectedError):
        if not isinstance(error.message, str):  # the head of an answer had begun
            return AttemptFailed("cut", "closed within the headers of the answer")
        return Stale("closed before any byte of an answer", connection.reused)
    if isinstance(error, (aiohttp.ClientResponseError, http_exceptions.HttpProcessingError)):
        return AttemptFailed("malformed", f"not HTTP: {getattr(error, 'message', '') or text}")
    if isinstance(error, OSError):
        return Stale(f"connection lost before an answer: {text}", connection.reused)
    return AttemptFailed("cut", text)


def _payload_failure(error: aiohttp.ClientPayloadError) -> AttemptFailed:
    cause = error.__cause__
    if isinstance(cause, http_exceptions.ContentLengthError):
        return AttemptFailed("cut", "closed before the body was whole")
    if isinstance(cause, http_exceptions.TransferEncodingError) and "Not enough data" in str(cause):
        return AttemptFailed("cut", "closed before the last chunk")
    if isinstance(cause, http_exceptions.PayloadEncodingError):
        return AttemptFailed("malformed", f"broken chunks: {cause.message}")
    return AttemptFailed("cut", f"the body broke off: {cause or error}")
