"""Time is not what a process takes it for: its wall clock is wrong, its event loop stands still. Rows 4 and 14."""

from __future__ import annotations

import os
import signal
import time

from broker import admin
from tests.chaos.held import VARIABLE
from tests.chaos.scenarios import scenario
from tests.chaos.world import POOL, SWEEP_S, World

OFF_S = 600.0
HOLD_LEASE_S = 3.0


@scenario(14, 8, lease=4.0, fleets=2, wrong_clocks=True, all_ok=True, deadline=120.0)
def wrong_clock(world: World, budget: int) -> None:
    """The wall clocks of two fleets jump by ten minutes, to either side, while they work: nothing comes of it."""
    for _ in range(budget):
        held = world.observer.in_flight()
        clock, off = world.rng.choice(world.clocks), world.rng.choice([-OFF_S, OFF_S])
        clock.off_by(off)
        world.fault(f"clock {'ahead' if off > 0 else 'behind'} by 10 min", held, reruns=False)
        world.pause(0.3, 1.5)
    world.pause(world.settings.lease + SWEEP_S)  # whoever judges leases by such a clock has done so by now
    world.flowing()


@scenario(
    4, 3, lease=HOLD_LEASE_S, all_ok=True, module="tests.chaos.held",
    pool={"timeout": {"connect": "2s", "first_byte": "2s", "idle": "1s", "attempt": "4s"}},
    env={VARIABLE: str(HOLD_LEASE_S * 2 + 0.5)},
)  # fmt: skip
def block_loop(world: World, budget: int) -> None:
    """The event loop of a process stands still for twice the lease: its leases live on, and its lag is shown."""
    for _ in range(min(budget, 3)):
        world.pause(0.3, 1.0)
        pid = world.rng.choice(world.pids)
        began = time.time()
        os.kill(pid, signal.SIGUSR1)
        world.pause(0.1)
        held = world.observer.held_by(pid)

        def shown(mark: str = f"-{pid}-") -> bool:
            lag = world.observer.patient(lambda: admin.status(world.observer.store, POOL).lag)
            return any(mark in process and late >= HOLD_LEASE_S for process, late in lag.items())

        world.until(shown, "the status of the pool shows the lag", HOLD_LEASE_S * 3)
        world.pause(max(0.0, began + HOLD_LEASE_S * 2 + 0.5 - time.time()))
        world.fault("event loop blocked for two leases", held, reruns=False, since=began)
        world.flowing()
