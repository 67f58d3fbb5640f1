"""Who gets the next task: claim against the rule in tests/support/reference.py, and what the rule brings a fleet."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest

from broker.store import Store
from tests.support.model_state import Policies
from tests.support.playground import Playground, attach
from tests.support.reference import Endpoint, Seat, hand_out, water_fill
from tests.support.twin import Twin
from tests.support.verbs import Verbs, new, row

SCALE = 10 if os.environ.get("HYPOTHESIS_PROFILE") == "ci" else 1

NINE = [f"e{one}" for one in range(9)]
PROCESS_COUNTS = (1, 2, 5, 8, 9, 10, 24)
UNLIMITED = 100_000


# -- the rule itself


def seat(name: str, cap: int, load: int = 0, priority: int = 5, last: int = 0) -> Seat:
    return Seat(Endpoint(name, priority, cap, last=last), load, cap - load)


def test_a_tier_that_the_tasks_cover_takes_all_it_has_room_for() -> None:
    assert hand_out([seat("a", 3), seat("b", 2, load=1)], 9) == {"a": 3, "b": 1}


def test_the_upper_tier_comes_first_and_what_it_leaves_goes_down() -> None:
    seats = [seat("low", 5, priority=1), seat("high", 2, priority=9), seat("middle", 2, priority=5)]
    assert hand_out(seats, 3) == {"high": 2, "middle": 1, "low": 0}


def test_water_flows_to_the_least_loaded_then_to_whose_turn_it_is() -> None:
    assert water_fill([seat("a", 10, load=5), seat("b", 10, load=1)], 3) == {"a": 0, "b": 3}
    assert water_fill([seat("a", 4, last=7), seat("b", 4, last=3)], 1) == {"a": 0, "b": 1}
    assert water_fill([seat("a", 4), seat("b", 2)], 3) == {"a": 2, "b": 1}


# -- claim does what the rule says


def random_pool(choose: Any) -> list[Any]:
    caps = choose(([1, 2, 3], [4, 8, 32], [UNLIMITED], [1, 10, 1000]))
    return [
        row(
            name,
            choose(caps),
            choose((3, 5, 5, 9)),
            on=choose((True,) * 9 + (False,)),
            capabilities=choose(((), ("v",))),
        )
        for name in NINE[: choose(range(1, 10))]
    ]


def random_claims(twin: Twin, choose: Any, steps: int) -> None:
    """Processes that come, wait, fall silent, fail and are rung, before tasks of every kind."""
    processes = [f"p{one}" for one in range(choose((1, 3, 6)))]
    hosted = {process: [name for name in NINE if choose((True, False))] or NINE for process in processes}
    for _ in range(steps):
        what = choose(("enqueue", "claim", "claim", "claim", "retry", "finish", "wait"))
        if what == "enqueue":
            known = len(twin.model.tasks)
            kinds = [(choose(("high", "normal", "low")), choose(((), (), ("v",)))) for _ in range(3)]
            amount = choose((1, 2, 5, 30, 300))
            twin.enqueue(
                [
                    new(f"t{one}", priority=kinds[one % 3][0], requires=kinds[one % 3][1])
                    for one in range(known, known + amount)
                ]
            )
        elif what == "claim":
            process = choose(processes)
            rooms = {name: choose((0, 1, 5, 100)) for name in hosted[process]}
            twin.claim(process, rooms, choose((1, 7, 100)))
        elif what == "wait":
            twin.advance(choose((1, 50, 100, 101, 1000, 5001, 31_000)))
        else:
            recent = [lease for lease in twin.leases[-40:] if f"{lease.id}:{lease.token}" in twin.model.wip]
            some = [lease for lease in recent if choose((True, False))]
            if what == "finish":
                twin.finish(some)
            else:
                twin.retry(some, 0.0, "ignore", exclude=True, pause=choose((0.0, 0.0, 0.2)))


@pytest.mark.timeout(60 * SCALE)
def test_claims_decide_as_the_reference_does(real_store: Store) -> None:
    for seed in range(60 * SCALE):
        choose = random.Random(seed).choice
        try:
            twin = Twin(real_store)
            twin.register(random_pool(choose), Policies(max_depth=UNLIMITED))
            random_claims(twin, choose, 25)
            twin.check()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


# -- what it brings: fleets in simulated time


@pytest.fixture
def verbs(real_store: Store) -> Verbs:
    return Verbs(real_store)


def spread(counts: Sequence[int]) -> float:
    return max(counts) / max(1, min(counts))


@pytest.mark.parametrize("processes", PROCESS_COUNTS)
def test_nine_equal_endpoints_are_served_equally_while_the_queue_is_long(verbs: Verbs, processes: int) -> None:
    """R1.2."""
    jitter = random.Random(processes)
    fleet = Playground(
        verbs, [row(name, 4) for name in NINE], attach(processes, NINE), lambda _: jitter.randint(90, 110)
    )
    fleet.enqueue(1200)
    fleet.run(while_left=True)
    started = [fleet.served[name] + count for name, count in fleet.in_flight().items()]
    assert sum(started) == 1200
    assert spread(started) <= 1.05, started


@pytest.mark.parametrize("processes", PROCESS_COUNTS)
def test_tasks_that_trickle_in_go_around(verbs: Verbs, processes: int) -> None:
    """R1.2: one at a time, counts within 1 of each other, at once."""
    fleet = Playground(verbs, [row(name, 4) for name in NINE], attach(processes, NINE), lambda _: 30)
    for _ in range(40):
        fleet.enqueue(1)
        fleet.run()
    counts = [fleet.served[name] for name in NINE]
    assert (sum(counts), max(counts) - min(counts)) == (40, 1)
    assert max(fleet.waited.values()) == 0


@pytest.mark.parametrize("processes", PROCESS_COUNTS)
def test_a_burst_on_unlimited_slots_is_shared_out(verbs: Verbs, processes: int) -> None:
    fleet = Playground(verbs, [row(name, UNLIMITED) for name in NINE], attach(processes, NINE), lambda _: 60_000)
    fleet.enqueue(1000)
    fleet.run(until=fleet.now + 1000)
    assert sorted(fleet.in_flight().values()) == [111] * 8 + [112]


@pytest.mark.parametrize("processes", [1, 2, 3, 6])
def test_the_lower_tier_is_untouched_while_the_upper_has_room(verbs: Verbs, processes: int) -> None:
    rows = [row("up1", 4, 10), row("up2", 4, 10), row("down", 8, 5)]
    fleet = Playground(verbs, rows, attach(processes, ["up1", "down", "up2"]), lambda _: 100)
    for burst in (1, 3, 8, 5, 8):
        fleet.enqueue(burst)
        fleet.run()
    assert fleet.served["down"] == 0
    fleet.enqueue(11)
    fleet.run()
    assert (fleet.served["down"], max(fleet.waited.values())) == (3, 0), "a full upper tier spills at once"


@pytest.mark.parametrize(("ear", "at_most"), [("p0", 100), ("", 2000)], ids=["with_an_ear", "the_dead_one_had_the_ear"])
def test_a_dead_process_delays_a_task_or_two(verbs: Verbs, ear: str, at_most: int) -> None:
    """By spill_after; by a poll of the others if it is the one that listens at the queue."""
    fleet = Playground(verbs, [row(name, 4) for name in NINE], attach(9, NINE), lambda _: 30, dead=["p4"], ear=ear)
    for _ in range(60):
        fleet.enqueue(1)
        fleet.run()
    late = [ms for ms in fleet.waited.values() if ms > 0]
    assert len(late) <= 2, late
    assert max(late) <= at_most, late
    assert (sum(fleet.served.values()), fleet.served["e4"]) == (60, 0)


@pytest.mark.parametrize("processes", [1, 3, 5])
def test_unequal_endpoints_are_served_in_proportion_to_their_speed(verbs: Verbs, processes: int) -> None:
    """R1.3: 2x, 1x, 0.5x with the same slots; the makespan within 5 % of the best possible."""
    times = {"fast": 50, "even": 100, "slow": 200}
    fleet = Playground(
        verbs, [row(name, 4) for name in times], attach(processes, list(times)), lambda name: times[name]
    )
    start = fleet.now
    fleet.enqueue(700)
    fleet.run()
    best = 700 / sum(4 / ms for ms in times.values())
    assert max(fleet.finished_at.values()) - start <= best * 1.05
    assert fleet.served["fast"] == pytest.approx(400, abs=12)
    assert fleet.served["slow"] == pytest.approx(100, abs=6)


def test_low_priorities_are_served_a_little_while_high_ones_never_end(verbs: Verbs) -> None:
    verbs.register(row("a", 1))
    verbs.enqueue(*[new(f"low{one}", priority="low") for one in range(30)])
    served = {"high": 0, "low": 0}
    for number in range(400):
        verbs.enqueue(new(f"high{number}", priority="high"))
        for lease in verbs.claim("p", a=1):
            served[lease.id.rstrip("0123456789")] += 1
            verbs.finish(lease)
    assert sum(served.values()) == 400
    assert 0.04 <= served["low"] / 400 <= 0.12, served


def test_tasks_that_only_one_endpoint_can_serve_do_not_hide_the_work_of_others(verbs: Verbs) -> None:
    """A thousand in front; the other endpoint finds its task in one call, and a cheap one."""
    verbs.register(row("a", 1, capabilities=["vision"]), row("b", 1))
    for at in range(0, 1000, 500):
        verbs.enqueue(*[new(f"v{one}", requires=["vision"], priority="high") for one in range(at, at + 500)])
    verbs.enqueue("t")
    assert [lease.id for lease in verbs.claim("p", b=1)] == ["t"]
