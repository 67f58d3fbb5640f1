"""Redis at its memory limit: tasks are refused, everything that consumes goes on, and so memory comes free again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from broker.errors import QueueFull
from broker.scripts import Lease
from broker.store import Store
from tests.support.verbs import LEASE, POOL, Verbs, new, row

LOST = Lease("nobody", "1.0.p1", "a")


@pytest.fixture
def verbs(real_store: Store) -> Verbs:
    verbs = Verbs(real_store)
    verbs.register(row("a", 10), row("b"))
    return verbs


@contextmanager
def memory_full(verbs: Verbs) -> Iterator[None]:
    """Scripts must begin with a write that Redis allows, or it refuses them whole."""
    verbs.store.redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(QueueFull):
            verbs.enqueue("too-much")
        yield
    finally:
        verbs.store.redis.config_set("maxmemory", 0)


def test_enqueue_is_refused_and_a_repeat_still_answered(verbs: Verbs) -> None:
    verbs.enqueue("t")
    with memory_full(verbs):
        assert [one.word for one in verbs.enqueue("t")] == ["already"]
    assert verbs.status("too-much") == ""
    assert [one.word for one in verbs.enqueue("too-much")] == ["queued"]


def test_tasks_are_claimed_renewed_and_finished(verbs: Verbs) -> None:
    verbs.enqueue(*[f"t{one}" for one in range(30)])
    done = 0
    with memory_full(verbs):
        while leases := verbs.claim("p1", a=10):
            assert verbs.renew("p1", *leases, endpoints=["a"]) == ["held"] * len(leases)
            assert verbs.finish(*leases) == ["done"] * len(leases)
            done += len(leases)
    assert done == 30


SETTLES: dict[str, Callable[[Verbs, Lease], list[str]]] = {
    "finish": lambda verbs, lease: verbs.finish(LOST, lease),
    "retry": lambda verbs, lease: verbs.retry(LOST, lease),
    "retry later": lambda verbs, lease: verbs.retry(LOST, lease, delay=5),
    "release": lambda verbs, lease: verbs.release(LOST, lease, pause=5),
    "dead_letter": lambda verbs, lease: verbs.dead_letter(LOST, lease),
}


@pytest.mark.parametrize("settle", SETTLES)
def test_a_batch_settles_although_its_first_lease_is_lost(verbs: Verbs, settle: str) -> None:
    verbs.enqueue("t")
    (lease,) = verbs.claim("p1", a=1)
    with memory_full(verbs):
        assert SETTLES[settle](verbs, lease) == ["lost", "done"]
    assert verbs.in_flight("a") == 0


def test_housekeeping_goes_on(verbs: Verbs) -> None:
    verbs.enqueue(new("delayed", delay=1), new("late", deadline=2), new("running", deadline=1))
    verbs.cancel("late")
    verbs.redrive("late")
    verbs.claim("p1", a=2)
    verbs.pass_time(LEASE)
    with memory_full(verbs):
        assert verbs.expire() == 1, "it runs, and is left to its worker"
        assert verbs.promote() == 1
        assert verbs.reap().requeued == 2


def test_people_can_act(verbs: Verbs) -> None:
    verbs.enqueue("waiting", "running", "dead")
    verbs.cancel("dead")
    verbs.claim("p1", a=1, most=1)
    with memory_full(verbs):
        assert verbs.cancel("waiting", "running") == ["running", "canceled"]
        assert verbs.redrive("dead") == ["queued"]
        assert [verbs.drain("a"), verbs.reset("a")] == ["done", "done"]
        verbs.health("a", ok=False)
        verbs.leave("p1")


def test_a_worker_can_start(verbs: Verbs) -> None:
    verbs.enqueue("t")
    with memory_full(verbs):
        assert verbs.register(row("a", 10), row("c", 10)) == ["b"]
        assert len(verbs.claim("p1", c=1)) == 1
    assert verbs.store.redis.sismember(verbs.store.keys.endpoints(POOL), "c")
