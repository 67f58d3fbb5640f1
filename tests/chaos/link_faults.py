"""What happens between processes and the server. Rows 10, 11."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable

from broker.scripts import VERBS, load
from tests.chaos.proxy import Proxy
from tests.chaos.scenarios import scenario, volleys
from tests.chaos.world import POOL, World

SETTLES = {"finish", "retry", "release", "dead_letter"}
SHARES = {"enqueue": 20, "claim": 25, "settle": 30, "renew": 5, "other": 20}  # of the replies that are lost
VOLLEY = 25
IN_A_ROW = 2  # of one kind: whoever meets them waits longer each time, and a link that loses all is `blackhole`
SHA = re.compile(rb"[0-9a-f]{40}")


def namer() -> Callable[[bytes], str]:
    """What a request is, by the scripts that it names; `other` is a doorbell, a look at a hash, a batch cut in two."""
    verbs = {load(verb).sha.encode(): verb for verb in VERBS}

    def name(asked: bytes) -> str:
        found = {verbs[sha] for sha in SHA.findall(asked) if sha in verbs}
        if found & SETTLES:
            return "settle"
        return next((verb for verb in ("enqueue", "renew", "claim") if verb in found), "other")

    return name


@scenario(10, 350, lossy_producer=True, outstanding=400, batch=50)
def lose_replies(world: World, budget: int) -> None:
    """Replies of enqueue, claim, settle, renew and whatever else are lost; the server has carried the command out."""
    name = namer()
    for proxy in world.proxies:
        proxy.name = name
    lost = 0
    while lost < budget:
        held, began = world.observer.in_flight(), time.time()
        before = _dropped(world.proxies)
        for kind in world.rng.choices(list(SHARES), list(SHARES.values()), k=min(VOLLEY, budget - lost)):
            proxy = world.proxies[-1 if kind == "enqueue" else 0]
            if proxy.pending(kind) < IN_A_ROW:
                proxy.drop(kind)
            world.pause(0.005, 0.03)
        _until_dropped(world)
        until = time.time()
        for kind, count in (_dropped(world.proxies) - before).items():
            world.fault(f"reply lost: {kind}", held, reruns=False, count=count, since=began, until=until)
            lost += count
    world.flowing()


def _dropped(proxies: list[Proxy]) -> Counter[str]:
    return sum((proxy.dropped for proxy in proxies), Counter())


def _until_dropped(world: World) -> None:
    """Kinds that do not come by are left: a claim alone is rare while settles travel with it."""
    end = time.monotonic() + 3.0
    while any(proxy.pending() for proxy in world.proxies) and time.monotonic() < end:
        time.sleep(0.01)
    for proxy in world.proxies:
        proxy.spare()


@scenario(10, 40, lossy_producer=True, outstanding=600, batch=5, rate=150.0)
def lose_enqueue_replies(world: World, budget: int) -> None:
    """Endpoints are drained, replies of enqueue are lost: each task stands in a list exactly once, and runs once."""
    store, proxy = world.observer.store, world.proxies[-1]
    world.idle.set()
    world.until(lambda: not world.observer.unsettled(), "nothing is to do")
    for number in range(world.settings.endpoints):
        store.run(store.scripts.drain(POOL, f"e{number}", True))
    proxy.name, began = namer(), time.time()
    world.idle.clear()
    while proxy.dropped["enqueue"] < budget and not world.full:
        proxy.drop("enqueue")
        world.pause(0.01, 0.05)
    proxy.spare()
    world.idle.set()
    world.until(lambda: world.sending is None, "the last batch is acknowledged")
    queued = world.observer.statuses()["queued"]
    listed = world.observer.rest()["listed"]
    if queued != listed:
        raise AssertionError(f"{queued} tasks are queued, {listed} entries stand in the lists")
    world.fault("reply lost: enqueue", [], reruns=False, count=proxy.dropped["enqueue"], since=began)
    for number in range(world.settings.endpoints):
        store.run(store.scripts.drain(POOL, f"e{number}", False))
    world.idle.clear()
    world.flowing()


@scenario(10, 300, lossy_producer=True)
def reset_links(world: World, budget: int) -> None:
    """Every connection ends with RST, again and again."""

    def inject() -> int:
        return sum(proxy.reset() for proxy in world.proxies)

    volleys(world, "connection reset", budget, 40, inject, 0.1, 0.5)


@scenario(11, 100)
def half_close(world: World, budget: int) -> None:
    """The server's side of every connection ends; the process's stays open."""
    volleys(world, "connection half closed", budget, 20, world.proxy.half_close, 0.3, 0.8)


@scenario(11, 1, fleets=2)
def blackhole(world: World, budget: int) -> None:
    """The link of one fleet swallows everything for three leases: its tasks move; it comes back by itself."""
    proxy = world.proxies[1]
    world.pause(0.5, 1.0)
    began = time.time()
    proxy.blackhole(True)
    held = [task for pid in world.of(world.fleets[1]) for task in world.observer.held_by(pid)]
    world.pause(world.settings.lease * 3)
    world.flowing()
    proxy.blackhole(False)
    world.fault("link swallows everything", held, reruns=True, since=began)
    _works_again(world)


@scenario(11, 1, fleets=2, lease=1.5, unowned=25.0)
def idle_blackhole(world: World, budget: int) -> None:
    """The same while nothing is to do, for twenty leases: whoever listens on a dead link finds out, and works again."""
    world.idle.set()
    world.until(lambda: not world.observer.unsettled(), "nothing is to do")
    began = time.time()
    world.proxies[1].blackhole(True)
    world.pause(world.settings.lease * 20)
    world.proxies[1].blackhole(False)
    world.fault("idle link swallows everything", [], reruns=False, since=began)
    world.idle.clear()
    _works_again(world)


def _works_again(world: World) -> None:
    def back() -> bool:
        return any(world.observer.held_by(pid) for pid in world.of(world.fleets[1]))

    world.until(back, "the fleet behind the link works again", 60)


@scenario(11, 60)
def slow_link(world: World, budget: int) -> None:
    """Replies are late, by up to half a second."""

    def inject() -> int:
        world.proxy.delay = world.rng.uniform(0.0, 0.5)
        return 1

    volleys(world, "reply late", budget, 10, inject, 0.1, 0.3)
