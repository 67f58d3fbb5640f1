"""Every verb: what it answers and what becomes of the task. Orders of many calls are in test_model.py."""

from __future__ import annotations

import pytest

from broker.scripts import Enqueued, Lease, Offer, Reaped
from broker.store import Store
from tests.support.verbs import DAY, LEASE, POOL, Verbs, new, row


@pytest.fixture
def verbs(store: Store) -> Verbs:
    """A pool with one endpoint `a` of ten slots."""
    verbs = Verbs(store)
    verbs.register(row("a", 10))
    return verbs


def run_one(verbs: Verbs, task: str = "t") -> Lease:
    """A task, enqueued and claimed by process p1."""
    verbs.enqueue(task)
    (lease,) = verbs.claim("p1", a=1)
    return lease


def ids(leases: list[Lease]) -> list[str]:
    return [lease.id for lease in leases]


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


@pytest.mark.parametrize("name", ["x_dl", "x_max", "x_del", "x_born", "x_at", "x_fence", "x_excl", "x_req", "x_pri", "data"])
def test_claim_survives_a_mangled_task(verbs: Verbs, name: str) -> None:
    verbs.enqueue("t1", "bad", "t2")
    verbs.store.redis.hset(verbs.store.keys.job("bad"), name, "garbage")
    assert {"t1", "t2"} <= set(ids(verbs.claim("p1", a=3)))


# -- finish, and the fence


def test_finish_gives_the_outcome(verbs: Verbs) -> None:
    lease = run_one(verbs)
    assert verbs.finish(lease) == ["done"]
    assert (verbs.outcome("t"), verbs.status("t"), verbs.in_flight("a")) == ("ok", "finished", 0)
    assert (verbs.field("t", "x_body"), verbs.field("t", "x_try")) == ("body", "1")
    assert (verbs.counter("n_ok"), verbs.endpoint("a", "served")) == (1, "1")
    assert 0 < verbs.store.redis.pttl(verbs.store.keys.job("t")) <= DAY


def test_finish_of_a_repeat_answers_already(verbs: Verbs) -> None:
    lease = run_one(verbs)
    assert [verbs.finish(lease), verbs.finish(lease)] == [["done"], ["already"]]
    assert (verbs.counter("n_ok"), verbs.endpoint("a", "served")) == (1, "1")


@pytest.mark.parametrize("verb", ["finish", "retry", "release", "dead_letter"])
def test_a_zombie_is_refused(verbs: Verbs, verb: str) -> None:
    """Its lease ran out, somebody else runs the task now."""
    zombie = run_one(verbs)
    verbs.clock.advance(LEASE)
    verbs.reap()
    verbs.clock.advance(500)
    (lease,) = verbs.claim("p2", a=1)
    assert getattr(verbs, verb)(zombie) == ["lost"]
    assert (verbs.outcome("t"), verbs.status("t"), verbs.in_flight("a")) == ("", "started", 1)
    assert verbs.finish(lease) == ["done"]
    assert getattr(verbs, verb)(zombie) == ["lost"]
    assert verbs.outcome("t") == "ok"


@pytest.mark.parametrize("verb", ["retry", "release", "dead_letter"])
def test_a_repeated_settle_changes_nothing(verbs: Verbs, verb: str) -> None:
    lease = run_one(verbs)
    settle = getattr(verbs, verb)
    assert [settle(lease), settle(lease)] == [["done"], ["already"]]
    assert verbs.endpoint("a", "failed") in ("", "1")
    assert len(verbs.claim("p1", a=10)) <= 1


def test_an_unknown_task_is_lost(verbs: Verbs) -> None:
    assert verbs.finish(Lease("nobody", "1.0.p1", "a")) == ["lost"]


def test_finish_tells_the_breaker_of_the_probe_behind_a_late_answer(verbs: Verbs) -> None:
    """One batch: an answer from before the breaker opened, and the probe's."""
    verbs.register(row("a", 10), failures=1, cooldown=1000)
    verbs.enqueue("late", "bad", "probe")
    late, bad, probe = verbs.claim("p1", a=3)
    verbs.release(probe)
    verbs.retry(bad, delay=60)
    verbs.clock.advance(1000)
    (probe,) = verbs.claim("p1", a=3)
    assert verbs.finish(late, probe) == ["done", "done"]
    assert verbs.endpoint("a", "state") == "closed"


def test_finish_names_its_task_in_the_reply_list(verbs: Verbs) -> None:
    verbs.enqueue(new("t", reply="r"))
    verbs.finish(*verbs.claim("p1", a=1))
    assert verbs.store.redis.lrange(verbs.store.keys.reply("r"), 0, -1) == [b"t"]


# -- retry


