"""Breaker, health, slow start, and what a new configuration does to endpoints."""

from __future__ import annotations

from tests.support.verbs import POOL, Verbs, ids, row, run_one

# -- the breaker


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


def test_five_failures_in_a_row_open_the_breaker_for_everybody(verbs: Verbs) -> None:
    """S9, S14: no process claims; after the cooldown one probe; its success closes the breaker."""
    verbs.enqueue(*[f"t{one}" for one in range(20)])
    leases = verbs.claim("p1", a=6)
    verbs.retry(*leases[:4], delay=600)
    verbs.enqueue("again")
    assert verbs.endpoint("a", "state") == ""
    verbs.retry(leases[4], delay=600)
    assert (verbs.endpoint("a", "state"), verbs.events) == ("open", ["opened a 60000"])
    assert verbs.endpoint("a", "reason").startswith("5 failures in a row; the last: ")
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
