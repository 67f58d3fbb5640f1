"""Ordered pull in plain Python: the same rule as `broker/lua/select.lua` and `claim.lua`, written to be read.

Many processes, many endpoints, one queue, no leader. Each process asks for all its endpoints at once and is given only
what each of them should take now, so that it does not matter which process asks first:

1. `free_slots`   an endpoint has room: switched on, healthy, not draining, not paused, breaker not
                  open, under its cap.
2. `counted`      its room counts only as far as some process will answer for it: the one that asks, or one that waits
                  at its doorbell and is trusted. A process that left a ring unanswered for `spill` ms, or was silent
                  for five seconds, is not trusted until it speaks again: a dead one delays a task or two.
3. `hand_out`     tasks go to tiers of equal priority, from the top. A tier that the tasks cover takes all it has room
                  for; the first tier that they do not cover is filled like water: each task to the least loaded.
4. `own_limit`    siblings that listen on the same endpoint get equal shares of its slots.
5. `Batch`        a batch limit shrinks all shares together.

Tasks that the same endpoints may take form a class, with one list per priority. Classes are served best priority
first, then oldest head; a fixed small share of calls goes by age alone, and a fixed small share of pops goes to lower
lists, so that nothing starves. Times are integer milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

SILENT_AFTER = 5_000
LIVE_FOR = 30_000
RANK = {"high": 1, "normal": 2, "low": 3}
GOLDEN = 0.6180339887498949


@dataclass
class Endpoint:
    """One server as Redis knows it. `slots`: task id -> when its lease expires."""

    id: str
    priority: int = 5
    cap: int = 1
    on: bool = True
    drain: bool = False
    healthy: bool | None = None
    checked: int = 0
    ramp: int | None = None
    ramp_ok: int = 0
    gone: bool = False
    capabilities: frozenset[str] = frozenset()
    state: str = "closed"
    opens: int = 0
    pause: int = 0
    last: int = 0
    seen: int = 0
    epoch: int = 0
    fails: int = 0
    good: int = 0
    cooldown: int = 0
    probe: str = ""
    served: int = 0
    failed: int = 0
    slots: dict[str, int] = field(default_factory=dict)

    def shut(self, now: int) -> bool:
        return not self.on or self.drain or self.healthy is False or (self.state == "open" and self.opens > now)

    def stale(self, now: int, check_after: int) -> bool:
        """It idled for longer than a health check is good for (0: for ever): check first."""
        usable = self.on and not self.drain and self.healthy is not False and self.pause <= now
        return usable and check_after > 0 and not self.slots and now - self.checked > check_after

    def free_slots(self, now: int, check_after: int = 0) -> int:
        """How many more requests it may have in flight, whoever asks. A breaker that is not closed lets one probe by;
        after a recovery `ramp` limits it."""
        if self.shut(now) or self.pause > now or self.stale(now, check_after):
            return 0
        limit = self.cap if self.ramp is None else min(self.cap, self.ramp)
        free = max(0, limit - len(self.slots))
        if self.state == "closed":
            return free
        return 1 if free and self.probe not in self.slots else 0


@dataclass
class Listener:
    """A process that waits at its doorbell: when it spoke, when it was rung (0: not since), its room per endpoint."""

    spoke: int
    rung: int = 0
    rooms: dict[str, int] = field(default_factory=dict)

    def trusted(self, now: int, spill: int) -> bool:
        return now - self.spoke <= SILENT_AFTER and (self.rung == 0 or now - self.rung < spill)


@dataclass(frozen=True)
class Variant:
    """What one list of waiting tasks has in common. Names are sorted."""

    priority: str = "normal"
    requires: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return ",".join(self.requires) + "!" + ",".join(self.excluded)

    def __str__(self) -> str:
        """As the key of the list has it; "" for RQ's own list."""
        if not self.requires and not self.excluded:
            return "" if self.priority == "normal" else self.priority
        requires = "+" + ",".join(self.requires) if self.requires else ""
        return self.priority + requires + ("!" + ",".join(self.excluded) if self.excluded else "")


@dataclass
class Pool:
    """`lists`: waiting tasks, none empty; `at`: since when a task waits; `turn`, `seq`: counters that only grow."""

    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    listeners: dict[str, Listener] = field(default_factory=dict)
    lists: dict[Variant, list[str]] = field(default_factory=dict)
    at: dict[str, int] = field(default_factory=dict)
    spill: int = 100
    check_after: int = 0
    turn: int = 0
    seq: int = 0

    def push(self, variant: Variant, task: str, front: bool = False) -> None:
        tasks = self.lists.setdefault(variant, [])
        tasks.insert(0 if front else len(tasks), task)

    def remove(self, variant: Variant, task: str) -> None:
        self.lists[variant].remove(task)
        if not self.lists[variant]:
            del self.lists[variant]


