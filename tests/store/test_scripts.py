"""Verbs before and beside a settle: what each answers, what becomes of the task. Orders of calls: test_model.py."""

from __future__ import annotations

import pytest

from broker.scripts import Enqueued, Offer, Reaped
from tests.support.verbs import LEASE, POOL, Verbs, ids, new, row, run_one

# -- enqueue


def test_enqueue_queues(verbs: Verbs) -> None:
    assert verbs.enqueue("t1", "t2") == [Enqueued("queued", "t1"), Enqueued("queued", "t2")]
    assert (verbs.status("t1"), verbs.counter("n_enqueued")) == ("queued", 2)


def test_enqueue_whose_reply_was_lost_may_be_made_again(verbs: Verbs) -> None:
    for _ in range(3):
        verbs.enqueue("t")
    assert verbs.enqueue("t") == [Enqueued("already", "t")]
    assert ids(verbs.claim("p1", a=10)) == ["t"]
    assert verbs.enqueue("t") == [Enqueued("already", "t")], "while it runs"
    assert verbs.claim("p1", a=10) == []


def test_enqueue_of_a_known_id_with_another_payload_is_a_conflict(verbs: Verbs) -> None:
    verbs.enqueue("t")
    assert verbs.enqueue(new("t", digest="other")) == [Enqueued("conflict", "t")]


def test_a_task_that_its_producer_did_not_name_is_known_by_its_data(verbs: Verbs) -> None:
    made = new("t", digest="")
    named = made._replace(digest="d")
    assert verbs.enqueue(made) == [Enqueued("queued", "t")]
    assert verbs.field("t", "x_dig") == ""
    assert verbs.enqueue(made) == [Enqueued("already", "t")], "its reply was lost"
    assert verbs.enqueue(named) == [Enqueued("already", "t")]
    assert verbs.enqueue(named._replace(data=b"[]")) == [Enqueued("conflict", "t")]


def test_enqueue_with_an_idempotency_key_answers_the_earlier_id(verbs: Verbs) -> None:
    first, second, other = new("t1", key="k"), new("t2", key="k"), new("t3", key="k", digest="other")
    assert verbs.enqueue(first, second, other) == [
        Enqueued("queued", "t1"), Enqueued("already", "t1"), Enqueued("conflict", "t1"),
    ]  # fmt: skip
    assert ids(verbs.claim("p1", a=10)) == ["t1"]


def test_enqueue_says_full_and_queues_what_fits(verbs: Verbs) -> None:
    verbs.enqueue(new("later", delay=5), new("urgent", priority="high"))
    words = [one.word for one in verbs.enqueue("t1", "t2", "later", max_depth=3)]
    assert words == ["queued", "full", "already"], "delayed and urgent tasks count; a repeat is never refused"
    assert verbs.status("t2") == ""


def test_enqueue_with_a_delay_counts_as_enqueued(verbs: Verbs) -> None:
    verbs.enqueue(new("t", delay=5))
    assert (verbs.status("t"), verbs.counter("n_enqueued")) == ("scheduled", 1)


def test_enqueue_rings_one_waiting_process_a_task(verbs: Verbs) -> None:
    verbs.register(row("a", 1), row("b", 1))
    verbs.claim("p1", a=1)
    verbs.claim("p2", b=1)
    verbs.enqueue("t")
    bells = [verbs.store.redis.lrange(verbs.store.keys.bell(name), 0, -1) for name in ("p1", "p2")]
    assert bells == [[b"work"], []]


def test_enqueue_rings_although_the_endpoint_is_to_be_checked_first(verbs: Verbs) -> None:
    verbs.register(row("a", 1), check_after=30_000)
    verbs.health("a", ok=True)
    verbs.clock.advance(31_000)
    verbs.claim("p1", a=1)
    verbs.enqueue("t")
    assert verbs.store.redis.llen(verbs.store.keys.bell("p1")) == 1
    assert verbs.claims("p1", [Offer("a", 1, 0)]).stale == ("a",)


# -- claim


def test_claim_gives_a_lease_that_carries_the_task(verbs: Verbs) -> None:
    verbs.enqueue(new("t", deadline=60, max_attempts=4))
    (task,) = verbs.claims("p1", [Offer("a", 1, 0)]).tasks
    now = verbs.clock.now / 1000
    assert (task.lease.id, task.lease.endpoint, task.data, task.plain) == ("t", "a", b"{}", False)
    assert (task.attempts, task.max_attempts, task.lost) == (0, 4, 0)
    assert (task.enqueued_at, task.claimed_at, task.deadline) == (now, now, now + 60)
    assert (verbs.status("t"), verbs.in_flight("a")) == ("started", 1)