def test_retry_counts_an_attempt_and_goes_elsewhere(verbs: Verbs) -> None:
    verbs.register(row("a"), row("b"))
    verbs.enqueue("t")
    (lease,) = verbs.claim("p1", a=1)
    assert verbs.retry(lease) == ["done"]
    assert verbs.claim("p1", a=1) == [], "not here again"
    (task,) = verbs.claims("p2", [Offer("b", 1, 0)]).tasks
    assert (task.lease.endpoint, task.attempts) == ("b", 1)


def test_retry_comes_back_to_the_only_endpoint(verbs: Verbs) -> None:
    assert verbs.retry(run_one(verbs)) == ["done"]
    assert ids(verbs.claim("p1", a=1)) == ["t"]


def test_retry_comes_back_when_every_other_endpoint_is_out(verbs: Verbs) -> None:
    verbs.register(row("a"), row("b"))
    verbs.enqueue("t")
    verbs.retry(*verbs.claim("p1", a=1))
    verbs.drain("b")
    assert ids(verbs.claim("p1", a=1)) == ["t"]


def test_retry_waits_for_its_delay_and_overtakes_nobody(verbs: Verbs) -> None:
    """S2."""
    verbs.retry(run_one(verbs, "old"), delay=5)
    verbs.enqueue("fresh")
    assert ids(verbs.claim("p1", a=1)) == ["fresh"]
    verbs.clock.advance(5000)
    assert ids(verbs.claim("p1", a=1)) == ["old"]


def test_five_failures_in_a_row_open_the_breaker_for_everybody(verbs: Verbs) -> None:
    """S9, S14: no process claims; after the cooldown one probe; its success closes the breaker."""
    verbs.enqueue(*[f"t{one}" for one in range(20)])
    leases = verbs.claim("p1", a=6)
    verbs.retry(*leases[:4], delay=600)
    verbs.enqueue("again")
    assert verbs.endpoint("a", "state") == ""
    verbs.retry(leases[4], delay=600)
    assert (verbs.endpoint("a", "state"), verbs.events) == ("open", ["opened a 60000"])
    assert [verbs.claim(process, a=10) for process in ("p1", "p2")] == [[], []]
    verbs.clock.advance(60_000)
    claimed = [*verbs.claim("p1", a=10), *verbs.claim("p2", a=10)]
    assert len(claimed) == 1, "one probe over all processes"
    verbs.finish(*claimed)
    assert (verbs.endpoint("a", "state"), verbs.events[1:]) == ("closed", ["closed a"])
    assert len(verbs.claim("p2", a=10)) > 1


def test_a_failed_probe_doubles_the_cooldown(verbs: Verbs) -> None:
    verbs.register(row("a", 10), failures=1, cooldown=1000, cooldown_max=3000)
    verbs.enqueue("t")
    for expected in (1000, 2000, 3000, 3000):
        (lease,) = verbs.claim("p1", a=1)
        verbs.retry(lease)
        assert int(verbs.endpoint("a", "until")) - verbs.clock.now == expected
        verbs.clock.advance(expected - 1)
        assert verbs.claim("p1", a=1) == []
        verbs.clock.advance(1)


def test_answers_from_before_it_opened_neither_extend_nor_close_the_breaker(verbs: Verbs) -> None:
    verbs.enqueue(*[f"t{one}" for one in range(8)])
    leases = verbs.claim("p1", a=8)
    verbs.retry(*leases[:5], delay=600)
    until = verbs.endpoint("a", "until")
    verbs.clock.advance(1000)
    verbs.retry(leases[5], delay=600)
    verbs.finish(leases[6])
    assert (verbs.endpoint("a", "state"), verbs.endpoint("a", "until")) == ("open", until)


def test_a_wrong_key_opens_the_breaker_at_once(verbs: Verbs) -> None:
    verbs.retry(run_one(verbs), verdict="open")
    assert verbs.endpoint("a", "state") == "open"


def test_a_success_ends_the_row_of_failures(verbs: Verbs) -> None:
    verbs.enqueue(*[f"t{one}" for one in range(9)])
    leases = verbs.claim("p1", a=9)
    verbs.retry(*leases[:4], delay=600)
    verbs.finish(leases[4])
    verbs.retry(*leases[5:], delay=600)
    assert verbs.endpoint("a", "state") != "open"


def test_a_high_failure_rate_opens_the_breaker_although_some_succeed(verbs: Verbs) -> None:
    verbs.register(row("a", 10), rate_window=10_000, failure_rate=50, minimum_volume=10)
    for number in range(5):
        verbs.enqueue(f"bad{number}", f"good{number}")
        bad, good = verbs.claim("p1", a=2)
        assert verbs.endpoint("a", "state") != "open"
        verbs.finish(good)
        verbs.retry(bad, delay=600)
    assert verbs.endpoint("a", "state") == "open"


# -- release, pause


