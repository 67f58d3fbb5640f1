"""Processes that are killed, held still, told to end. Rows 1 to 6, 16."""

from __future__ import annotations

import os
import signal
import time

from tests.chaos.scenarios import scenario
from tests.chaos.world import World
from tests.support.fleet import Fleet

# Promised are 100 ms and 1 s. A busy machine delivers a signal late, and one look at all leases takes a moment.
CLAIMS_S = 0.5
RELEASE_S = 2.0
# Two leases of 1.5 s and two sweeps; its neighbours' fifth run waits 8 s, and so does the process's fifth start.
NEIGHBOUR_S = 36.0


@scenario(1, 12, processes=3)
def kill_one(world: World, budget: int) -> None:
    """kill -9 of one process after the other, at any moment; the supervisor starts another."""
    for _ in range(budget):
        world.pause(0.05, 0.6)
        pids = world.until(lambda: world.pids, "a process runs")
        world.kill(world.rng.choice(pids), in_a_row=True)
    world.complete()
    world.flowing()


@scenario(1, 2, lease=3.0, latency="1200ms", jitter="400ms", slots=80, outstanding=280, batch=50)
def kill_loaded(world: World, budget: int) -> None:
    """kill -9 of a process among 200 tasks in flight: at most its own run again."""
    for _ in range(min(budget, 2)):
        world.complete()
        world.until(lambda: len(world.observer.in_flight()) >= 200, "200 tasks are in flight")
        world.kill(world.rng.choice(world.pids), "process killed, 200 in flight")
        world.flowing()
    world.complete()


@scenario(1, 8, processes=2)
def kill_at_settle(world: World, budget: int) -> None:
    """kill -9 of a process whose settle is on its way: its reply is lost first."""
    for _ in range(budget):
        world.complete()
        world.pause(0.1, 0.3)
        world.proxy.delay = 0.05
        world.pause(0.01, 0.1)
        world.kill(world.rng.choice(world.pids), "process killed, replies late", in_a_row=True)
        world.proxy.delay = 0.0
    world.complete()
    world.flowing()


@scenario(2, 3)
def kill_all(world: World, budget: int) -> None:
    """kill -9 of everything that works, supervisor too; one is started again."""
    for _ in range(min(budget, 3)):
        world.pause(0.3, 1.0)
        fleet = world.fleets[-1]
        pids = world.of(fleet)
        began = time.time()
        os.killpg(fleet._process.pid, signal.SIGSTOP)
        held = world.observer.in_flight()
        os.killpg(fleet._process.pid, signal.SIGKILL)
        fleet._process.wait()
        world.start_fleet()
        world.fault("everything killed", held, reruns=True, since=began)
        for pid in pids:
            world.fault("everything killed", [], reruns=True, pid=pid, count=0)
        world.flowing()


@scenario(3, 3)
def freeze_long(world: World, budget: int) -> None:
    """SIGSTOP for twice the lease and more, then SIGCONT: a zombie's settles are refused."""
    for _ in range(budget):
        world.pause(0.1, 0.5)
        pid = world.rng.choice(world.pids)
        began = time.time()
        os.kill(pid, signal.SIGSTOP)
        held = world.observer.held_by(pid)
        world.pause(world.settings.lease * 2 + 0.5, world.settings.lease * 2 + 6)
        os.kill(pid, signal.SIGCONT)
        world.fault("process held for two leases", held, reruns=True, since=began)
        world.flowing()


@scenario(4, 8, lease=4.0)
def freeze_short(world: World, budget: int) -> None:
    """SIGSTOP for less than a lease: nothing runs twice."""
    for _ in range(budget):
        world.pause(0.5, 1.0)
        pid = world.rng.choice(world.pids)
        began = time.time()
        os.kill(pid, signal.SIGSTOP)
        held = world.observer.held_by(pid)
        world.pause(0.2, 1.2)
        os.kill(pid, signal.SIGCONT)
        world.fault("process held for part of a lease", held, reruns=False, since=began)
        world.pause(1.5)


@scenario(5, 4, latency="300ms", jitter="250ms", all_ok=True)
def drain(world: World, budget: int) -> None:
    """SIGTERM: what runs is finished, or released with no attempt counted; another fleet takes over."""
    for number in range(min(budget, 4)):
        world.pause(0.3, 0.8)
        fleet = world.fleets[-1]
        world.start_fleet()
        pids = world.of(fleet)
        held = _drained(world, fleet, pids, at_once=bool(number % 2))
        world.fault("drained at once" if number % 2 else "drained", held, reruns=bool(number % 2))
        for pid in pids:
            world.fault("drained", [], reruns=False, pid=pid, count=0)
        world.flowing()


def _drained(world: World, fleet: Fleet, pids: list[int], *, at_once: bool) -> list[str]:
    """SIGTERM; twice: what runs does not fit. Nothing is claimed later than `CLAIMS_S`, and, told twice, nothing is
    held after `RELEASE_S`. The tasks that were under way."""
    held = world.observer.in_flight()
    fleet.signal(signal.SIGTERM)
    told = time.monotonic()
    if at_once:
        world.pause(0.02, 0.1)
        held += world.let_go(pids, lambda: fleet.signal(signal.SIGTERM))
    begun = time.monotonic()
    known: set[tuple[str, str]] = set()
    while True:
        leases = world.observer.patient(world.observer.leases)
        now = time.monotonic()
        mine = {
            (task, token) for held in leases.values() for task, token in held
            if any(f"-{pid}-" in token for pid in pids)
        }  # fmt: skip
        if now - told > CLAIMS_S and mine - known:
            raise AssertionError(f"{len(mine - known)} tasks were claimed more than {CLAIMS_S} s after SIGTERM")
        known |= mine
        if not mine:
            break
        if at_once and now - begun > RELEASE_S:
            raise AssertionError(f"{len(mine)} leases are held {RELEASE_S} s after the second SIGTERM")
        if now - told > 20:
            raise AssertionError("the drain does not end")
    if fleet.wait(20) != 0:
        raise AssertionError(f"a drained worker ended badly; see {fleet.log}")
    return sorted({*held, *(task for task, _ in known)})


@scenario(6, 6, processes=3, priorities=False, all_ok=True, unowned=8.0)
def rolling_restart(world: World, budget: int) -> None:
    """SIGTERM of one process after the other: the supervisor starts another; nothing runs twice, nothing waits long."""
    for _ in range(budget):
        world.complete()
        pid = world.rng.choice(world.pids)
        held = world.observer.held_by(pid)
        began = time.time()
        os.kill(pid, signal.SIGTERM)
        world.until(lambda gone=pid: gone not in world.pids, "it has drained")  # type: ignore[misc]
        world.fault("process told to end", held, reruns=False, pid=pid, since=began)
    world.complete()
    world.flowing()


@scenario(16, 5, processes=1, endpoints=1, lease=1.5, outstanding=8, batch=2)
def poison(world: World, budget: int) -> None:
    """kill -9 of whichever process holds one task, until it is given up; the others' outcomes are good."""
    task = world.enqueue({"latency": "600s"}, priority="high")
    for _ in range(5):
        def holder() -> int | None:
            return next((pid for pid in world.pids if task in world.observer.held_by(pid)), None)

        pid = world.until(holder, "the task is held by a process", 40)
        world.kill(pid, "process of one task killed", bound=NEIGHBOUR_S)
        world.complete()
    world.until(lambda: task not in world.observer.open_tasks(), "the task has an outcome", 40)
    world.history.write("expect", task=task, outcome="poison", lost=5)