def test_claim_keeps_the_order_of_submission(verbs: Verbs) -> None:
    """S5: the same priority, one slot."""
    verbs.register(row("a", 1))
    names = [f"t{one}" for one in range(1000)]
    for at in range(0, 1000, 250):
        verbs.enqueue(*names[at : at + 250])
    done = []
    while leases := verbs.claim("p1", a=1):
        assert len(leases) == 1
        verbs.finish(*leases)
        done += ids(leases)
    assert done == names


def test_claim_prefers_high_priority(verbs: Verbs) -> None:
    verbs.enqueue(new("low", priority="low"), "normal", new("high", priority="high"))
    assert ids(verbs.claim("p1", a=3)) == ["high", "normal", "low"]


def test_claim_never_exceeds_the_slots_of_all_processes_together(verbs: Verbs) -> None:
    verbs.enqueue(*[f"t{one}" for one in range(30)])
    assert sum(len(verbs.claim(process, a=10)) for process in ("p1", "p2", "p3")) == 10


def test_claim_fills_the_slots_from_all_classes_of_tasks_in_one_call(verbs: Verbs) -> None:
    verbs.register(row("a", 4, capabilities=["vision"]))
    verbs.enqueue("t1", "t2", new("v1", requires=["vision"]), new("v2", requires=["vision"]))
    assert sorted(ids(verbs.claim("p1", a=4))) == ["t1", "t2", "v1", "v2"]


def test_claim_needs_the_capability(verbs: Verbs) -> None:
    verbs.register(row("a"), row("b", capabilities=["code", "vision"]))
    verbs.enqueue(new("t", requires=["vision"]))
    assert verbs.claim("p1", a=1) == []
    assert ids(verbs.claim("p2", b=1)) == ["t"]


@pytest.mark.parametrize("stop", ["disabled", "drained", "paused", "unhealthy"])
def test_claim_gives_nothing_to_an_endpoint_that_is(verbs: Verbs, stop: str) -> None:
    lease = run_one(verbs)
    verbs.enqueue("other")
    if stop == "disabled":
        verbs.register(row("a", 10, on=False))
    elif stop == "drained":
        verbs.drain("a")
    elif stop == "paused":
        verbs.retry(lease, pause=60, delay=1)
    else:
        verbs.health("a", ok=False)
    assert verbs.claim("p1", a=10) == []


def test_claim_drops_a_task_whose_deadline_passed(verbs: Verbs) -> None:
    verbs.enqueue(new("late", deadline=1), "good")
    verbs.clock.advance(1000)
    assert ids(verbs.claim("p1", a=2)) == ["good"]
    assert (verbs.outcome("late"), verbs.field("late", "x_why")[:8]) == ("expired", "expired:")


def test_claim_promotes_what_is_due(verbs: Verbs) -> None:
    verbs.enqueue(new("t", delay=5))
    claims = verbs.claims("p1", [Offer("a", 1, 0)])
    assert (claims.tasks, claims.wake) == ([], 5.0)
    verbs.clock.advance(5000)
    assert ids(verbs.claim("p1", a=1)) == ["t"]


def test_claim_serves_low_priorities_to_processes_that_take_turns(verbs: Verbs) -> None:
    """Two processes in step, and only the second can serve the low one: it must come although high ones never end."""
    verbs.register(row("a", 1), row("b", 1, capabilities=["vision"]))
    verbs.enqueue(new("low", priority="low", requires=["vision"]))
    verbs.clock.advance(1)
    for number in range(200):
        verbs.enqueue(*[new(f"h{number}-{one}", priority="high") for one in range(4)])
        verbs.finish(*verbs.claim("p1", a=1))
        leases = verbs.claim("p2", b=1)
        verbs.finish(*leases)
        if "low" in ids(leases):
            return
    pytest.fail("never served")


def test_claim_serves_a_dead_letter_that_rq_itself_put_back(verbs: Verbs) -> None:
    """`rq requeue` knows nothing of our fields, and the deadline it had has passed."""
    verbs.enqueue(new("t", deadline=5))
    verbs.dead_letter(*verbs.claim("p1", a=1))
    verbs.clock.advance(60_000)
    store = verbs.store
    store.redis.zrem(store.keys.registry("failed", POOL), "t")
    store.redis.hset(store.keys.job("t"), "status", "queued")
    store.redis.rpush(store.keys.queue(POOL), "t")
    (task,) = verbs.claims("p1", [Offer("a", 1, 0)]).tasks
    assert (task.attempts, task.deadline, verbs.outcome("t")) == (0, 0.0, "")
    assert verbs.finish(task.lease) == ["done"]


