"""The Python door: enqueue, wait, map, cancel, discard; for threads and for asyncio, on a real server."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from broker import (
    AsyncBroker,
    Broker,
    BrokerError,
    BrokerUnavailable,
    Canceled,
    DeadLettered,
    Expired,
    IdempotencyConflict,
    InvalidTask,
    NpuTask,
    PayloadTooLarge,
    Poisoned,
    QueueFull,
    Request,
    Result,
    ResultTimeout,
    TaskOptions,
    UnknownTask,
)
from broker.core import SILENCE
from broker.errors import BrokerUnsuitable, UsageError
from broker.producer import PoolFull
from broker.rqjob import rq_success
from broker.scripts import Claimed, load
from broker.store import Store
from tests.support.player import Settle, claim, echo, refuse, register, serve, serving, settle
from tests.support.proxy import reply_dropper
from tests.support.servers import RealServer, redis_server

POOL = "llm"


def ask(n: object = 1) -> Request:
    return Request("POST", "/v1/chat/completions", json={"n": n})


@pytest.fixture
def store(redis_url: str) -> Iterator[Store]:
    store = Store(redis_url)
    yield store
    store.close()


@pytest.fixture
def broker(redis_url: str) -> Iterator[Broker]:
    with Broker(redis_url) as broker:
        yield broker


def run_async(url: str, use: Callable[[AsyncBroker], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with AsyncBroker(url) as broker:
            return await use(broker)

    return asyncio.run(main())


# enqueue


def test_a_task_goes_to_a_worker_and_its_result_comes_back(broker: Broker, store: Store) -> None:
    register(store, POOL)
    task = broker.enqueue(POOL, ask(7), priority="high", deadline=600, max_attempts=2)
    assert task.status() == "queued"
    (claimed,) = claim(store, POOL)
    assert (claimed.lease.id, claimed.max_attempts, claimed.plain) == (task.id, 2, False)
    assert claimed.deadline == pytest.approx(time.time() + 600, abs=60)
    assert task.status() == "started"
    settle(store, POOL, [echo(claimed)])
    result = task.result(timeout=5)
    assert result.ok
    assert (result.status_code, result.json(), result.endpoint, result.attempts) == (200, {"n": 7}, "vm1", 1)
    assert task.status() == "ok"


def test_an_npu_task_and_a_delayed_one(broker: Broker, store: Store) -> None:
    register(store, POOL)
    broker.enqueue(POOL, NpuTask("text_analysis", {"text": "x"}))
    late = broker.enqueue(POOL, ask(), delay=3600)
    assert late.status() == "scheduled"
    assert [task.lease.id for task in claim(store, POOL)] != [late.id]


@pytest.mark.parametrize("priority", [1, 5, "1", "HIGH", "urgent", True, False, 2.5, b"high", ["high"]])
def test_a_priority_of_another_type_or_word_is_refused_and_queues_nothing(
    broker: Broker, store: Store, priority: Any
) -> None:
    with pytest.raises(InvalidTask, match="priority"):
        broker.enqueue(POOL, ask(), priority=priority)
    register(store, POOL)
    assert claim(store, POOL) == []


def test_every_valid_priority_is_claimed_the_best_first(broker: Broker, store: Store) -> None:
    register(store, POOL)
    priorities: list[Any] = ["low", None, "high", "normal"]
    ids = [broker.enqueue(POOL, ask(n), priority=priority).id for n, priority in enumerate(priorities)]
    claimed = [task.lease.id for task in claim(store, POOL)]
    assert claimed == [ids[2], ids[1], ids[3], ids[0]]


def test_the_same_id_or_key_is_the_same_task(broker: Broker) -> None:
    first = broker.enqueue(POOL, ask(), id="doc-1")
    assert broker.enqueue(POOL, ask(), id="doc-1") == first
    keyed = broker.enqueue(POOL, ask(), idempotency_key="k")
    assert broker.enqueue(POOL, ask(), idempotency_key="k") == keyed
    assert keyed != first
    with pytest.raises(IdempotencyConflict, match=keyed.id) as conflict:
        broker.enqueue(POOL, ask(2), idempotency_key="k")
    assert conflict.value.task_id == keyed.id
    with pytest.raises(IdempotencyConflict):
        broker.enqueue("other", ask(), id="doc-1")


def test_what_is_too_large_or_no_work_is_refused_before_anything_is_queued(broker: Broker, store: Store) -> None:
    register(store, POOL, payload_limit=1000)
    with pytest.raises(PayloadTooLarge, match="payload_limit"):
        broker.enqueue_many(POOL, [ask(), ask("x" * 2000)])
    with pytest.raises(InvalidTask, match="work dict"):
        broker.enqueue(POOL, {"method": "POST"})  # type: ignore[arg-type]
    with pytest.raises(InvalidTask, match="pool"):
        broker.enqueue("no pool", ask())
    assert claim(store, POOL) == []


def test_many_works_are_queued_in_order_with_their_options(broker: Broker, store: Store) -> None:
    register(store, POOL)
    tasks = broker.enqueue_many(POOL, (ask(n) if n else (ask(n), TaskOptions(id="first")) for n in range(1203)))
    assert len({task.id for task in tasks}) == 1203
    assert tasks[0].id == "first"
    assert [task.lease.id for task in claim(store, POOL, 50)] == [task.id for task in tasks[:50]]


def test_a_full_pool_says_so_and_what_was_queued(broker: Broker, store: Store) -> None:
    register(store, POOL, max_depth=3)
    with pytest.raises(QueueFull, match=r"pool 'llm' is full: 3 tasks \(queue.max_depth\); 3 of 5 were queued") as full:
        broker.enqueue_many(POOL, [ask(n) for n in range(5)])
    assert isinstance(full.value, PoolFull)
    assert [task.lease.id for task in claim(store, POOL)] == [task.id for task in full.value.queued]


def test_redis_at_its_memory_limit_is_a_full_queue(server: RealServer, broker: Broker) -> None:
    broker.enqueue(POOL, ask())
    server.command("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(QueueFull, match="memory limit"):
            broker.enqueue(POOL, ask())
    finally:
        server.command("CONFIG", "SET", "maxmemory", "0")


# outcomes


def test_a_failure_is_raised_with_its_reason_or_given_as_a_result(broker: Broker, store: Store) -> None:
    register(store, POOL)
    task = broker.enqueue(POOL, ask())
    serve(store, POOL, refuse)
    with pytest.raises(DeadLettered, match="no such model") as failed:
        task.result(timeout=5)
    assert (failed.value.task_id, failed.value.status_code, failed.value.body) == (task.id, 400, b'{"error": "no"}')
    assert not isinstance(failed.value, Poisoned)
    assert task.result(timeout=5, raise_on_failure=False).outcome == "dead"


def test_each_outcome_has_its_error(broker: Broker, store: Store) -> None:
    register(store, POOL)
    expired = broker.enqueue(POOL, ask(), deadline=0.001)
    canceled = broker.enqueue(POOL, ask())
    assert canceled.cancel()
    assert canceled.cancel(), "canceled is canceled, whoever asks again"
    with pytest.raises(Canceled):
        canceled.result(timeout=5)
    claim(store, POOL)
    with pytest.raises(Expired):
        expired.result(timeout=5)
    with pytest.raises(UnknownTask, match="result_ttl"):
        broker.task(POOL, "never-was").result(timeout=5)
    with pytest.raises(UnknownTask):
        broker.task(POOL, "never-was").status()
    assert not broker.task(POOL, "never-was").cancel()


def test_a_timeout_leaves_the_task_alone(broker: Broker, store: Store) -> None:
    register(store, POOL)
    task = broker.enqueue(POOL, ask())
    started = time.monotonic()
    with pytest.raises(ResultTimeout, match=task.id):
        task.result(timeout=0.05)
    with pytest.raises(TimeoutError):
        task.result(timeout=0)
    assert time.monotonic() - started < 3
    assert serve(store, POOL) == 1
    assert task.result(timeout=0).ok
    with pytest.raises(UsageError, match="timeout"):
        task.result(timeout=-1)


@pytest.mark.parametrize("answer", [{"json": {"n": 1}}, {"body": '{"n": 1}'}])
def test_what_a_stock_rq_worker_answered_is_read(
    monkeypatch: pytest.MonkeyPatch, broker: Broker, store: Store, answer: dict[str, Any]
) -> None:
    monkeypatch.setattr("broker.mapping.SILENCE", 0.1)
    told = {"status_code": 200, "headers": {"content-type": "application/json"}, "endpoint": "vm9", "attempts": 1}
    entry = rq_success("json", {**told, **answer}, "stock")
    good, bad = broker.enqueue_many(POOL, [ask(1), (ask(2), TaskOptions(id="bad"))])
    store.pipelined(
        [
            ("XADD", store.keys.results(good.id), "*", *entry),
            ("HSET", store.keys.job(good.id), "status", "finished"),
            ("HSET", store.keys.job(bad.id), "status", "failed", "exc_info", "Traceback\nAttemptFailed: busy\n"),
        ]
    )
    result = good.result(timeout=5)
    assert (result.outcome, result.json(), result.status_code, result.endpoint) == ("ok", {"n": 1}, 200, "vm9")
    with pytest.raises(DeadLettered, match="AttemptFailed: busy"):
        bad.result(timeout=5)
    (mapped,) = broker.map(POOL, [(ask(2), TaskOptions(id="bad"))], timeout=8)
    assert mapped.reason == "AttemptFailed: busy"


def test_waiting_threads_get_each_their_own_result_over_one_connection(
    redis_url: str, broker: Broker, store: Store
) -> None:
    tasks = broker.enqueue_many(POOL, [ask(n) for n in range(40)])
    results: dict[int, Any] = {}

    def wait(n: int) -> None:
        results[n] = tasks[n % 40].result(timeout=20).json()

    threads = [threading.Thread(target=wait, args=(n,)) for n in range(80)]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    with serving(redis_url, POOL, most=3):
        for thread in threads:
            thread.join(20)
    assert time.monotonic() - started < SILENCE, "a leader that left without a successor"
    assert results == {n: {"n": n % 40} for n in range(80)}
    blocked = [row for row in store.raw(lambda client: client.client_list()) if row["cmd"] == "blmpop"]
    assert blocked == []


def test_a_result_does_not_wait_for_the_next_look(redis_url: str, broker: Broker) -> None:
    """The message wakes the waiter: far sooner than the look after five seconds of silence."""
    with serving(redis_url, POOL):
        broker.enqueue(POOL, ask()).result(timeout=20)
        started = time.monotonic()
        for n in range(10):
            broker.enqueue(POOL, ask(n)).result(timeout=20)
        assert time.monotonic() - started < 4


def test_a_lost_message_is_noticed(monkeypatch: pytest.MonkeyPatch, broker: Broker, store: Store) -> None:
    monkeypatch.setattr("broker.core.SILENCE", 0.2)
    register(store, POOL)
    task = broker.enqueue(POOL, ask())
    with pytest.raises(ResultTimeout):
        task.result(timeout=0.01)  # now it is watched
    store.pipelined([("HDEL", store.keys.job(task.id), "x_reply")])
    waiter = threading.Timer(0.05, lambda: serve(store, POOL))
    waiter.start()
    assert task.result(timeout=8).ok
    waiter.join()


# all endpoints out


def test_raise_if_down_and_fallback(broker: Broker, store: Store) -> None:
    task = broker.enqueue(POOL, ask())
    with pytest.raises(ResultTimeout, match="none is registered"):
        task.result(timeout=10, raise_if_down=True)
    register(store, POOL)
    with pytest.raises(ResultTimeout, match="no outcome within"):
        task.result(timeout=0.05, raise_if_down=True)
    until = int(time.time() + 90) * 1000
    store.pipelined([("HSET", store.keys.endpoint(POOL, "vm1"), "state", "open", "until", until)])
    with pytest.raises(ResultTimeout, match="vm1 open"):
        task.result(raise_if_down=True)
    result = task.result(fallback=lambda: {"by": "cpu"})
    assert (result.outcome, result.json(), result.task_id) == ("ok", {"by": "cpu"}, task.id)
    assert task.status() == "canceled", "it must not run beside its fallback"


def test_a_fallback_stands_in_for_a_failure_and_not_for_a_success(broker: Broker, store: Store) -> None:
    register(store, POOL)
    good, bad = broker.enqueue_many(POOL, [ask(1), ask(2)])
    tasks = {task.lease.id: task for task in claim(store, POOL)}
    settle(store, POOL, [echo(tasks[good.id]), refuse(tasks[bad.id])])
    own = Result("x", "ok", body=b"mine")
    assert good.result(fallback=lambda: own).json() == {"n": 1}
    assert bad.result(fallback=lambda: own) is own
    assert bad.result(fallback=lambda: b"raw").body == b"raw"


# cancel, discard


def test_canceled_tasks_never_start(broker: Broker, store: Store) -> None:
    """S6, the queued half."""
    register(store, POOL, slots=500)
    tasks = broker.enqueue_many(POOL, [ask(n) for n in range(200)])
    running = claim(store, POOL, 20)
    assert all(broker.cancel(POOL, [task.id for task in tasks[20:120]]))
    assert tasks[0].cancel(), "a running one is canceled too"
    rest = claim(store, POOL, 500)
    assert [task.lease.id for task in rest] == [task.id for task in tasks[120:]]
    words = settle(store, POOL, [echo(task) for task in [*running, *rest]])
    assert words.count("canceled") == 1
    assert [task.status() for task in tasks].count("canceled") == 101
    assert not tasks[1].cancel(), "an outcome stays"
    assert store.pipelined([("ZCARD", store.keys.slots(POOL, "vm1"))]) == [0]


def test_discard_leaves_no_trace_of_the_settled_and_does_not_touch_the_rest(broker: Broker, store: Store) -> None:
    register(store, POOL)
    done = broker.enqueue(POOL, ask(1), idempotency_key="k", deadline=60)
    dead = broker.enqueue(POOL, ask(2))
    tasks = {task.lease.id: task for task in claim(store, POOL)}
    settle(store, POOL, [echo(tasks[done.id]), refuse(tasks[dead.id])])
    waiting = broker.enqueue(POOL, ask(3))
    assert broker.discard(POOL, [done.id, dead.id, waiting.id, "never-was"]) == 2
    assert waiting.status() == "queued"
    left = {key.decode() for key in store.pipelined([("KEYS", "*")])[0]}
    assert not [key for key in left if done.id in key or dead.id in key or ":idem:" in key]
    assert not left & {store.keys.registry(name, POOL) for name in ("finished", "failed", "canceled")}
    assert broker.enqueue(POOL, ask(9), idempotency_key="k").id != done.id


# map


def numbers(results: Iterator[Result]) -> list[int]:
    return [result.json()["n"] for result in results]


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


# connections


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
        waiting = store.pipelined([("LRANGE", store.keys.queue(POOL), 0, -1)])[0]
        assert [task_id.decode() for task_id in waiting] == [task.id for task in tasks]


def test_an_async_enqueue_whose_reply_is_lost_is_queued_once(
    server: RealServer, redis_url: str, store: Store
) -> None:
    async def use(broker: AsyncBroker) -> str:
        await broker.enqueue("warm", ask())
        proxy.drop(load("enqueue").sha.encode(), times=2)
        return (await broker.enqueue(POOL, ask())).id

    with through_proxy(server) as proxy:
        task_id = run_async(proxy.url, use)
        assert proxy.dropped == 2
    assert store.pipelined([("LRANGE", store.keys.queue(POOL), 0, -1)]) == [[task_id.encode()]]


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


# asyncio


def test_async_enqueue_wait_cancel_discard(redis_url: str, store: Store) -> None:
    async def use(broker: AsyncBroker) -> None:
        tasks = await broker.enqueue_many(POOL, [ask(n) for n in range(300)])
        stopped = await broker.enqueue("other", ask())
        assert await stopped.cancel()
        with pytest.raises(Canceled):
            await stopped.result()
        assert await broker.discard("other", [stopped.id]) == 1
        with pytest.raises(UnknownTask):
            await stopped.status()
        with serving(redis_url, POOL):
            results = await asyncio.gather(*(task.result(timeout=20) for task in tasks))
        assert [result.json()["n"] for result in results] == list(range(300))
        assert len([1 for row in store.raw(lambda client: client.client_list()) if row["cmd"] == "blmpop"]) <= 1

    run_async(redis_url, use)


def test_async_failures_and_fallbacks(redis_url: str, store: Store) -> None:
    async def on_cpu() -> dict[str, str]:
        return {"by": "cpu"}

    async def use(broker: AsyncBroker) -> None:
        register(store, POOL, max_depth=2)
        task = await broker.enqueue(POOL, ask())
        with pytest.raises(ResultTimeout):
            await task.result(timeout=0.05)
        assert (await task.result(timeout=0.05, fallback=on_cpu)).json() == {"by": "cpu"}
        assert await task.status() == "canceled"
        with pytest.raises(PoolFull) as full:
            await broker.enqueue_many(POOL, [ask(n) for n in range(3)])
        assert len(full.value.queued) == 2

    run_async(redis_url, use)


def test_a_canceled_wait_leaves_the_broker_usable(redis_url: str, store: Store) -> None:
    async def use(broker: AsyncBroker) -> None:
        register(store, POOL)
        task = await broker.enqueue(POOL, ask(4))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await task.result()
        assert await task.status() == "queued"
        await asyncio.to_thread(serve, store, POOL)
        assert (await task.result(timeout=5)).json() == {"n": 4}

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
