"""Redis hangs: every route answers all the same, and in time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx

from broker.config import Config
from broker.store import Store
from broker.web.app import AT_ONCE, OPERATIONS
from tests.support.api import api_server, good, refused
from tests.support.player import register
from tests.support.servers import redis_server

# What goes through a whole queue is bounded by the timeouts of the connection.
ROUTES = [
    (operation.method, operation.path.format(pool="npu", endpoint="vm1", task="t1"))
    for operation in OPERATIONS
    if not operation.bulk
]
BODIES = {"/api/pools/npu/endpoints": {"url": "http://127.0.0.1:1"}}


def send(client: httpx.Client, method: str, path: str) -> httpx.Response:
    return client.request(method, path, json=BODIES.get(path, {}) if method == "POST" else None)


def test_every_route_answers_while_redis_hangs(config: Config) -> None:
    with redis_server("valkey") as server, closing(Store(server.url)) as store:
        register(store, "npu")
        with api_server(store, config, within=1.0) as client, ThreadPoolExecutor(len(ROUTES) + 1) as callers:
            assert good(client.get("/readyz")) == {"ready": True}
            server.pause()
            try:
                routes = [*ROUTES, ("GET", "/metrics")]
                for response in callers.map(lambda route: send(client, *route), routes):
                    assert "did not answer within 1 s" in refused(response, 503, "redis_unavailable")
            finally:
                server.resume()
            assert good(client.get("/api/pools"))["pools"]


def test_more_requests_than_threads_are_answered_too(config: Config) -> None:
    """They wait for a thread within their time; one that was not begun is not begun later."""
    with redis_server("valkey") as server, closing(Store(server.url)) as store:
        register(store, "npu")
        count = 2 * AT_ONCE
        with api_server(store, config, within=1.0) as client, ThreadPoolExecutor(count) as callers:
            server.pause()
            try:
                for response in callers.map(lambda _: client.get("/api/pools"), range(count)):
                    refused(response, 503, "redis_unavailable")
                assert good(client.get("/livez")) == {"live": True}
            finally:
                server.resume()
            assert good(client.get("/api/pools"))["pools"]
