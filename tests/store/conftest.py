"""`any_store`: an empty pool on Valkey, on Redis and on fakeredis, with a clock the test sets. No test may leave a key
behind that has no TTL and is not on the list in broker/keys.py.

`store` and `broker`: the session's server, empty and by its own clock, for tests of what calls the scripts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import cast

import pytest

from broker import Broker
from broker.store import Store
from tests.support.servers import Kind, MissingServer, RealServer, redis_server
from tests.support.snapshot import leaks
from tests.support.stores import CLOCK_KEY, open_store
from tests.support.verbs import Verbs, row


class Servers:
    """Real servers, each started when it is first asked for."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._running: dict[Kind, RealServer] = {}

    def __getitem__(self, kind: Kind) -> RealServer:
        if kind not in self._running:
            try:
                self._running[kind] = self._stack.enter_context(redis_server(kind))
            except MissingServer as error:
                if os.environ.get("CI"):
                    pytest.fail(str(error))
                pytest.skip(str(error))
        return self._running[kind]


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


def _open(servers: Servers, kind: str) -> Iterator[Store]:
    store = open_store("fake" if kind == "fakeredis" else servers[cast(Kind, kind)].unix_url)
    store.redis.flushall()
    yield store
    assert leaks(store, CLOCK_KEY) == []
    store.close()


@pytest.fixture(params=["valkey", "redis", "fakeredis"])
def any_store(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Store]:
    yield from _open(servers, request.param)


@pytest.fixture(params=["valkey", "redis"])
def real_store(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Store]:
    """Not fakeredis: the test needs a server's memory limit, or its speed."""
    yield from _open(servers, request.param)


@pytest.fixture
def verbs(any_store: Store) -> Verbs:
    """A pool with one endpoint `a` of ten slots."""
    verbs = Verbs(any_store)
    verbs.register(row("a", 10))
    return verbs


@pytest.fixture
def store(redis_url: str) -> Iterator[Store]:
    with closing(Store(redis_url)) as store:
        yield store


@pytest.fixture
def broker(redis_url: str) -> Iterator[Broker]:
    with Broker(redis_url) as broker:
        yield broker
