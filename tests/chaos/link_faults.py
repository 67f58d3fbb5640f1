"""What happens between processes and the server. Rows 10, 11."""

from __future__ import annotations

import time

from tests.chaos.scenarios import scenario
from tests.chaos.world import World


@scenario(10, 1000, lossy_producer=True)
def lose_replies(world: World, budget: int) -> None:
    """Replies of whatever command are lost; the server has carried it out. The producer's too."""
    proxy, before = world.proxy, world.proxy.dropped
    while proxy.dropped - before < budget:
        proxy.drop()
        world.pause(0.005, 0.03)
    proxy.spare()
    world.fault("reply lost", [], reruns=False, count=proxy.dropped - before)
    world.flowing()


@scenario(10, 600, lossy_producer=True)
def reset_links(world: World, budget: int) -> None:
    """Every connection ends with RST, again and again."""
    injected = 0
    while injected < budget:
        injected += world.proxy.reset()
        world.pause(0.05, 0.4)
    world.fault("connection reset", [], reruns=False, count=injected)
    world.flowing()


@scenario(11, 60)
def half_close(world: World, budget: int) -> None:
    """The server's side of every connection ends; the process's stays open."""
    injected = 0
    while injected < budget:
        injected += world.proxy.half_close()
        world.pause(0.3, 0.8)
    world.fault("connection half closed", [], reruns=False, count=injected)
    world.flowing()


@scenario(11, 1, fleets=2)
def blackhole(world: World, budget: int) -> None:
    """The link of one fleet swallows everything for longer than a lease: its tasks move; it comes back by itself."""
    proxy = world.proxies[1]
    world.pause(0.5, 1.0)
    began = time.time()
    proxy.blackhole(True)
    held = [task for pid in world.of(world.fleets[1]) for task in world.observer.held_by(pid)]
    world.pause(world.settings.lease * 3)
    world.flowing()
    proxy.blackhole(False)
    world.fault("link swallows everything", held, reruns=True, since=began)

    def back() -> bool:
        return any(world.observer.held_by(pid) for pid in world.of(world.fleets[1]))

    world.until(back, "the fleet behind the link works again", 60)


@scenario(11, 40)
def slow_link(world: World, budget: int) -> None:
    """Replies are late, by up to half a second."""
    for _ in range(budget):
        world.proxy.delay = world.rng.uniform(0.0, 0.5)
        world.pause(0.1, 0.3)
    world.proxy.delay = 0.0
    world.fault("reply late", [], reruns=False, count=budget)
    world.flowing()
