"""A client and its connection: lost replies, restarts, forks, servers that are away or unfit, the embedded one."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from broker import (
    AsyncBroker,
    Broker,
    BrokerError,
    BrokerUnavailable,
    Result,
    ResultTimeout,
)
from broker.core import SILENCE
from broker.errors import BrokerUnsuitable
from broker.scripts import load
from broker.store import Store
from tests.support.player import register, serve, serving
from tests.support.producer import POOL, ask, numbers, run_async, waiting
from tests.support.proxy import reply_dropper
from tests.support.servers import MissingServer, RealServer, redis_server


@contextmanager
def through_proxy(server: RealServer) -> Iterator[Any]:
    with reply_dropper(server.port) as proxy:
        yield proxy


@pytest.mark.parametrize("many", [1, 600])
def test_an_enqueue_whose_reply_is_lost_is_queued_once(
    server: RealServer, redis_url: str, store: Store, many: int
) -> None:
    """S24."""
    with through_proxy(server) as proxy, Broker(proxy.url) as broker:
        broker.enqueue("warm", ask())
        proxy.drop(load("enqueue").sha.encode())
        tasks = broker.enqueue_many(POOL, [ask(n) for n in range(many)])
        assert proxy.dropped == 1
        assert waiting(store) == [task.id for task in tasks]


def test_an_async_enqueue_whose_reply_is_lost_is_queued_once(server: RealServer, redis_url: str, store: Store) -> None:
    async def use(broker: AsyncBroker) -> str:
        await broker.enqueue("warm", ask())
        proxy.drop(load("enqueue").sha.encode(), times=2)
        return (await broker.enqueue(POOL, ask())).id

    with through_proxy(server) as proxy:
        task_id = run_async(proxy.url, use)
        assert proxy.dropped == 2
    assert waiting(store) == [task_id]


def test_results_survive_lost_replies_of_pops(
    monkeypatch: pytest.MonkeyPatch, server: RealServer, redis_url: str
) -> None:
    monkeypatch.setattr("broker.mapping.SILENCE", 0.2)
    with through_proxy(server) as proxy, Broker(proxy.url) as broker, serving(redis_url, POOL, most=5):
        proxy.drop(b"BLMPOP", times=3)
        assert sorted(numbers(broker.map(POOL, (ask(n) for n in range(200)), window=20, timeout=8))) == list(range(200))
        assert proxy.dropped == 3


def test_waiting_outlives_a_restart_of_the_server() -> None:
    with redis_server(config={"appendonly": "yes", "appendfsync": "always"}) as own, Broker(own.url) as broker:
        store = Store(own.url)
        task = broker.enqueue(POOL, ask())
        results: list[Result] = []
        waiter = threading.Thread(target=lambda: results.append(task.result(timeout=30)))
        waiter.start()
        own.restart()
        register(store, POOL)
        while not serve(store, POOL):
            pass
        waiter.join(20)
        assert [result.json() for result in results] == [{"n": 1}]
        store.close()


def test_a_server_that_is_not_there_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.client.PATIENCE", 0.2)
    monkeypatch.setattr("broker.asyncclient.PATIENCE", 0.2)
    url = "redis://user:secret@127.0.0.1:1/0"
    with Broker(url) as broker, pytest.raises(BrokerUnavailable, match="is it running") as missing:
        broker.enqueue(POOL, ask())
    assert "secret" not in str(missing.value)
    assert "\n" not in str(missing.value)
    assert "secret" not in repr(broker)
    with pytest.raises(BrokerUnavailable, match="is it running"):
        run_async(url, lambda broker: broker.enqueue(POOL, ask()))
    with pytest.raises(BrokerUnsuitable, match="must be 'embedded' or start with"):
        Broker("http://localhost")


def test_a_server_that_evicts_is_refused(redis_url: str) -> None:
    with redis_server(config={"maxmemory-policy": "allkeys-lru"}) as evicting:
        with Broker(evicting.url) as broker, pytest.raises(BrokerUnsuitable, match="noeviction"):
            broker.enqueue(POOL, ask())
        with pytest.raises(BrokerUnsuitable, match="noeviction"):
            run_async(evicting.url, lambda broker: broker.enqueue(POOL, ask()))


def test_a_closed_broker_says_so(redis_url: str) -> None:
    broker = Broker(redis_url)
    broker.close()
    with pytest.raises(BrokerError, match="closed"):
        broker.enqueue(POOL, ask())


def _child(broker: Broker, task_id: str, pipe: Any) -> None:
    own = broker.enqueue(POOL, ask("child"))
    with suppress(ResultTimeout):
        broker.task(POOL, task_id).result(timeout=0)  # from here on it is watched
    pipe.send("waiting")
    pipe.send((own.id, broker.task(POOL, task_id).result(timeout=10).json()))
    broker.close()
    pipe.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking beside threads is the point
def test_a_forked_child_uses_connections_of_its_own(redis_url: str, broker: Broker) -> None:
    task = broker.enqueue(POOL, ask("parent"))
    never = broker.enqueue("other", ask())
    waiter = threading.Thread(target=lambda: never.result(raise_on_failure=False))
    waiter.start()  # a child with our mailbox would lose its messages to this one
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_child, args=(broker, task.id, theirs))
    child.start()
    assert ours.poll(10)
    assert ours.recv() == "waiting"
    with serving(redis_url, POOL):
        assert ours.poll(SILENCE - 0.5), "the child gave no answer, or only when it looked by itself"
        child_id, result = ours.recv()
        assert result == {"n": "parent"}
        assert broker.task(POOL, child_id).result(timeout=10).json() == {"n": "child"}
    child.join(10)
    assert child.exitcode == 0
    assert never.cancel()
    waiter.join(10)
    assert not waiter.is_alive()


def test_the_embedded_server_comes_and_goes_with_its_brokers(tmp_path: Path) -> None:
    with Broker.embedded(tmp_path) as broker:
        task = broker.enqueue(POOL, ask())
        with Broker.embedded(tmp_path) as other:
            assert other.task(POOL, task.id).status() == "queued"
    with Broker.embedded(tmp_path) as broker:
        assert broker.task(POOL, task.id).status() == "queued", "data stays"

    async def look() -> str:
        async with AsyncBroker.embedded(tmp_path) as again:
            return await again.task(POOL, task.id).status()

    assert asyncio.run(look()) == "queued"


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_password_that_is_missing_or_wrong_is_one_clause_and_a_remedy(kind: Literal["valkey", "redis"]) -> None:
    with ExitStack() as stack:
        try:
            own = stack.enter_context(redis_server(kind))
        except MissingServer as missing:
            pytest.skip(str(missing))
        own.command("CONFIG", "SET", "requirepass", "sesame")
        with Broker(own.url) as broker, pytest.raises(BrokerUnsuitable) as none_given:
            broker.enqueue(POOL, ask())
        place = f"Redis at {own.url} "
        assert str(none_given.value) == place + "wants a password: give it in redis.url or redis.password"
        with Broker(own.url.replace("//", "//:wrong@")) as broker, pytest.raises(BrokerUnsuitable) as wrong:
            broker.enqueue(POOL, ask())
        assert str(wrong.value).endswith(
            " refuses us: invalid username-password pair or user is disabled; check the user and password in redis.url"
        )
        assert "wrong" not in str(wrong.value)