@pytest.mark.parametrize("name", "x_dl x_max x_del x_born x_at x_fence x_excl x_req x_pri data".split())
def test_claim_survives_a_mangled_task(verbs: Verbs, name: str) -> None:
    verbs.enqueue("t1", "bad", "t2")
    verbs.store.redis.hset(verbs.store.keys.job("bad"), name, "garbage")
    assert {"t1", "t2"} <= set(ids(verbs.claim("p1", a=3)))


# -- expire, promote


def test_a_thousand_expired_tasks_leave_outcomes_and_nothing_else(verbs: Verbs) -> None:
    """S12: nobody claims; the sweep finds them, wherever they wait."""
    kinds = [{"priority": "high"}, {"delay": 3600.0}, {"requires": ["vision"]}, {}]
    for at in range(0, 1000, 250):
        verbs.enqueue(*[new(f"t{one}", deadline=5, **kinds[one % 4]) for one in range(at, at + 250)])  # type: ignore[arg-type]  # as new() has them
    verbs.clock.advance(4999)
    assert verbs.expire() == 0
    verbs.clock.advance(1)
    assert [verbs.expire() for _ in range(11)] == [100] * 10 + [0]
    assert {verbs.outcome(f"t{one}") for one in range(1000)} == {"expired"}
    left = {key.decode() for key in verbs.store.pipelined([("KEYS", "*")])[0]}
    left = {key for key in left if not key.startswith("rq:job:")}
    keys = verbs.store.keys
    assert left == {
        "test:clock", keys.queues(), keys.pools(), keys.pool(POOL), keys.endpoints(POOL), keys.endpoint(POOL, "a"),
    }  # fmt: skip


def test_expire_leaves_a_running_task_to_its_worker(verbs: Verbs) -> None:
    verbs.enqueue(new("t", deadline=1))
    (lease,) = verbs.claim("p1", a=1)
    verbs.clock.advance(1000)
    verbs.expire()
    assert verbs.status("t") == "started"
    verbs.retry(lease)
    verbs.clock.advance(5000)
    verbs.expire()
    assert verbs.outcome("t") == "expired"


def test_promote_takes_what_is_due_and_no_more(verbs: Verbs) -> None:
    verbs.enqueue(new("t1", delay=1), new("t2", delay=2))
    verbs.clock.advance(1000)
    assert (verbs.promote(), verbs.promote()) == (1, 0)
    assert (verbs.status("t1"), verbs.status("t2")) == ("queued", "scheduled")


# -- cancel


def test_cancel_of_waiting_tasks(verbs: Verbs) -> None:
    """S6: those never start."""
    verbs.enqueue("queued", new("delayed", delay=1), "other")
    assert verbs.cancel("queued", "delayed", "nobody") == ["canceled", "canceled", "unknown"]
    verbs.clock.advance(1000)
    assert ids(verbs.claim("p1", a=10)) == ["other"]
    assert verbs.cancel("queued") == ["settled"]


def test_cancel_of_a_running_task_tells_its_process_and_keeps_the_slot_until_it_answers(verbs: Verbs) -> None:
    verbs.register(row("a", 1))
    lease = run_one(verbs)
    verbs.enqueue("next")
    assert verbs.cancel("t") == ["running"]
    assert verbs.store.redis.lrange(verbs.store.keys.bell("p1"), 0, -1) == [f"cancel t {lease.token}".encode()]
    assert (verbs.outcome("t"), verbs.claim("p2", a=1)) == ("canceled", [])
    assert verbs.redrive("t") == ["unsettled"], "while its connection is open"
    assert verbs.retry(lease) == ["canceled"]
    assert ids(verbs.claim("p2", a=1)) == ["next"]
    assert (verbs.outcome("t"), verbs.redrive("t")) == ("canceled", ["queued"])


def test_the_slot_of_a_canceled_task_whose_process_died_is_reaped(verbs: Verbs) -> None:
    run_one(verbs)
    verbs.cancel("t")
    verbs.pass_time(LEASE)
    assert verbs.reap() == Reaped(0, 0, 1)
    assert verbs.redrive("t") == ["queued"]