@dataclass
class Seat:
    """An endpoint during one decision: `load` as if all it was handed ran already, `counted` what it may still take."""

    endpoint: Endpoint
    load: int
    counted: int

    def order(self) -> tuple[float, int, str]:
        return (self.load / self.endpoint.cap, self.endpoint.last, self.endpoint.id)

    def take(self, count: int) -> int:
        self.load, self.counted = self.load + count, self.counted - count
        return count


def seats_for(pool: Pool, now: int, asker: str, rooms: Mapping[str, int]) -> dict[str, Seat]:
    """The counting rule. `rooms`: what the asking process could run more, per endpoint."""
    others = [one for name, one in pool.listeners.items() if name != asker and one.trusted(now, pool.spill)]
    check_after = pool.check_after if asker else 0  # ring for a stale endpoint too: its process comes, and checks it
    seats = {}
    for name, endpoint in pool.endpoints.items():
        answered_for = rooms.get(name, 0) + sum(one.rooms.get(name, 0) for one in others)
        seats[name] = Seat(endpoint, len(endpoint.slots), min(endpoint.free_slots(now, check_after), answered_for))
    return seats


def water_fill(tier: Sequence[Seat], count: int) -> dict[str, int]:
    """Each task to the least loaded seat, then the one whose last claim is longest ago, then by id."""
    handed = {seat.endpoint.id: 0 for seat in tier}
    for _ in range(count):
        best = min((seat for seat in tier if seat.counted > 0), key=Seat.order)
        handed[best.endpoint.id] += best.take(1)
    return handed


def hand_out(seats: Iterable[Seat], waiting: int) -> dict[str, int]:
    """How many of the waiting tasks fall to each seat; takes them off its counted room."""
    handed: dict[str, int] = {}
    ranked = sorted(seats, key=lambda seat: -seat.endpoint.priority)
    for _, group in groupby(ranked, key=lambda seat: seat.endpoint.priority):
        tier = list(group)
        room = sum(seat.counted for seat in tier)
        if waiting >= room:
            handed |= {seat.endpoint.id: seat.take(seat.counted) for seat in tier}
        else:
            handed |= water_fill(tier, waiting)
        waiting = max(0, waiting - room)
    return handed


@dataclass
class Class:
    """Tasks that the same endpoints may take: their lists, best priority first, and those endpoints."""

    lists: list[Variant]
    allowed: list[str]
    waiting: int
    head: int

    @property
    def rank(self) -> int:
        return RANK[self.lists[0].priority]


def allowed(variant: Variant, seats: Mapping[str, Seat], now: int) -> list[str]:
    """Capable and not excluded; if no such endpoint is live, the excluded ones too: a pool of one must still retry."""

    def live(seat: Seat) -> bool:
        return not seat.endpoint.shut(now) and (seat.counted > 0 or now - seat.endpoint.seen <= LIVE_FOR)

    capable = [name for name, seat in seats.items() if set(variant.requires) <= seat.endpoint.capabilities]
    rest = [name for name in capable if name not in variant.excluded]
    return rest if any(live(seats[name]) for name in rest) else capable


def falls(number: int, share: float) -> bool:
    """True for `share` of all numbers, evenly spread, also of every second, third ... number: none is out of step."""
    return (number * GOLDEN) % 1 < share


def classes_of(pool: Pool, seats: Mapping[str, Seat], now: int, by_age: bool) -> list[Class]:
    kinds: dict[str, list[Variant]] = {}
    for variant in pool.lists:
        kinds.setdefault(variant.kind, []).append(variant)
    found = []
    for kind in sorted(kinds):
        lists = sorted(kinds[kind], key=lambda variant: RANK[variant.priority])
        waiting = sum(len(pool.lists[variant]) for variant in lists)
        head = pool.at.get(pool.lists[lists[0]][0], 0)
        found.append(Class(lists, allowed(lists[0], seats, now), waiting, head))
    return sorted(found, key=lambda one: (0 if by_age else one.rank, one.head))


