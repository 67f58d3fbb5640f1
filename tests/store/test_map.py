"""map(): any number of works in, results out, in flat memory; nothing hangs when a message is lost."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import pytest

from broker import (
    AsyncBroker,
    Broker,
    DeadLettered,
    InvalidTask,
    PayloadTooLarge,
    Request,
    ResultTimeout,
    TaskOptions,
)
from broker.core import SILENCE
from broker.errors import UsageError
from broker.scripts import Claimed
from broker.store import Store
from broker.task import Work
from tests.support.player import Settle, claim, echo, refuse, register, serve, serving, settle
from tests.support.producer import POOL, ask, numbers, run_async


def test_map_gives_a_result_for_every_work(redis_url: str, broker: Broker, store: Store) -> None:
    with serving(redis_url, POOL):
        assert sorted(numbers(broker.map(POOL, (ask(n) for n in range(3000)), window=200))) == list(range(3000))
    assert store.pipelined([("KEYS", "*:reply:*")]) == [[]]


def test_map_in_order(redis_url: str, broker: Broker) -> None:
    works = [(ask(n), TaskOptions(priority="high" if n % 3 else "low")) for n in range(600)]
    with serving(redis_url, POOL, most=7):
        assert numbers(broker.map(POOL, works, window=100, ordered=True)) == list(range(600))


def test_map_takes_no_more_than_its_window(redis_url: str, broker: Broker) -> None:
    taken = 0
    most = 0

    def works() -> Iterator[Request]:
        nonlocal taken
        for n in range(500):
            taken += 1
            yield ask(n)

    with serving(redis_url, POOL):
        for got, _ in enumerate(broker.map(POOL, works(), window=30)):
            most = max(most, taken - got)
    assert taken == 500
    assert 30 <= most <= 60, "what is in Redis, and what was fetched and is being handed on"


def test_map_with_failures(redis_url: str, broker: Broker) -> None:
    def act(claimed: Claimed) -> Settle:
        settled = echo(claimed)
        return settled if json.loads(settled.body)["n"] != 5 else refuse(claimed)

    with serving(redis_url, POOL, act):
        outcomes = [result.outcome for result in broker.map(POOL, [ask(n) for n in range(10)])]
        assert (outcomes.count("ok"), outcomes.count("dead")) == (9, 1)
        with pytest.raises(DeadLettered):
            list(broker.map(POOL, [ask(n) for n in range(10)], raise_on_failure=True))


@pytest.mark.parametrize("ordered", [False, True])
def test_map_of_refused_works(redis_url: str, broker: Broker, ordered: bool) -> None:
    broker.enqueue(POOL, ask("other"), id="taken")
    works: list[Any] = [ask("x" * 300_000), ask(1), (ask(2), TaskOptions(id="taken")), "no work", ask(3), 17]
    refused: list[str] = []
    with serving(redis_url, POOL):
        results = broker.map(
            POOL, works, window=2, ordered=ordered, on_refused=lambda item, error: refused.append(type(error).__name__)
        )
        assert sorted(numbers(results)) == [1, 3]
        assert sorted(refused) == ["IdempotencyConflict", "InvalidTask", "InvalidTask", "PayloadTooLarge"]
        assert list(broker.map(POOL, works[:1], ordered=ordered, on_refused=lambda item, error: None)) == []
        with pytest.raises(PayloadTooLarge):
            list(broker.map(POOL, works, ordered=ordered))
    assert list(broker.map(POOL, [])) == []
    with pytest.raises(UsageError, match="window"):
        broker.map(POOL, [], window=0)


def test_map_of_works_that_are_one_task_or_done_before(redis_url: str, broker: Broker, store: Store) -> None:
    register(store, POOL)
    broker.enqueue(POOL, ask(0), id="done")
    serve(store, POOL)
    works = [(ask(0), TaskOptions(id="done")), *[(ask(1), TaskOptions(idempotency_key="k")) for _ in range(3)]]
    started = time.monotonic()
    with serving(redis_url, POOL):
        assert sorted(numbers(broker.map(POOL, works))) == [0, 1, 1, 1]
        assert time.monotonic() - started < SILENCE, "nobody tells of what was done before: it must be asked for"
        assert sorted(numbers(broker.map(POOL, works, ordered=True))) == [0, 1, 1, 1]


def test_map_waits_for_a_full_pool(redis_url: str, broker: Broker, store: Store) -> None:
    with serving(redis_url, POOL, most=2):
        register(store, POOL, max_depth=3)
        assert sorted(numbers(broker.map(POOL, (ask(n) for n in range(40)), window=10))) == list(range(40))


def test_map_times_out_without_a_result(broker: Broker) -> None:
    with pytest.raises(ResultTimeout, match="2 tasks go on"):
        list(broker.map(POOL, [ask(1), ask(2)], timeout=0.1))


def test_map_notices_a_lost_message(monkeypatch: pytest.MonkeyPatch, broker: Broker, store: Store) -> None:
    monkeypatch.setattr("broker.mapping.SILENCE", 0.2)
    register(store, POOL)

    def play() -> None:
        claimed: list[Claimed] = []
        while len(claimed) < 2:
            claimed += claim(store, POOL, 2)
        store.pipelined([("HDEL", store.keys.job(task.lease.id), "x_reply") for task in claimed])
        settle(store, POOL, [echo(task) for task in claimed])

    player = threading.Thread(target=play)
    player.start()
    assert sorted(numbers(broker.map(POOL, [ask(1), ask(2)], timeout=8))) == [1, 2]
    player.join(10)


def test_map_sends_again_what_redis_lost(monkeypatch: pytest.MonkeyPatch, broker: Broker, store: Store) -> None:
    monkeypatch.setattr("broker.mapping.SILENCE", 0.1)
    register(store, POOL)
    results = broker.map(POOL, iter([ask(n) for n in range(20)]), timeout=8)
    found: list[int] = []
    lost = threading.Event()

    def lose() -> None:
        while not claim(store, POOL, 1):
            pass
        store.raw(lambda client: client.flushall())
        lost.set()
        register(store, POOL)
        while len(found) < 20:
            serve(store, POOL)

    thread = threading.Thread(target=lose)
    thread.start()
    for result in results:
        found.append(result.json()["n"])
    thread.join(10)
    assert lost.is_set()
    assert sorted(found) == list(range(20))


def test_ending_a_map_early_drops_its_list_and_cancels_nothing(redis_url: str, broker: Broker, store: Store) -> None:
    register(store, POOL, slots=300)
    results = broker.map(POOL, [ask(n) for n in range(300)], window=300)

    def play() -> None:
        claimed: list[Claimed] = []
        while len(claimed) < 250:
            claimed += claim(store, POOL, 250 - len(claimed))
        settle(store, POOL, [echo(task) for task in claimed])  # more ids than one pop takes

    player = threading.Thread(target=play)
    player.start()
    next(results)
    player.join(10)
    (length,) = store.pipelined([("LLEN", key) for key in store.pipelined([("KEYS", "*:reply:*")])[0]])
    assert length == 150
    assert isinstance(results, Generator)
    results.close()
    assert store.pipelined([("KEYS", "*:reply:*"), ("HGET", store.keys.pool(POOL), "n_canceled")]) == [[], None]


def test_memory_stays_flat_over_a_long_map(redis_url: str, broker: Broker) -> None:
    """S23 in small: the objects alive after 20,000 works are those after 2,000."""
    counts = []
    with serving(redis_url, POOL, most=100):
        for got, _ in enumerate(broker.map(POOL, (ask(n) for n in range(20_000)), window=200)):
            if got in (2_000, 19_000):
                gc.collect()
                counts.append(len(gc.get_objects()))
    assert counts[1] < counts[0] * 1.05 + 1000


# fallback


def on_cpu(work: Work) -> dict[str, Any]:
    assert isinstance(work, Request)
    return {"n": work.json["n"], "by": "cpu"}


def open_breaker(store: Store) -> None:
    register(store, POOL)
    until = int(time.time() + 90) * 1000
    store.pipelined([("HSET", store.keys.endpoint(POOL, "vm1"), "state", "open", "until", until)])


def canceled(store: Store) -> int:
    return int(store.pipelined([("HGET", store.keys.pool(POOL), "n_canceled")])[0] or 0)


def refuse_fives(claimed: Claimed) -> Settle:
    settled = echo(claimed)
    return refuse(claimed) if json.loads(settled.body)["n"] % 5 == 0 else settled


@pytest.mark.parametrize("ordered", [False, True])
def test_a_fallback_stands_in_for_failed_works(redis_url: str, broker: Broker, ordered: bool) -> None:
    works = [ask(n) if n % 2 else (ask(n), TaskOptions(priority="high")) for n in range(30)]
    with serving(redis_url, POOL, refuse_fives):
        results = list(broker.map(POOL, works, window=7, ordered=ordered, fallback=on_cpu, raise_on_failure=True))
    found = [result.json()["n"] for result in results]
    assert (found if ordered else sorted(found)) == list(range(30))
    for result in results:
        by_cpu = result.json()["n"] % 5 == 0
        assert (result.outcome, result.endpoint) == ("ok", "" if by_cpu else "vm1")
        assert result.json().get("by") == ("cpu" if by_cpu else None)


def test_a_fallback_may_give_bytes_or_fail(redis_url: str, broker: Broker, store: Store) -> None:
    def fail(work: Work) -> None:
        raise ZeroDivisionError

    with serving(redis_url, POOL, refuse):
        assert [result.body for result in broker.map(POOL, [ask()], fallback=lambda work: b"raw")] == [b"raw"]
        with pytest.raises(ZeroDivisionError):
            list(broker.map(POOL, [ask()], fallback=fail))
    assert store.pipelined([("KEYS", "*:reply:*")]) == [[]]


@pytest.mark.parametrize("prepare", [open_breaker, lambda store: None], ids=["breaker open", "no endpoint"])
def test_a_fallback_when_no_endpoint_can_take_tasks(
    monkeypatch: pytest.MonkeyPatch, broker: Broker, store: Store, prepare: Callable[[Store], None]
) -> None:
    monkeypatch.setattr("broker.mapping.SILENCE", 0.2)
    prepare(store)
    works: list[Any] = [
        *[ask(n) for n in range(250)],
        (ask(250), TaskOptions(delay=60)),
        (ask(251), TaskOptions(id="mine")),
    ]
    results = list(broker.map(POOL, works, window=130, ordered=True, timeout=8, fallback=on_cpu))
    assert [result.json() for result in results] == [{"n": n, "by": "cpu"} for n in range(252)]
    assert {(result.outcome, result.endpoint) for result in results} == {("ok", "")}
    assert results[-1].task_id == "mine"
    assert canceled(store) == 252, "they must not run beside their fallbacks"


def test_a_fallback_when_the_pool_is_full_and_down(
    monkeypatch: pytest.MonkeyPatch, broker: Broker, store: Store
) -> None:
    monkeypatch.setattr("broker.mapping.SILENCE", 0.2)
    open_breaker(store)
    register(store, POOL, max_depth=1)
    other = broker.enqueue(POOL, ask("another's"))
    results = broker.map(POOL, [ask(n) for n in range(5)], window=2, timeout=8, fallback=on_cpu)
    assert sorted(numbers(results)) == list(range(5))
    assert (other.status(), canceled(store)) == ("queued", 0)


def test_no_fallback_while_an_endpoint_can_take_tasks(
    monkeypatch: pytest.MonkeyPatch, broker: Broker, store: Store
) -> None:
    monkeypatch.setattr("broker.mapping.SILENCE", 0.1)
    register(store, POOL)
    player = threading.Timer(0.6, lambda: serve(store, POOL))
    player.start()
    (result,) = broker.map(POOL, [ask(1)], timeout=8, fallback=on_cpu)
    player.join(10)
    assert (result.endpoint, canceled(store)) == ("vm1", 0)


def test_without_a_fallback_a_map_waits_for_an_endpoint(
    monkeypatch: pytest.MonkeyPatch, broker: Broker, store: Store
) -> None:
    monkeypatch.setattr("broker.mapping.SILENCE", 0.1)
    open_breaker(store)
    with pytest.raises(ResultTimeout, match="2 tasks go on"):
        list(broker.map(POOL, [ask(1), ask(2)], timeout=0.5))
    assert canceled(store) == 0


def test_a_fallback_keeps_the_works_of_its_window_only(redis_url: str, broker: Broker) -> None:
    alive = most = 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    class Kept(Request):
        """Can be referred to weakly."""

    def works() -> Iterator[Request]:
        nonlocal alive
        for n in range(2000):
            work = Kept("POST", "/v1/chat/completions", json={"n": n})
            weakref.finalize(work, gone)
            alive += 1
            yield work

    with serving(redis_url, POOL, refuse_fives):
        for _ in broker.map(POOL, works(), window=50, fallback=on_cpu):
            most = max(most, alive)
    assert 50 <= most <= 110, "what is in Redis, and what was fetched and is being handed on"


def test_async_map_with_a_fallback(monkeypatch: pytest.MonkeyPatch, redis_url: str, store: Store) -> None:
    monkeypatch.setattr("broker.mapping.SILENCE", 0.2)

    async def later(work: Work) -> dict[str, Any]:
        await asyncio.sleep(0)
        return on_cpu(work)

    async def use(broker: AsyncBroker) -> None:
        with serving(redis_url, POOL, refuse_fives):
            works = [ask(n) for n in range(20)]
            found = [result async for result in broker.map(POOL, works, ordered=True, fallback=later)]
        assert [result.json()["n"] for result in found] == list(range(20))
        assert [n for n, result in enumerate(found) if not result.endpoint] == [0, 5, 10, 15]
        open_breaker(store)
        found = [result async for result in broker.map(POOL, works, timeout=8, fallback=on_cpu)]
        assert sorted(result.json()["n"] for result in found) == list(range(20))
        assert {result.json()["by"] for result in found} == {"cpu"}
        assert canceled(store) == 20

    run_async(redis_url, use)


def test_async_map(redis_url: str) -> None:
    async def works() -> AsyncIterator[Request]:
        for n in range(500):
            yield ask(n)

    async def use(broker: AsyncBroker) -> None:
        with serving(redis_url, POOL):
            found = [result.json()["n"] async for result in broker.map(POOL, works(), window=50, ordered=True)]
            assert found == list(range(500))
            found = [result.json()["n"] async for result in broker.map(POOL, [ask(n) for n in range(70)], window=20)]
            assert sorted(found) == list(range(70))
            with pytest.raises(InvalidTask):
                async for _ in broker.map(POOL, ["no work"]):  # type: ignore[list-item]
                    pass

    run_async(redis_url, use)