def test_release_counts_no_attempt_and_keeps_the_order(verbs: Verbs) -> None:
    verbs.enqueue("t1", "t2", "t3", "t4")
    leases = verbs.claim("p1", a=3)
    assert verbs.release(*leases) == ["done"] * 3
    claims = verbs.claims("p1", [Offer("a", 4, 0)])
    assert [(task.lease.id, task.attempts) for task in claims.tasks] == [("t1", 0), ("t2", 0), ("t3", 0), ("t4", 0)]


@pytest.mark.parametrize("pauses", [(1, 60), (60, 1)])
def test_the_later_of_two_pauses_holds(verbs: Verbs, pauses: tuple[float, float]) -> None:
    """S7; the breaker is untouched."""
    verbs.enqueue("t1", "t2")
    for lease, pause in zip(verbs.claim("p1", a=2), pauses, strict=True):
        verbs.release(lease, pause=pause)
    claims = verbs.claims("p1", [Offer("a", 2, 0)])
    assert (claims.tasks, claims.wake) == ([], 60.0)
    verbs.clock.advance(60_000)
    assert len(verbs.claim("p1", a=2)) == 2
    assert verbs.endpoint("a", "fails") == ""


# -- dead_letter, redrive


def test_dead_letter_keeps_the_reason_and_the_history(verbs: Verbs) -> None:
    verbs.retry(run_one(verbs))
    assert verbs.dead_letter(*verbs.claim("p1", a=1), reason="HTTP 503 three times") == ["done"]
    assert (verbs.outcome("t"), verbs.status("t")) == ("dead", "failed")
    assert (verbs.field("t", "x_why"), verbs.field("t", "x_hist")) == ("HTTP 503 three times", "{}\n{}\n")
    assert verbs.store.redis.zrange(verbs.store.keys.registry("failed", POOL), 0, -1) == [b"t"]


def test_dead_letter_of_a_bad_task_leaves_the_breaker_alone(verbs: Verbs) -> None:
    """S13."""
    for number in range(20):
        verbs.dead_letter(run_one(verbs, f"t{number}"), verdict="good")
    assert verbs.endpoint("a", "state") != "open"


def test_dead_letter_for_the_deadline_is_expired(verbs: Verbs) -> None:
    verbs.dead_letter(run_one(verbs), reason="expired: its deadline passed")
    assert verbs.outcome("t") == "expired"


def test_redrive_starts_anew(verbs: Verbs) -> None:
    verbs.enqueue(new("t", deadline=5))
    verbs.retry(*verbs.claim("p1", a=1))
    verbs.dead_letter(*verbs.claim("p1", a=1))
    verbs.clock.advance(DAY)
    assert verbs.redrive("t", "nobody") == ["queued", "unknown"]
    (task,) = verbs.claims("p1", [Offer("a", 1, 0)]).tasks
    assert (task.attempts, task.deadline) == (0, 0.0)
    assert verbs.redrive("t") == ["unsettled"]
    verbs.finish(task.lease)
    assert verbs.redrive("t") == ["done"]


def test_a_zombie_from_before_a_redrive_is_refused(verbs: Verbs) -> None:
    zombie = run_one(verbs)
    verbs.clock.advance(LEASE)
    verbs.reap(max_deliveries=1)
    assert (verbs.outcome("t"), verbs.redrive("t")) == ("poison", ["queued"])
    assert verbs.finish(zombie) == ["lost"]
    verbs.claim("p2", a=1)
    assert verbs.finish(zombie) == ["lost"]


# -- renew, reap


def test_renew_keeps_a_lease_alive(verbs: Verbs) -> None:
    lease = run_one(verbs)
    for _ in range(5):
        verbs.clock.advance(LEASE - 1)
        assert verbs.renew("p1", lease) == ["held"]
        assert verbs.reap() == Reaped(0, 0, 0)


def test_renew_tells_what_became_of_leases(verbs: Verbs) -> None:
    verbs.enqueue("held", "done", "canceled", "lost")
    leases = verbs.claim("p1", a=4)
    verbs.finish(leases[1])
    verbs.cancel("canceled")
    verbs.release(leases[3])
    verbs.claim("p2", a=1)
    verbs.finish(*verbs.claim("p3", a=1))
    assert verbs.renew("p1", *leases) == ["held", "already", "canceled", "already"]
    assert verbs.renew("p1", Lease("lost", "9.0.p1", "a")) == ["lost"]


def test_renew_does_not_bring_a_removed_endpoint_back(verbs: Verbs) -> None:
    assert verbs.register(row("b")) == ["a"]
    verbs.renew("p1", endpoints=["a", "b"])
    assert verbs.store.redis.exists(verbs.store.keys.endpoint(POOL, "a")) == 0


