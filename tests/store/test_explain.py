"""Why a task waits, asked of a real server; and that the answer comes true."""

from __future__ import annotations

import re

import pytest

from broker import Broker, UnknownTask, admin
from broker.errors import InvalidTask
from broker.scripts import Retry, Verdict
from broker.store import Store
from tests.support.player import claim, echo, listen, refuse, settle
from tests.support.producer import POOL, ask


def register(store: Store, *endpoints: tuple[str, int, tuple[str, ...]], **policies: int) -> None:
    """Endpoints by id, slots and capabilities."""
    rows = [(name, 5, slots, True, capabilities) for name, slots, capabilities in endpoints]
    store.run(store.scripts.register(POOL, policies, rows))


def why(store: Store, task_id: str) -> dict[str, str]:
    return {reason.endpoint: reason.why for reason in admin.task_explain(store, task_id).endpoints}


def test_behind_busy_slots(broker: Broker, store: Store) -> None:
    register(store, ("vm1", 2, ()))
    tasks = broker.enqueue_many(POOL, [ask(n) for n in range(5)])
    urgent = broker.enqueue(POOL, ask(), priority="high")
    claimed = claim(store, POOL, 2)
    last = admin.task_explain(store, tasks[4].id)
    assert (last.state, last.place) == ("queued", 4)
    assert last.summary == "place 4 of 4 in list 'normal'; vm1 has all slots busy (2/2)"
    assert urgent.id in {each.lease.id for each in claimed}
    running = admin.task_explain(store, urgent.id)
    assert running.summary.startswith("running on vm1 for ")
    settle(store, POOL, [echo(each) for each in claimed])
    assert admin.task_explain(store, urgent.id).state == "ok"
    listen(store, POOL)
    assert admin.task_explain(store, tasks[1].id).summary.endswith("vm1 has a free slot: it is about to start")


def test_every_reason_of_endpoints_that_are_out(broker: Broker, store: Store) -> None:
    names = ("busy", "open", "paused", "sick", "drained", "failed")
    register(store, *((name, 1, ("x",)) for name in names), ("other", 1, ()))
    broker.enqueue_many(POOL, [ask(n) for n in range(3)])
    give_back(store, "open", verdict="open")
    give_back(store, "paused", verdict="ignore", pause=30.0)
    assert claim(store, POOL, 1, "busy", "p-busy")
    store.run(store.scripts.health(POOL, "sick", False, "HTTP 503"))
    store.run(store.scripts.drain(POOL, "drained", True))
    picky = broker.enqueue(POOL, ask(), requires=("x",))
    give_back(store, "failed", delay=0.0, exclude=True)
    told = why(store, picky.id)
    assert told["other"] == "lacks x"
    assert told["busy"] == "has all slots busy (1/1)"
    assert "has its breaker open for" in told["open"]
    assert "(http_5xx: busy)" in told["open"]
    assert told["paused"].startswith("asked for a pause, ")
    assert told["sick"].endswith("said HTTP 503")
    assert told["drained"] == "is draining"
    assert told["failed"] == "is left out: it failed this task"


def give_back(
    store: Store,
    endpoint: str,
    *,
    delay: float = 60.0,
    verdict: Verdict = "count",
    pause: float = 0.0,
    exclude: bool = False,
) -> None:
    """The endpoint claims one task and fails it."""
    (claimed,) = claim(store, POOL, 1, endpoint, f"p-{endpoint}")
    settle(store, POOL, [Retry(claimed.lease, delay, verdict, "http_5xx: busy", "{}", exclude, pause)])


def test_a_delayed_a_dead_and_a_canceled_task(broker: Broker, store: Store) -> None:
    register(store, ("vm1", 4, ()))
    late = broker.enqueue(POOL, ask(), delay=60, deadline=90)
    told = admin.task_explain(store, late.id)
    assert told.state == "scheduled"
    assert re.match(r"not due for (59|60)\.\d s, until .* UTC; it expires in (89|90)\.\d s$", told.summary)
    assert told.due_at is not None
    dead = broker.enqueue(POOL, ask())
    settle(store, POOL, [refuse(each) for each in claim(store, POOL, 1)])
    assert "http_400: no such model" in admin.task_explain(store, dead.id).summary
    canceled = broker.enqueue(POOL, ask())
    canceled.cancel()
    assert admin.task_explain(store, canceled.id).state == "canceled"


def test_without_workers(broker: Broker, store: Store) -> None:
    task = broker.enqueue(POOL, ask())
    assert "no endpoint is registered for pool 'llm'" in admin.task_explain(store, task.id).summary


def test_when_the_last_worker_has_gone(broker: Broker, store: Store) -> None:
    register(store, ("vm1", 4, ()))
    listen(store, POOL)
    task = broker.enqueue(POOL, ask())
    assert "it is about to start" in admin.task_explain(store, task.id).summary
    store.run(store.scripts.leave(POOL, "listener"))
    assert "vm1 has no worker process listening (last " in admin.task_explain(store, task.id).summary


def test_no_such_task(store: Store) -> None:
    with pytest.raises(UnknownTask):
        admin.task_explain(store, "nobody")
    with pytest.raises(InvalidTask):
        admin.task_explain(store, "no id")
