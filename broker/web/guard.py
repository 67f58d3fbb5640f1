"""Who may come in, and what every answer carries. An ASGI wrapper around the whole application.

With a token: `Authorization: Bearer` for everything but the open paths. Without one (loopback only): the Host header
must name this machine, so that no foreign name can be pointed at it (DNS rebinding), and what changes something must
be a request that a form on another site cannot send.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.secret import Secret
from broker.web.errors import ApiError, error_body

OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/openapi.json"})
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
READS: Final = ("GET", "HEAD")

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """`hosts`: further names, beside those of loopback, that the Host header may have when there is no token."""

    def __init__(self, app: ASGIApp, token: Secret | None, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._digest = hashlib.sha256(token.reveal().encode()).digest() if token is not None else None
        self._hosts = frozenset(name.lower() for name in (*LOOPBACK_NAMES, *hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            await _refuse(error, with_headers)
            return
        await self._app(scope, receive, with_headers)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._digest is not None:
            if scope["path"] not in OPEN_PATHS:
                self._check_token(self._digest, headers.get("authorization", ""))
            return
        if host_of(headers.get("host", "")) not in self._hosts:
            raise ApiError(403, "foreign_host", "the Host header does not name this machine; set HEADRACE_API_TOKEN")
        if scope["method"] not in READS:
            _check_origin(headers)

    def _check_token(self, digest: bytes, given: str) -> None:
        scheme, _, token = given.partition(" ")
        right = hmac.compare_digest(hashlib.sha256(token.strip().encode("utf-8", "replace")).digest(), digest)
        if scheme.lower() != "bearer" or not right:
            raise ApiError(401, "unauthorized", "give the token: Authorization: Bearer TOKEN (HEADRACE_API_TOKEN)")


def _check_origin(headers: Headers) -> None:
    """Another site's form can send neither header without this server's leave, which it never gives."""
    json_body = headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
    if not json_body and "x-requested-with" not in headers:
        raise ApiError(403, "cross_site", "send Content-Type: application/json, or any X-Requested-With header")
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower():
        raise ApiError(403, "cross_site", "this request comes from another site's page")


def host_of(header: str) -> str:
    """The name in a Host header, lower case, without port or brackets; "" if there is none."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].rstrip(".").lower()


async def _refuse(error: ApiError, send: Send) -> None:
    body = json.dumps(error_body(error.code, str(error))).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="headrace"'))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
