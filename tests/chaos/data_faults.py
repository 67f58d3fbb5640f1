"""Strangers that write into Redis: what they break is repaired. Row 13."""

from __future__ import annotations

import pickle
import time
import zlib

from tests.chaos.observer import text
from tests.chaos.scenarios import scenario
from tests.chaos.world import POOL, World


def _raw(world: World, *words: object) -> object:
    store = world.observer.store
    return world.observer.patient(lambda: store.pipelined([words])[0])


@scenario(13, 8, latency="200ms", jitter="150ms")
def lose_leases(world: World, budget: int) -> None:
    """The leases of one endpoint are deleted while its tasks run."""
    for _ in range(budget):
        world.pause(0.3, 0.8)
        endpoint = world.rng.choice(["e0", "e1", "e2"])
        held = [task for task, _ in world.observer.leases().get(endpoint, [])]
        _raw(world, "DEL", world.observer.store.keys.slots(POOL, endpoint))
        world.fault("leases deleted", held, reruns=False, bound=75.0)
    world.flowing()


@scenario(13, 100)
def double_entries(world: World, budget: int) -> None:
    """Entries of the lists are doubled, and entries of no task are put in."""
    keys = world.observer.store.keys
    for number in range(budget):
        world.pause(0.02, 0.1)
        queue = keys.queue(POOL, world.rng.choice(["", "high", "low"]))
        if number % 3 == 0:
            _raw(world, "RPUSH", keys.queue(POOL), f"ghost{number}")
            world.fault("entry of no task", [], reruns=False)
        elif entry := _raw(world, "LINDEX", queue, 0):
            _raw(world, "RPUSH", queue, entry)
            world.fault("entry doubled", [text(entry)], reruns=False)
        elif tasks := world.observer.in_flight():
            _raw(world, "RPUSH", keys.queue(POOL), running := world.rng.choice(tasks))
            world.fault("entry of a running task", [running], reruns=False)
    world.flowing()


@scenario(13, 6, outstanding=60, latency="200ms")
def lose_entries(world: World, budget: int) -> None:
    """Lists lose what stands in them; their tasks are found again."""
    keys = world.observer.store.keys
    for _ in range(budget):
        world.pause(0.3, 0.8)
        variant = world.rng.choice(["", "high", "low"])
        lost = [text(entry) for entry in _raw(world, "LRANGE", keys.queue(POOL, variant), 0, 1)]  # type: ignore[attr-defined]
        for entry in lost:
            _raw(world, "LREM", keys.queue(POOL, variant), 0, entry)
        world.fault("entry lost", lost, reruns=False, bound=75.0)
    world.flowing()


@scenario(13, 6, outstanding=60, latency="200ms")
def mangle_jobs(world: World, budget: int) -> None:
    """Hashes of waiting tasks lose fields, get nonsense, or become another type. Whatever can be is settled."""
    keys = world.observer.store.keys
    harms = ("no data", "no status", "bad status", "bad numbers", "another type", "bad data")
    for number in range(budget):
        world.pause(0.2, 0.5)
        entry = _raw(world, "LINDEX", keys.queue(POOL, "low"), -1) or _raw(world, "LINDEX", keys.queue(POOL), -1)
        if entry is None:
            continue
        task, harm = text(entry), harms[number % len(harms)]
        world.history.write("damage", task=task, what=harm)
        job = keys.job(task)
        if harm == "no data":
            _raw(world, "HDEL", job, "data")
        elif harm == "no status":
            _raw(world, "HDEL", job, "status")
        elif harm == "bad status":
            _raw(world, "HSET", job, "status", "confused")
        elif harm == "bad numbers":
            _raw(world, "HSET", job, "x_try", "many", "x_fence", "high", "x_max", "?", "x_born", "?", "x_dl", "?")
        elif harm == "bad data":
            _raw(world, "HSET", job, "data", zlib.compress(pickle.dumps(print)))
        else:
            _raw(world, "DEL", job)
            _raw(world, "SET", job, "nothing", "EX", "3600")
            world.observer.forget(task)  # it is gone: nobody can settle it
        world.fault(f"hash mangled: {harm}", [task], reruns=False)
    world.flowing()


@scenario(13, 4, latency="500ms", jitter="300ms")
def clock_ahead(world: World, budget: int) -> None:
    """RQ's readers clean the registries by a clock that is five minutes ahead, as `rq info` there would."""
    import logging

    from redis import Redis
    from rq.registry import StartedJobRegistry
    from rq.serializers import JSONSerializer

    logging.getLogger("rq").setLevel(logging.CRITICAL)  # it reports each task that it takes for abandoned
    with Redis.from_url(world.server.url) as client:
        registry = StartedJobRegistry(POOL, connection=client, serializer=JSONSerializer)
        for _ in range(budget):
            world.pause(0.4, 0.9)
            held = world.observer.in_flight()
            registry.cleanup(timestamp=time.time() + 300)
            world.fault("clock of RQ's reader ahead", held, reruns=False, bound=75.0)
    world.flowing()
