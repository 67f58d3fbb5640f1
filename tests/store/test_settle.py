"""The verbs that end or keep a lease: what each answers, what becomes of the task, and the fence."""

from __future__ import annotations

from datetime import datetime

import pytest

from broker.scripts import Lease, Offer, Reaped
from tests.support.verbs import (
    DAY,
    LEASE,
    POOL,
    Verbs,
    dead_letter_of,
    finish_of,
    ids,
    new,
    retry_of,
    row,
    run_one,
)

# -- finish, and the fence


def test_finish_gives_the_outcome(verbs: Verbs) -> None:
    lease = run_one(verbs)
    assert verbs.finish(lease) == ["done"]
    assert (verbs.outcome("t"), verbs.status("t"), verbs.in_flight("a")) == ("ok", "finished", 0)
    done = finish_of(lease)
    assert verbs.field("t", "x_ans") == f"{done.answer}\n{done.body.decode()}"
    assert (verbs.counter("n_ok"), verbs.endpoint("a", "served")) == (1, "1")
    assert 0 < verbs.store.redis.pttl(verbs.store.keys.job("t")) <= DAY


@pytest.mark.parametrize(
    "moment",
    [
        "1999-12-31T23:59:59.999Z",
        "2024-02-29T00:00:00.000Z",
        "2026-03-01T12:05:09.070Z",
        "2100-02-28T23:59:59.001Z",
    ],
)
def test_rqs_times_are_the_servers(verbs: Verbs, moment: str) -> None:
    verbs.clock.set(round(datetime.fromisoformat(moment).timestamp() * 1000))
    lease = run_one(verbs)
    verbs.finish(lease)
    assert (verbs.field("t", "started_at"), verbs.field("t", "ended_at")) == (moment, moment)


def test_finish_of_a_repeat_answers_already(verbs: Verbs) -> None:
    lease = run_one(verbs)
    assert [verbs.finish(lease), verbs.finish(lease)] == [["done"], ["already"]]
    assert (verbs.counter("n_ok"), verbs.endpoint("a", "served")) == (1, "1")


@pytest.mark.parametrize("verb", ["finish", "retry", "release", "dead_letter"])
def test_a_zombie_is_refused(verbs: Verbs, verb: str) -> None:
    """Its lease ran out, somebody else runs the task now."""
    zombie = run_one(verbs)
    verbs.pass_time(LEASE)
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


@pytest.mark.parametrize("verb", ["retry", "dead_letter"])
def test_what_an_attempt_tells_of_its_endpoint_counts_once(verbs: Verbs, verb: str) -> None:
    """Also when it is told again, after a lost reply, and somebody else has settled the task meanwhile."""
    first = run_one(verbs)
    assert verbs.retry(first, exclude=False) == ["done"]
    (second,) = verbs.claim("p2", a=1)
    assert verbs.retry(second, exclude=False) == ["done"]
    assert getattr(verbs, verb)(first) == ["lost"]
    assert (verbs.endpoint("a", "failed"), verbs.endpoint("a", "fails")) == ("2", "2")


def test_what_a_lost_attempt_tells_of_its_endpoint_counts_once(verbs: Verbs) -> None:
    zombie = run_one(verbs)
    verbs.pass_time(LEASE)
    verbs.reap()
    assert [verbs.retry(zombie), verbs.retry(zombie)] == [["lost"], ["lost"]]
    assert (verbs.endpoint("a", "failed"), verbs.endpoint("a", "fails")) == ("1", "1")


def test_a_repeated_release_does_not_prolong_its_pause(verbs: Verbs) -> None:
    lease = run_one(verbs)
    verbs.release(lease, pause=5)
    until = verbs.endpoint("a", "pause")
    verbs.clock.advance(1000)
    assert verbs.release(lease, pause=5) == ["already"]
    assert verbs.endpoint("a", "pause") == until


def test_finish_takes_a_doubled_lease_for_a_repeat(verbs: Verbs) -> None:
    lease = run_one(verbs)
    assert verbs.finish(lease, lease) == ["done", "already"]
    assert (verbs.counter("n_ok"), verbs.endpoint("a", "served")) == (1, "1")


def test_an_unknown_task_is_lost(verbs: Verbs) -> None:
    assert verbs.finish(Lease("nobody", "1.0.p1", "a")) == ["lost"]


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
    first = run_one(verbs)
    verbs.retry(first)
    last = verbs.claim("p1", a=1)[0]
    assert verbs.dead_letter(last, reason="HTTP 503 three times") == ["done"]
    assert (verbs.outcome("t"), verbs.status("t")) == ("dead", "failed")
    lines = [retry_of(first, 0, "count", True, 0).history, dead_letter_of(last, "count", "").history]
    assert verbs.field("t", "x_why") == "HTTP 503 three times"
    assert verbs.field("t", "x_hist").splitlines() == lines
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
    verbs.pass_time(LEASE)
    verbs.reap(max_deliveries=1)
    assert (verbs.outcome("t"), verbs.redrive("t")) == ("poison", ["queued"])
    assert verbs.finish(zombie) == ["lost"]
    verbs.claim("p2", a=1)
    assert verbs.finish(zombie) == ["lost"]


# -- renew, reap


def test_renew_keeps_a_lease_alive(verbs: Verbs) -> None:
    lease = run_one(verbs)
    for _ in range(5):
        verbs.pass_time(LEASE - 1)
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
    verbs.pass_time(LEASE)
    verbs.register(row("b"))
    verbs.reap()
    assert getattr(verbs, verb)(lease) == ["lost"]
    verbs.release(lease, pause=5)
    assert verbs.store.redis.exists(verbs.store.keys.endpoint(POOL, "a")) == 0


def test_reap_puts_back_with_a_delay_and_counts_no_attempt(verbs: Verbs) -> None:
    run_one(verbs)
    verbs.pass_time(LEASE - 1)
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
        verbs.pass_time(LEASE)
        assert verbs.reap() == (Reaped(1, 0, 0) if delivery < 5 else Reaped(0, 1, 0))
        verbs.clock.advance(30_000)
    assert (verbs.outcome("t"), verbs.in_flight("a"), verbs.claim("p1", a=1)) == ("poison", 0, [])


def test_reap_survives_a_task_that_lost_its_lease_field(verbs: Verbs) -> None:
    run_one(verbs)
    verbs.store.redis.hdel(verbs.store.keys.job("t"), "x_lease")
    verbs.pass_time(LEASE)
    assert verbs.reap() == Reaped(1, 0, 0)
