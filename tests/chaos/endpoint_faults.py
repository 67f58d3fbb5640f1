"""Endpoints that fail in every way the simulator knows. Row 15."""

from __future__ import annotations

import time

from tests.chaos.scenarios import scenario
from tests.chaos.world import World

MODES = ("status", "reset", "close", "cut", "malformed", "gzip_bomb", "huge", "bad_json", "drip", "hang")
SHORT = {"timeout": {"connect": "1s", "first_byte": "600ms", "idle": "500ms", "attempt": "1500ms"}}


def _on(world: World, number: int) -> list[str]:
    """Tasks that run on one endpoint."""
    held = world.observer.patient(world.observer.leases)
    return [task for task, _ in held.get(f"e{number}", [])]


@scenario(15, 40, pool=SHORT)
def bad_endpoint(world: World, budget: int) -> None:
    """One endpoint of three fails at a time, each in another way; the tasks go to the others."""
    for at in range(budget):
        number = world.rng.randrange(len(world.endpoints))
        endpoint = world.endpoints[number]
        mode = MODES[at % len(MODES)]
        began = time.time()
        status, again = world.rng.choice([500, 502, 503, 429]), world.rng.choice([0, 0.001])
        endpoint.control(mode=mode, status=status, retry_after=again, fail_rate=world.rng.choice([0.3, 1]))
        world.pause(0.3, 1.0)
        held = _on(world, number)
        endpoint.control(mode="ok", retry_after=0)
        world.fault(f"endpoint: {mode}", held, reruns=False, since=began, endpoint=f"e{number}", mode=mode)
    world.flowing()


@scenario(15, 6)
def dead_endpoint(world: World, budget: int) -> None:
    """The endpoint's process is killed, or frozen, and comes back."""
    for number in range(budget):
        world.pause(0.2, 0.5)
        which = world.rng.randrange(len(world.endpoints))
        endpoint, held, began = world.endpoints[which], _on(world, which), time.time()
        if number % 2:
            endpoint.freeze()
            world.pause(0.2, 1.0)
            endpoint.thaw()
            world.fault("endpoint frozen", held, reruns=False, since=began)
        else:
            endpoint.stop()
            world.pause(0.2, 1.0)
            endpoint.start()
            world.fault("endpoint killed", held, reruns=False, since=began)
    world.flowing()


@scenario(15, 4)
def all_endpoints_down(world: World, budget: int) -> None:
    """No endpoint answers: tasks wait and spend no attempts once the breakers are open; they go on when one is back."""
    for _ in range(min(budget, 4)):
        world.pause(0.3, 0.6)
        held, began = world.observer.in_flight(), time.time()
        for endpoint in world.endpoints:
            endpoint.stop()
        world.pause(1.0, 2.0)
        for endpoint in world.endpoints:
            endpoint.start()
        world.fault("all endpoints down", held, reruns=False, since=began, in_a_row=True)
        world.flowing()
