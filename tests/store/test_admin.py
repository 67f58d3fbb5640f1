"""What operators see and do: pools, endpoints, tasks, dead letters. Looking changes nothing."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from broker import Broker, InvalidTask, NpuTask, Request, TaskOptions, UnknownTask, admin
from broker.scripts import Claimed, DeadLetter, Retry
from broker.store import Store
from tests.support.player import claim, echo, listen, refuse, register, serve, settle
from tests.support.producer import POOL


def ask(n: object = 1) -> Request:
    return Request("POST", "/v1/chat/completions?key=1", json={"n": n}, headers={"X-Trace": "t"})


READ = {
    "hash": ("HGETALL",),
    "list": ("LRANGE", 0, -1),
    "set": ("SMEMBERS",),
    "zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    "string": ("GET",),
}


def everything(store: Store) -> dict[bytes, Any]:
    """Every key with what it holds and whether it expires."""
    keys = store.pipelined([("KEYS", "*")])[0]
    kinds = [kind.decode() for kind in store.pipelined([("TYPE", key) for key in keys])]
    commands = [(READ[kind][0], key, *READ[kind][1:]) for key, kind in zip(keys, kinds, strict=True)]
    expires = [left > 0 for left in store.pipelined([("PTTL", key) for key in keys])]
    return dict(zip(keys, zip(store.pipelined(commands), expires, strict=True), strict=True))


def fail_again(claimed: Claimed) -> Retry:
    history = {"attempt": claimed.attempts + 1, "endpoint": claimed.lease.endpoint, "kind": "http_5xx", "status": 503}
    history |= {"error": "busy", "started": 1.5}
    return Retry(claimed.lease, 30.0, "count", "http_5xx: busy", json.dumps(history))


# pools and endpoints


def test_the_status_of_a_pool_in_use(broker: Broker, store: Store) -> None:
    register(store, POOL, slots=3, endpoints=("vm1", "vm2"), max_depth=50)
    broker.enqueue_many(POOL, [(ask(n), TaskOptions(priority="high")) for n in range(5)])
    first, second, third = claim(store, POOL, 3)
    settle(store, POOL, [echo(first), refuse(second)])
    broker.enqueue_many(POOL, [(ask(n), TaskOptions(requires=("vision",))) for n in range(4)])
    broker.enqueue_many(POOL, [(ask(n), TaskOptions(priority="low", requires=("vision",))) for n in range(2)])
    broker.enqueue(POOL, ask(), delay=60)
    assert broker.enqueue(POOL, ask()).cancel()

    status = admin.status(store, POOL)
    assert status.waiting == {"high": 2, "normal": 4, "low": 2}
    assert status.backlog == 8
    assert (status.delayed, status.running, status.dead, status.finished, status.canceled) == (1, 1, 1, 1, 1)
    assert status.max_depth == 50
    assert status.oldest is not None
    assert 0 <= status.oldest < 30
    assert status.processes == ("p1",)
    assert (status.counts["enqueued"], status.counts["ok"], status.counts["dead"]) == (13, 1, 1)
    vm1, vm2 = status.endpoints
    assert (vm1.id, vm1.state, vm1.in_flight, vm1.max_concurrent) == ("vm1", "ready", 1, 3)
    assert (vm1.served, vm1.failed, vm1.breaker, vm1.enabled, vm1.up) == (1, 1, "closed", True, True)
    assert vm2.in_flight == 0
    assert json.loads(json.dumps(status.to_dict()))["endpoints"][0]["id"] == "vm1"
    assert third.lease.endpoint == "vm1"


def test_the_state_of_an_endpoint(broker: Broker, store: Store) -> None:
    register(store, POOL, slots=1)
    key = store.keys.endpoint(POOL, "vm1")
    soon = int(time.time() * 1000) + 60_000

    def state() -> str:
        (endpoint,) = admin.status(store, POOL).endpoints
        return endpoint.state

    assert state() == "absent"  # no process listens, whatever the endpoint's workers said before they went
    listen(store, POOL)
    assert state() == "ready"
    broker.enqueue(POOL, ask())
    (claimed,) = claim(store, POOL, 1)
    assert state() == "full"
    settle(store, POOL, [Retry(claimed.lease, 0.0, "open", "auth: 401", "{}")])
    (endpoint,) = admin.status(store, POOL).endpoints
    assert (endpoint.state, endpoint.breaker, endpoint.reason, endpoint.up) == ("open", "open", "auth: 401", False)
    assert (endpoint.fails, endpoint.opened) == (1, 1)
    assert endpoint.open_until is not None
    assert 0 < endpoint.open_until - time.time() <= 65
    table: list[tuple[dict[str, Any], str]] = [
        ({"until": 1}, "probing"),
        ({"state": "closed", "pause": soon}, "paused"),
        ({"seen": 1}, "absent"),
        ({"drain": 1}, "draining"),
        ({"on": 0}, "disabled"),
        ({"gone": 1}, "removed"),
    ]
    assert admin.status(store, POOL).processes == ("listener",)
    for fields, expected in table:
        store.pipelined([("HSET", key, *(part for pair in fields.items() for part in pair))])
        assert state() == expected


def test_pools_and_a_pool_that_nobody_uses(store: Store) -> None:
    assert admin.pools(store) == []
    register(store, "npu")
    register(store, "llm")
    assert admin.pools(store) == ["llm", "npu"]
    empty = admin.status(store, "nobody")
    assert (empty.backlog, empty.running, empty.endpoints, empty.oldest, empty.max_depth) == (0, 0, (), None, None)
    with pytest.raises(InvalidTask):
        admin.status(store, "no pool")


def test_looking_changes_nothing(broker: Broker, store: Store) -> None:
    register(store, POOL)
    tasks = broker.enqueue_many(POOL, [ask(n) for n in range(6)])
    late = broker.enqueue(POOL, ask(), delay=60, deadline=90)
    claimed = claim(store, POOL, 3)
    settle(store, POOL, [echo(claimed[0]), refuse(claimed[1])])
    before = everything(store)
    admin.pools(store)
    admin.status(store, POOL)
    for task in [*tasks, late]:
        admin.dead_show(store, task.id)
    admin.dead_list(store, POOL)
    admin.dead_count(store, POOL)
    assert everything(store) == before


# tasks


def test_a_task_from_queued_to_dead(broker: Broker, store: Store) -> None:
    register(store, POOL, endpoints=("vm1", "vm2"))
    broker.enqueue_many(POOL, [(ask(), TaskOptions(priority="high")) for _ in range(2)])
    task = broker.enqueue(POOL, ask(5), priority="high", deadline=600, max_attempts=4, idempotency_key="doc-5")
    view = admin.task_show(store, task.id)
    assert (view.pool, view.state, view.where) == (POOL, "queued", "waits in list 'high', place 3 of 3")
    assert (view.priority, view.max_attempts, view.attempts, view.idempotency_key) == ("high", 4, 0, "doc-5")
    assert view.description == "POST /v1/chat/completions"
    assert view.deadline is not None
    assert view.enqueued_at is not None
    assert view.deadline - view.enqueued_at == pytest.approx(600)
    assert (view.ttl, view.ended_at, view.history, view.payload, view.answer) == (None, None, (), None, None)

    claimed = claim(store, POOL)
    assert admin.task_show(store, task.id).where == "runs on vm1"
    settle(store, POOL, [fail_again(claimed[2])])
    view = admin.task_show(store, task.id)
    assert (view.state, view.attempts, view.excluded, view.where[:7]) == ("scheduled", 1, ("vm1",), "due at ")
    (attempt,) = view.history
    assert (attempt.number, attempt.endpoint, attempt.kind, attempt.status_code) == (1, "vm1", "http_5xx", 503)
    assert (attempt.error, attempt.started_at, attempt.ended_at) == ("busy", 1.5, None)

    store.pipelined([("ZADD", store.keys.registry("scheduled", POOL), 1, task.id)])
    store.run(store.scripts.promote(POOL))
    assert admin.task_show(store, task.id).where == "waits in list 'high!vm1', place 1 of 1"
    (claimed_again,) = claim(store, POOL, endpoint="vm2")
    settle(store, POOL, [refuse(claimed_again)])
    view = admin.dead_show(store, task.id)
    assert (view.state, view.attempts, view.endpoint, view.status_code) == ("dead", 2, "vm2", 400)
    assert view.reason == "http_400: no such model"
    assert [attempt.endpoint for attempt in view.history] == ["vm1", "vm2"]
    assert view.where.startswith("kept for ")
    assert view.ttl is not None
    assert 0 < view.ttl <= 600
    assert view.answer == '{"error": "no"}'
    assert view.payload["json"] == {"n": 5}
    assert view.payload["headers"] == {"x-trace": "t"}
    json.dumps(view.to_dict())


def test_a_task_whose_process_died_and_one_that_is_unknown(broker: Broker, store: Store) -> None:
    register(store, POOL)
    task = broker.enqueue(POOL, NpuTask("text_analysis", {"text": "x"}))
    claim(store, POOL)
    store.pipelined([("ZADD", store.keys.slots(POOL, "vm1"), 1, task.id)])
    assert store.run(store.scripts.reap(POOL, max_deliveries=1, dead_letter_ttl=60.0, lease=0.0)).poisoned == 1
    view = admin.dead_show(store, task.id)
    assert (view.state, view.lost, view.history[0].kind) == ("poison", 1, "lease_lost")
    assert view.history[0].ended_at == pytest.approx(time.time(), abs=60)
    assert view.payload == {"task_type": "text_analysis", "data": {"text": "x"}}
    with pytest.raises(UnknownTask, match="never-was"):
        admin.task_show(store, "never-was")


def test_a_task_with_data_that_nobody_can_read_is_still_shown(store: Store) -> None:
    fields = ("status", "failed", "data", b"\x00", "exc_info", "a\nValueError: b\n")
    store.pipelined([("HSET", store.keys.job("odd"), *fields)])
    view = admin.dead_show(store, "odd")
    assert (view.state, view.reason) == ("dead", "ValueError: b")
    assert "unreadable" in view.payload


def test_cancel_over_pools(broker: Broker, store: Store) -> None:
    register(store, POOL)
    done = broker.enqueue(POOL, ask())
    serve(store, POOL)
    ids = [done.id, broker.enqueue(POOL, ask()).id, broker.enqueue("other", ask()).id, "never-was"]
    assert admin.cancel(store, ids) == admin.CancelCount(canceled=2, settled=1, unknown=1)
    assert admin.cancel(store, ids).canceled == 2


# dead letters


def kill(broker: Broker, store: Store, count: int, reason: str = "http_400: no such model") -> list[str]:
    """In one call: all share a score."""
    tasks = broker.enqueue_many(POOL, [ask(n) for n in range(count)])
    claimed = claim(store, POOL, count)
    assert len(claimed) == count
    settle(store, POOL, [refuse(task, reason) for task in claimed])
    return [task.id for task in tasks]


def all_pages(store: Store, limit: int, match: admin.Filter = admin.Filter()) -> list[str]:  # noqa: B008  # frozen
    found: list[str] = []
    cursor = None
    while True:
        page = admin.dead_list(store, POOL, limit, match=match, cursor=cursor)
        assert len(page.letters) <= limit
        found += [letter.id for letter in page.letters]
        cursor = page.cursor
        if cursor is None:
            return found


@pytest.mark.parametrize("limit", [1, 7, 100, 1000])
def test_every_dead_letter_stands_on_one_page_newest_first(broker: Broker, store: Store, limit: int) -> None:
    register(store, POOL, slots=500)
    older = kill(broker, store, 30)
    newer = kill(broker, store, 230)
    found = all_pages(store, limit)
    assert sorted(found) == sorted(older + newer)
    assert set(found[-30:]) == set(older)


def test_the_list_by_reason_endpoint_and_outcome(broker: Broker, store: Store) -> None:
    register(store, POOL, slots=500)
    kill(broker, store, 120, "http_400: no such model")
    long = kill(broker, store, 3, "too_large: 2 MB")
    (letter, *_) = admin.dead_list(store, POOL, match=admin.Filter(reason="TOO_LARGE")).letters
    assert letter.id in long
    assert (letter.outcome, letter.reason, letter.attempts, letter.endpoint) == ("dead", "too_large: 2 MB", 1, "vm1")
    assert letter.description == "POST /v1/chat/completions"
    assert letter.ended_at == pytest.approx(time.time(), abs=60)
    assert all_pages(store, 2, admin.Filter(reason="2 mb", endpoint="VM1")) == sorted(long, reverse=True)
    assert all_pages(store, 50, admin.Filter(outcome="poison")) == []
    assert admin.dead_count(store, POOL) == 123
    assert admin.dead_count(store, POOL, admin.Filter(reason="model")) == 120
    with pytest.raises(InvalidTask, match="cursor"):
        admin.dead_list(store, POOL, cursor="x/y")
    with pytest.raises(InvalidTask, match="limit"):
        admin.dead_list(store, POOL, 0)
    with pytest.raises(InvalidTask, match="outcome"):
        admin.Filter(outcome="ok")


def test_redrive_by_id_counts_what_happened(broker: Broker, store: Store) -> None:
    register(store, POOL, slots=500)
    dead = kill(broker, store, 2)
    done = broker.enqueue(POOL, ask())
    serve(store, POOL)
    waiting = broker.enqueue(POOL, ask())
    counts = admin.redrive(store, POOL, [dead[0], done.id, waiting.id, "never-was"])
    assert counts == admin.Redriven(queued=1, unsettled=1, done=1, unknown=1)
    assert broker.task(POOL, dead[0]).status() == "queued"
    assert [letter.id for letter in admin.dead_list(store, POOL).letters] == [dead[1]]
    while serve(store, POOL):
        pass
    assert broker.task(POOL, dead[0]).result(timeout=5).ok


def test_redrive_of_all_that_match(broker: Broker, store: Store) -> None:
    register(store, POOL, slots=500)
    kill(broker, store, 250, "http_503: busy")
    other = kill(broker, store, 5, "http_400: no such model")
    assert admin.redrive(store, POOL, match=admin.Filter(reason="busy")).queued == 250
    assert sorted(all_pages(store, 100)) == sorted(other)
    assert admin.status(store, POOL).backlog == 250
    assert admin.redrive(store, POOL) == admin.Redriven(queued=5)
    assert admin.redrive(store, POOL) == admin.Redriven()


def test_purge(broker: Broker, store: Store) -> None:
    register(store, POOL, slots=500)
    ids = kill(broker, store, 150, "http_503: busy")
    rest = kill(broker, store, 2)
    waiting = broker.enqueue(POOL, ask())
    assert admin.purge(store, POOL, [ids[0], waiting.id, "never-was"]) == 1
    assert waiting.status() == "queued"
    assert admin.purge(store, POOL, match=admin.Filter(reason="busy")) == 149
    assert sorted(all_pages(store, 100)) == sorted(rest)
    assert admin.purge(store, POOL) == 2
    assert store.pipelined([("EXISTS", store.keys.registry("failed", POOL), *(store.keys.job(i) for i in ids))]) == [0]


def test_a_dead_letter_that_dies_again_is_redriven_once(broker: Broker, store: Store) -> None:
    """What fails again while a redrive of all goes on comes in above it."""
    register(store, POOL, slots=500)
    kill(broker, store, 120)
    page = admin.dead_list(store, POOL, 100)
    first = [letter.id for letter in page.letters]
    assert admin.redrive(store, POOL, first).queued == 100
    claimed = claim(store, POOL, 100)
    later: list[DeadLetter] = [refuse(task) for task in claimed]
    settle(store, POOL, later)
    rest = admin.dead_list(store, POOL, 100, cursor=page.cursor)
    assert not {letter.id for letter in rest.letters} & set(first)
    assert len(rest.letters) == 20
