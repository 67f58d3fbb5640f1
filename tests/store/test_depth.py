"""The depth of a queue counts what waits. Long lists keep the entries of canceled tasks until somebody meets them."""

from __future__ import annotations

from broker import admin
from broker.adminscripts import SCRUB_START
from tests.support.verbs import LEASE, POOL, Verbs, new

LONG = 2_100  # entries; shorter lists are searched


def fill(verbs: Verbs, **options: object) -> list[str]:
    names = [f"t{number}" for number in range(LONG)]
    for at in range(0, LONG, 500):
        verbs.enqueue(*(new(name, **options) for name in names[at : at + 500]))  # type: ignore[arg-type]  # as new has it
    return names


def backlog(verbs: Verbs) -> int:
    return admin.status(verbs.store, POOL).backlog


def cancel(verbs: Verbs, names: list[str]) -> None:
    for at in range(0, len(names), 100):
        verbs.cancel(*names[at : at + 100])


def room_for(verbs: Verbs, count: int) -> int:
    return [reply.word for reply in verbs.enqueue(*(f"n{number}" for number in range(count)), max_depth=LONG)].count(
        "queued"
    )


def test_canceled_tasks_of_a_long_list_make_room(verbs: Verbs) -> None:
    names = fill(verbs)
    assert room_for(verbs, 1) == 0
    cancel(verbs, names[50:60])
    assert (backlog(verbs), room_for(verbs, 20)) == (LONG - 10, 10)
    assert (backlog(verbs), room_for(verbs, 20)) == (LONG, 0)


def test_expired_tasks_of_a_long_list_make_room(verbs: Verbs) -> None:
    fill(verbs, deadline=10, priority="high")
    verbs.clock.advance(10_000)
    verbs.expire()
    assert (backlog(verbs), room_for(verbs, 200)) == (LONG - 100, 100)


def test_nothing_is_left_to_count_when_all_entries_were_met(verbs: Verbs) -> None:
    names = fill(verbs)
    cancel(verbs, names[:-1])
    assert backlog(verbs) == 1
    while not (given := verbs.claim("p1", a=10)):
        pass
    assert [lease.id for lease in given] == names[-1:]
    assert backlog(verbs) == 0
    assert verbs.store.redis.exists(verbs.store.keys.ghosts(POOL)) == 0


def test_a_canceled_task_that_is_redriven_stands_twice_and_counts_once(verbs: Verbs) -> None:
    names = fill(verbs)
    cancel(verbs, names[:1])
    assert verbs.redrive(names[0]) == ["queued"]
    assert (backlog(verbs), room_for(verbs, 1)) == (LONG, 0)
    verbs.register(("a", 5, 3 * LONG, True, ()))
    given = [lease.id for _ in range(LONG // 100 + 1) for lease in verbs.claim("p1", a=100)]
    assert sorted(given) == sorted(names)
    assert verbs.store.redis.exists(verbs.store.keys.ghosts(POOL)) == 0


def test_scrub_sweeps_them_and_calls_it_no_repair(verbs: Verbs) -> None:
    names = fill(verbs)
    cancel(verbs, names[100:400])
    at, repairs = SCRUB_START, 0
    while not at.done:
        at = verbs.run(verbs.scripts.scrub(POOL, at, lease=LEASE / 1000, dead_letter_ttl=60))
        repairs += at.repairs
    assert (repairs, backlog(verbs)) == (0, LONG - 300)
    assert verbs.store.redis.llen(verbs.store.keys.queue(POOL)) == LONG - 300
    assert verbs.store.redis.exists(verbs.store.keys.ghosts(POOL)) == 0