@dataclass
class Batch:
    """What one call decides. `tasks`: (task, endpoint) in order; `rung`: processes told; `left`: tasks that wait on."""

    tasks: list[tuple[str, str]] = field(default_factory=list)
    rung: list[str] = field(default_factory=list)
    left: int = 0
    reserved: bool = False


def ring(pool: Pool, now: int, asker: str, handed: Mapping[str, int]) -> list[str]:
    """One waiting process per task that falls to its endpoint, the one with the most room first."""
    rung = []
    able = {name: one for name, one in pool.listeners.items() if name != asker and one.trusted(now, pool.spill)}
    for endpoint, count in handed.items():
        ready = [name for name, one in able.items() if one.rooms.get(endpoint, 0) > 0]
        ready.sort(key=lambda name: (-able[name].rooms[endpoint], name))
        for name in ready[:count]:
            if able[name].rung == 0:
                able[name].rung = now
                rung.append(name)
    return rung


def announce(pool: Pool, now: int) -> list[str]:
    """For verbs that make tasks ready and take none: the processes to ring."""
    seats = seats_for(pool, now, "", {})
    rung = []
    for one in classes_of(pool, seats, now, by_age=False):
        rung += ring(pool, now, "", hand_out([seats[name] for name in one.allowed], one.waiting))
    return rung


def claim(
    pool: Pool,
    now: int,
    asker: str,
    rooms: Mapping[str, int],
    held: Mapping[str, int],
    most: int,
    admit: Callable[[str, Endpoint], bool],
) -> Batch:
    """One call of one process, for all its endpoints. `admit` starts a task, or says that it died while it waited."""
    batch, took = Batch(), dict.fromkeys(rooms, 0)
    seats = seats_for(pool, now, asker, rooms)
    pool.turn += 1 if pool.lists else 0
    classes = classes_of(pool, seats, now, by_age=falls(pool.turn, 1 / 8))
    free = {name: endpoint.free_slots(now, pool.check_after) for name, endpoint in pool.endpoints.items()}
    loads = {name: len(endpoint.slots) / endpoint.cap for name, endpoint in pool.endpoints.items()}
    pops = 0

    def in_order(names: Iterable[str]) -> list[str]:
        ends = pool.endpoints
        return sorted(names, key=lambda name: (-ends[name].priority, loads[name], ends[name].last, name))

    def own_limit(name: str) -> int:
        siblings = sum(
            1
            for other, one in pool.listeners.items()
            if other != asker and one.trusted(now, pool.spill) and one.rooms.get(name, 0) > 0
        )
        limit = min(rooms[name], free[name]) - took[name]
        if siblings:
            share = math.ceil(pool.endpoints[name].cap / (siblings + 1))
            limit = min(limit, share - held[name] - took[name])
        return max(0, limit)

    def next_list(lists: Sequence[Variant]) -> Variant:
        nonlocal pops
        if len(lists) > 1:
            pops += 1
            beat = pool.turn * 7 + pops
            if falls(beat, 1 / 64):
                return lists[-1]
            if falls(beat, 5 / 64):
                return lists[1]
        return lists[0]

    def take(one: Class, name: str, quota: int) -> int:
        started = 0
        while started < quota and len(batch.tasks) < most:
            lists = [variant for variant in one.lists if variant in pool.lists]
            if not lists:
                break
            variant = next_list(lists)
            task = pool.lists[variant][0]
            pool.remove(variant, task)
            one.waiting -= 1
            if admit(task, pool.endpoints[name]):
                batch.tasks.append((task, name))
                started += 1
        return started

    for one in classes:
        handed = hand_out([seats[name] for name in one.allowed], one.waiting)
        mine = in_order(name for name in rooms if handed.get(name, 0) > 0)
        quotas = {name: min(handed[name], own_limit(name)) for name in mine}
        wanted, space = sum(quotas.values()), most - len(batch.tasks)
        scale = space / wanted if wanted > space else 1
        for name in mine:
            started = take(one, name, min(quotas[name], math.ceil(quotas[name] * scale)))
            took[name] += started
            handed[name] -= started
        if one.waiting > 0 and any(handed.values()):
            batch.reserved = True
            batch.rung += ring(pool, now, asker, handed)
    for name in in_order(name for name in took if took[name] > 0):
        pool.seq += 1
        pool.endpoints[name].last = pool.seq
    left_over = {name: rooms[name] - took[name] for name in rooms if rooms[name] > took[name]}
    pool.listeners.pop(asker, None)
    if left_over:
        pool.listeners[asker] = Listener(now, 0, left_over)
    batch.left = sum(one.waiting for one in classes)
    return batch
