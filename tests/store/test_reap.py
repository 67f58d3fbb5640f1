"""Who is reaped when: the amnesty after an outage, and the turns of tasks that may lose no further lease."""

from __future__ import annotations

import pytest

from broker.scripts import Lease, Reaped
from tests.support.verbs import LEASE, Verbs, row, run_one

NOTHING = Reaped(0, 0, 0)

# -- the amnesty


def in_contact(verbs: Verbs) -> None:
    """For a lease, so that no amnesty is left from the start."""
    verbs.pass_time(LEASE)


@pytest.mark.parametrize("outage", [LEASE // 2 + 1, LEASE, 10 * LEASE])
@pytest.mark.parametrize("first", ["renew", "reap"])
def test_who_lives_renews_first_after_an_outage(verbs: Verbs, outage: int, first: str) -> None:
    in_contact(verbs)
    verbs.enqueue("alive", "dead")
    alive, dead = verbs.claim("p1", a=2)
    verbs.pass_time(LEASE // 2)
    verbs.clock.advance(outage)  # nobody was heard
    if first == "renew":
        verbs.renew("p2")
    assert verbs.reap() == NOTHING
    verbs.clock.advance(LEASE // 6)
    assert verbs.renew("p1", alive) == ["held"]
    verbs.pass_time(LEASE - LEASE // 6 - 1)
    assert verbs.reap() == NOTHING, "the amnesty lasts one lease"
    verbs.clock.advance(1)
    assert verbs.reap() == Reaped(1, 0, 0)
    assert (verbs.status("alive"), verbs.status("dead")) == ("started", "scheduled")
    assert verbs.finish(alive) == ["done"]
    assert verbs.finish(dead) == ["lost"]


def test_a_process_that_dies_is_no_outage(verbs: Verbs) -> None:
    """The others are in contact, each of them by connections that may break each second."""
    in_contact(verbs)
    run_one(verbs)
    verbs.pass_time(LEASE)
    assert verbs.reap() == Reaped(1, 0, 0)


def test_a_pool_never_heard_of_begins_with_an_amnesty(verbs: Verbs) -> None:
    """A Redis that came back from a backup, or an older version's."""
    run_one(verbs)
    verbs.clock.advance(LEASE)
    assert verbs.reap() == NOTHING
    verbs.pass_time(LEASE)
    assert verbs.reap() == Reaped(1, 0, 0)


def test_a_clock_set_back_makes_no_longer_amnesty(verbs: Verbs) -> None:
    verbs.renew("p1")
    verbs.clock.advance(-100 * LEASE)
    run_one(verbs)
    verbs.pass_time(LEASE)
    assert verbs.reap() == Reaped(1, 0, 0)


# -- suspects


def die(verbs: Verbs, poison: str, processes: list[list[Lease]]) -> None:
    """The process that holds the poison dies with all it holds; the others settle well."""
    for held in processes:
        if all(lease.id != poison for lease in held):
            verbs.finish(*held)
    verbs.pass_time(LEASE)
    verbs.reap()


@pytest.mark.parametrize("neighbours", [1, 5])
def test_what_was_beside_the_poison_each_time_is_not_poison(verbs: Verbs, neighbours: int) -> None:
    names = ["poison", *(f"n{number}" for number in range(neighbours))]
    verbs.enqueue(*names)
    for _ in range(200):
        if all(verbs.outcome(name) for name in names):
            break
        verbs.pass_time(10_000)
        die(verbs, "poison", [verbs.claim("p1", a=10)])
    outcomes = {name: verbs.outcome(name) for name in names}
    assert outcomes == {"poison": "poison"} | dict.fromkeys(names[1:], "ok")
    assert verbs.field("poison", "x_del") == "5"


def suspects(verbs: Verbs, *names: str) -> None:
    """These have lost four leases each, together."""
    verbs.enqueue(*names)
    for _ in range(4):
        assert len(verbs.claim("p1", a=10)) == len(names)
        verbs.pass_time(LEASE)
        verbs.reap()
        verbs.pass_time(10_000)


def test_suspects_run_one_at_a_time_and_first(verbs: Verbs) -> None:
    suspects(verbs, "s1", "s2", "s3")
    verbs.enqueue("fresh")
    (first, fresh) = verbs.claim("p1", a=10)
    assert (first.id[0], fresh.id) == ("s", "fresh")
    verbs.pass_time(5000)
    assert verbs.claim("p2", a=10) == [], "one runs"
    verbs.finish(first)
    verbs.pass_time(2000)
    (second,) = verbs.claim("p2", a=10)
    verbs.retry(second, delay=60)
    verbs.pass_time(2000)
    (third,) = verbs.claim("p2", a=10)
    assert {first.id, second.id, third.id} == {"s1", "s2", "s3"}


def test_a_suspect_that_nobody_can_take_holds_up_the_others_for_a_minute(verbs: Verbs) -> None:
    suspects(verbs, "s1", "s2")
    verbs.register(row("a", 10, on=False))
    verbs.promote()
    verbs.pass_time(59_000)
    assert verbs.promote() == 1
    assert [verbs.status("s1"), verbs.status("s2")].count("queued") == 1
    verbs.pass_time(2000)
    verbs.promote()
    assert [verbs.status("s1"), verbs.status("s2")] == ["queued", "queued"]


def test_a_redriven_suspect_is_none_any_more(verbs: Verbs) -> None:
    suspects(verbs, "s1", "s2")
    verbs.cancel("s1", "s2")
    verbs.redrive("s1", "s2")
    assert len(verbs.claim("p1", a=10)) == 2