@pytest.mark.parametrize("verb", ["retry", "dead_letter", "release"])
def test_a_late_settle_does_not_bring_a_removed_endpoint_back(verbs: Verbs, verb: str) -> None:
    lease = run_one(verbs)
    verbs.clock.advance(LEASE)
    verbs.register(row("b"))
    verbs.reap()
    assert getattr(verbs, verb)(lease) == ["lost"]
    verbs.release(lease, pause=5)
    assert verbs.store.redis.exists(verbs.store.keys.endpoint(POOL, "a")) == 0


def test_reap_puts_back_with_a_delay_and_counts_no_attempt(verbs: Verbs) -> None:
    run_one(verbs)
    verbs.clock.advance(LEASE - 1)
    assert verbs.reap() == Reaped(0, 0, 0)
    verbs.clock.advance(1)
    assert verbs.reap() == Reaped(1, 0, 0)
    assert (verbs.status("t"), verbs.in_flight("a"), verbs.claim("p2", a=1)) == ("scheduled", 0, [])
    verbs.clock.advance(500)
    (task,) = verbs.claims("p2", [Offer("a", 1, 0)]).tasks
    assert (task.attempts, task.lost) == (0, 1)


def test_reap_gives_up_after_five_deliveries(verbs: Verbs) -> None:
    """S21."""
    verbs.enqueue("t")
    for delivery in range(1, 6):
        assert ids(verbs.claim("p1", a=1)) == ["t"]
        verbs.clock.advance(LEASE)
        assert verbs.reap() == (Reaped(1, 0, 0) if delivery < 5 else Reaped(0, 1, 0))
        verbs.clock.advance(30_000)
    assert (verbs.outcome("t"), verbs.in_flight("a"), verbs.claim("p1", a=1)) == ("poison", 0, [])


def test_reap_survives_a_task_that_lost_its_lease_field(verbs: Verbs) -> None:
    run_one(verbs)
    verbs.store.redis.hdel(verbs.store.keys.job("t"), "x_lease")
    verbs.clock.advance(LEASE)
    assert verbs.reap() == Reaped(1, 0, 0)


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
    left = {key.decode() for key in verbs.store.redis.keys() if not key.startswith(b"rq:job:")}
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
    verbs.clock.advance(LEASE)
    assert verbs.reap() == Reaped(0, 0, 1)
    assert verbs.redrive("t") == ["queued"]


# -- endpoints


def test_register_returns_what_is_gone_and_keeps_it_until_it_is_idle(verbs: Verbs) -> None:
    lease = run_one(verbs)
    assert verbs.register(row("b")) == ["a"]
    verbs.reap()
    assert verbs.renew("p1", lease) == ["held"]
    verbs.finish(lease)
    verbs.reap()
    assert verbs.store.redis.smembers(verbs.store.keys.endpoints(POOL)) == {b"b"}


def test_register_keeps_what_runs_and_changes_the_rules(verbs: Verbs) -> None:
    lease = run_one(verbs)
    verbs.enqueue("t1", "t2")
    assert verbs.register(row("a", 2)) == []
    assert len(verbs.claim("p2", a=10)) == 1
    assert verbs.finish(lease) == ["done"]


def test_leave_hands_the_work_to_others(verbs: Verbs) -> None:
    verbs.register(row("a", 1), row("b", 1))
    verbs.claim("p1", a=1)
    verbs.claim("p2", b=1)
    verbs.enqueue("t")
    verbs.leave("p1")
    assert verbs.store.redis.llen(verbs.store.keys.bell("p2")) == 1
    assert ids(verbs.claim("p2", b=1)) == ["t"]


def test_reset_closes_the_breaker_by_hand(verbs: Verbs) -> None:
    verbs.retry(run_one(verbs), verdict="open", pause=60)
    verbs.health("a", ok=False)
    assert [verbs.reset("a"), verbs.reset("nobody")] == ["done", "unknown"]
    assert ids(verbs.claim("p1", a=1)) == ["t"]


def test_health_stops_and_starts_claims_and_leaves_the_breaker_alone(verbs: Verbs) -> None:
    words = [verbs.health("a", ok) for ok in (False, False, True, True, False)]
    assert words == ["down", "same", "recovered", "same", "failed"]
    assert (verbs.endpoint("a", "state"), verbs.health("nobody", ok=True)) == ("", "unknown")


def test_an_endpoint_that_recovers_gets_its_slots_slowly(verbs: Verbs) -> None:
    verbs.register(row("a", 10), slow_start=1)
    verbs.enqueue(*[f"t{one}" for one in range(40)])
    verbs.health("a", ok=False)
    verbs.health("a", ok=True)
    sizes = []
    for _ in range(5):
        leases = verbs.claim("p1", a=10)
        sizes.append(len(leases))
        verbs.finish(*leases)
    assert sizes == [1, 2, 4, 8, 10]
