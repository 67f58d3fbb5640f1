"""The application: routes made from the table of operations, errors as JSON, work on Redis off the event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from broker import admin
from broker.catalog import Catalog
from broker.errors import BrokerError, BrokerUnavailable, HeadraceError
from broker.secret import Secret
from broker.store import Store
from broker.web import metrics, npu, pools, reload, tasks
from broker.web.body import read
from broker.web.errors import ApiError, error_body, status_of
from broker.web.guard import Guard
from broker.web.openapi import describe
from broker.web.operations import Api, Operation

log = logging.getLogger("headrace.api")

OPERATIONS: Final = (*pools.OPERATIONS, *tasks.OPERATIONS, *reload.OPERATIONS, *npu.OPERATIONS)
READY_WITHIN_S: Final = 3.0
CODES: Final = {404: "not_found", 405: "method_not_allowed"}


def make_app(store: Store, catalog: Catalog, token: Secret | None, hosts: Collection[str] = ()) -> ASGIApp:
    """The ASGI application. `hosts`: names it may be called by, beside those of loopback, when there is no token."""
    api = Api(store, catalog)
    app = Starlette(
        routes=[*(_route(api, operation) for operation in OPERATIONS), *_plain_routes(api)],
        exception_handlers={HTTPException: _on_http_error, HeadraceError: _on_error, Exception: _on_fault},
    )
    app.router.redirect_slashes = False
    return Guard(app, token, hosts)


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in ASCII; numbers that JSON does not have become null."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value))
    return Response(text, status, headers, "application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _route(api: Api, operation: Operation) -> Route:
    async def endpoint(request: Request) -> Response:
        asked = await read(operation, request)
        if operation.waits:
            waiting: Awaitable[Any] = operation.handler(api, asked)
            value = await waiting
        else:
            value = await _in_thread(lambda: operation.handler(api, asked))
        return answer(value, operation.status)

    return Route(operation.path, endpoint, methods=[operation.method], name=operation.name)


async def _in_thread(work: Callable[[], Any]) -> Any:
    """A caller who goes away, or a limit that ends, does not wait for Redis."""
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)


def _plain_routes(api: Api) -> list[Route]:
    described = json.dumps(describe(OPERATIONS))

    async def livez(request: Request) -> Response:
        return answer({"live": True})

    async def readyz(request: Request) -> Response:
        """Open to all, so it says no more than it must."""
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                await _in_thread(api.store.check)
        except (BrokerUnavailable, TimeoutError):
            return _error(503, "redis_unavailable", "Redis cannot be reached")
        except BrokerError:
            return _error(503, "redis_unsuitable", "Redis must not be used as it is set up; see `headrace doctor`")
        return answer({"ready": True})

    async def scrape(request: Request) -> Response:
        def read_all() -> bytes:
            found = [admin.status(api.store, pool) for pool in admin.pools(api.store)]
            return metrics.exposition(found)

        return Response(await _in_thread(read_all), headers={"content-type": metrics.CONTENT_TYPE})

    async def openapi(request: Request) -> Response:
        return Response(described, media_type="application/json")

    table = {"/livez": livez, "/readyz": readyz, "/metrics": scrape, "/openapi.json": openapi}
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in table.items()]


# Errors


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return answer(error_body(code, message), status, headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: an unknown path, a method that a path does not have."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {str(error.detail).lower()}; see /openapi.json"
    return _error(error.status_code, CODES.get(error.status_code, "refused"), message, dict(error.headers or {}))


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    status, code = status_of(error)
    if status >= 500 and not isinstance(error, ApiError):
        log.warning("%s %s: %s", request.method, request.url.path, error)
    return _error(status, code, str(error))


async def _on_fault(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _error(500, "internal", "this is a fault of headrace; its log has the traceback")
