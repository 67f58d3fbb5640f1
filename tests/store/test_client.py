"""The Python door: enqueue, wait, cancel, discard; for threads and for asyncio, on a real server."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from broker import (
    AsyncBroker,
    Broker,
    Canceled,
    DeadLettered,
    Expired,
    IdempotencyConflict,
    InvalidTask,
    NpuTask,
    PayloadTooLarge,
    Poisoned,
    QueueFull,
    Result,
    ResultTimeout,
    TaskOptions,
    UnknownTask,
)
from broker.core import SILENCE
from broker.errors import UsageError
from broker.rqjob import rq_success
from broker.store import Store
from tests.support.player import claim, echo, refuse, register, serve, serving, settle
from tests.support.producer import POOL, ask, run_async
from tests.support.servers import RealServer

# enqueue


def test_a_pool_that_no_worker_knows_is_told_once(
    redis_url: str, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with Broker(redis_url) as early:
        early.enqueue("nosuch", ask())  # no pool at all: the workers may be about to start
        assert caplog.messages == []
    for pool in ("llm", "npu"):
        register(store, pool)
    told = "pool 'nosuch': no worker has registered it, its tasks wait until one does; registered: llm, npu"
    with Broker(redis_url) as broker:
        tasks = [broker.enqueue("nosuch", ask(n)) for n in range(3)] + [broker.enqueue("llm", ask())]
        assert caplog.messages == [told]
        with suppress(ResultTimeout):
            list(broker.map("nosuch", [ask()], timeout=0.01))
        assert caplog.messages == [told]
        assert [task.status() for task in tasks] == ["queued"] * 4
    caplog.clear()

    async def use(broker: AsyncBroker) -> None:
        await broker.enqueue("nosuch", ask())
        await broker.enqueue("nosuch", ask())

    run_async(redis_url, use)
    assert caplog.messages == [told]


def test_an_error_quotes_the_start_of_a_long_key(broker: Broker) -> None:
    broker.enqueue(POOL, ask(1), idempotency_key="k" * 255)
    with pytest.raises(IdempotencyConflict) as conflict:
        broker.enqueue(POOL, ask(2), idempotency_key="k" * 255)
    assert str(conflict.value).startswith(f"idempotency key '{'k' * 39}…' stands for task ")
    with pytest.raises(InvalidTask) as invalid:
        broker.enqueue(POOL, ask(2), idempotency_key="k" * 256)
    assert str(invalid.value) == f"idempotency_key '{'k' * 38}…: must be 1 to 255 printable characters"


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
    while not store.run(store.scripts.expire(POOL, result_ttl=60)):
        pass  # its millisecond is not over yet
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
    clients = store.raw(lambda client: client.client_list())
    blocked = [row for row in clients if "b" in row["flags"]]  # `cmd` is the last one, whether it goes on or not
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
        with pytest.raises(QueueFull) as full:
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
