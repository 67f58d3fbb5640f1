"""The application: routes made from the table of operations, errors as JSON, work on Redis off the event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

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

T = TypeVar("T")

log = logging.getLogger("headrace.api")

OPERATIONS: Final = (*pools.OPERATIONS, *tasks.OPERATIONS, *reload.OPERATIONS, *npu.OPERATIONS)
READY_WITHIN_S: Final = 3.0
ANSWER_WITHIN_S: Final = 10.0
BULK_WITHIN_S: Final = 300.0  # for what may go through a whole queue; a Redis that hangs ends it sooner
AT_ONCE: Final = 32  # requests that are at work on Redis; the others wait their turn, within their time
CODES: Final = {404: "not_found", 405: "method_not_allowed"}


def make_app(
    store: Store,
    catalog: Catalog,
    token: Secret | None,
    hosts: Collection[str] = (),
    *,
    within: float = ANSWER_WITHIN_S,
) -> ASGIApp:
    """The ASGI application.

    hosts   names it may be called by, beside those of loopback, when there is no token
    within  seconds after which a request is answered with 503, whatever Redis does
    """
    api, desk = Api(store, catalog), Desk(within)
    app = Starlette(
        routes=[*(_route(api, desk, operation) for operation in OPERATIONS), *_plain_routes(api, desk)],
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


class Desk:
    """Where requests are worked on: in a thread each, not too many at once, and not for ever.

    A thread cannot be stopped; one that Redis keeps waiting ends by the timeouts of its connection, and is counted
    until then.
    """

    def __init__(self, within: float) -> None:
        self.within = within
        self._threads = ThreadPoolExecutor(AT_ONCE, "api")

    async def work(self, work: Callable[[], T]) -> T:
        """A caller who goes away, or a limit that ends, does not wait for Redis."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def answered(self, waiting: Awaitable[T], seconds: float = 0.0) -> T:
        """Raises ApiError after so many seconds (0: as many as any answer may take)."""
        limit = seconds or self.within
        try:
            async with asyncio.timeout(limit):
                return await waiting
        except TimeoutError:
            message = f"Redis did not answer within {limit:g} s: it hangs, or has too much to do; see `headrace doctor`"
            raise ApiError(503, "redis_unavailable", message) from None


def _route(api: Api, desk: Desk, operation: Operation) -> Route:
    async def endpoint(request: Request) -> Response:
        asked = await read(operation, request)
        if operation.waits:
            value = await desk.answered(operation.handler(api, asked))
        else:
            seconds = BULK_WITHIN_S if operation.bulk else 0.0
            value = await desk.answered(desk.work(lambda: operation.handler(api, asked)), seconds)
        return answer(value, operation.status)

    return Route(operation.path, endpoint, methods=[operation.method], name=operation.name)


def _plain_routes(api: Api, desk: Desk) -> list[Route]:
    described = json.dumps(describe(OPERATIONS))

    async def livez(request: Request) -> Response:
        return answer({"live": True})

    async def readyz(request: Request) -> Response:
        """Open to all, so it says no more than it must."""
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                await desk.work(api.store.check)
        except (BrokerUnavailable, TimeoutError):
            return _error(503, "redis_unavailable", "Redis cannot be reached")
        except BrokerError:
            return _error(503, "redis_unsuitable", "Redis must not be used as it is set up; see `headrace doctor`")
        return answer({"ready": True})

    async def scrape(request: Request) -> Response:
        def read_all() -> bytes:
            found = [admin.status(api.store, pool) for pool in admin.pools(api.store)]
            return metrics.exposition(found)

        return Response(await desk.answered(desk.work(read_all)), headers={"content-type": metrics.CONTENT_TYPE})

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
