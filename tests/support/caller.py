"""Random calls of every verb. What is called is drawn by a `choose(options)`: hypothesis', which can shorten what it
found, or a seeded generator's, which strays further in the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from broker.scripts import Lease, NewTask, Verdict
from broker.store import Store
from tests.support.model_state import Policies
from tests.support.twin import Twin
from tests.support.verbs import new, row

T = TypeVar("T")
Call = tuple[str, dict[str, Any]]

PROCESSES = ("p1", "p2", "p3")
ENDPOINTS = ("a", "b", "c", "d")
NEEDS: tuple[tuple[str, ...], ...] = ((), (), (), ("vision",), ("code", "vision"))
VERDICTS: tuple[Verdict, ...] = ("count", "count", "count", "good", "open", "ignore")
ADAPTING = {5: (2, 12)}  # endpoints of so many slots find out how many, between the two
PAUSES = (0.0, 0.0, 0.0, 1.0, 60.0)


class Choose(Protocol):
    def __call__(self, options: Sequence[T], /) -> T: ...


def any_policies(choose: Choose) -> Policies:
    return Policies(
        max_depth=20,
        failures=choose((1, 2, 3)),
        half_open_successes=choose((1, 1, 2)),
        cooldown=5000,
        cooldown_max=20_000,
        slow_start=choose((0, 1)),
        check_after=choose((0, 0, 0, 10_000)),
        rate_window=choose((0, 0, 5000)),
    )


def any_fleet(choose: Choose) -> list[tuple[Any, ...]]:
    """One to four endpoints: name, slots, priority, switched on, capabilities, what the slots adapt between."""

    def endpoint(name: str) -> tuple[Any, ...]:
        slots, priority, on = choose((1, 2, 3, 5)), choose((5, 5, 9)), choose((True,) * 5 + (False,))
        return name, slots, priority, on, choose(NEEDS[2:]), ADAPTING.get(slots)

    return [endpoint(name) for name in ENDPOINTS[: choose((1, 2, 3, 4))]]


def _any_task(choose: Choose) -> dict[str, Any]:
    return {
        "number": choose((None,) * 9 + (0, 1)),  # of a task that may be known
        "priority": choose(("normal", "normal", "high", "low")),
        "requires": choose(NEEDS),
        "delay": choose((0.0,) * 5 + (0.05, 2.0)),
        "deadline": choose((0.0, 0.0, 0.0, 1.0, 40.0)),
        "key": choose(("",) * 6 + ("k1", "k2")),
        "digest": choose(("", "d1", "d2")),
    }


def any_call(choose: Choose) -> Call:
    name = choose(
        ("work",) * 7 + ("enqueue",) * 3 + ("settle",) * 4 + ("advance", "sweep") * 2 + ("burst", "claim") * 2
        + ("manage", "redrive", "cancel", "register", "leave", "purge", "crash", "watch", "ticket")
    )  # fmt: skip
    return name, _arguments(name, choose)


def saturation(choose: Choose, rounds: int, pause: float) -> dict[str, Any]:
    """Arguments of `saturate`. How long a round takes: so long, and longer with each task in it."""
    return {
        "process": "p1", "rounds": rounds, "pause": pause, "idle": choose((0, 0, 0, 1)),
        "ms": choose((20, 20, 45, 100)), "per_slot": choose((0, 0, 5, 20)),
    }  # fmt: skip


def adapting_fleet(choose: Choose) -> list[tuple[Any, ...]]:
    """One endpoint, whose slots adapt, but seldom."""
    span = choose(((1, 4), (1, 12), (2, 12), (3, 8), (1, 12), (2, 12), None))
    return [("a", choose((1, 2, 3, 5)), 5, True, (), span)]


def _arguments(name: str, choose: Choose) -> dict[str, Any]:
    def picks() -> list[int]:
        return [choose(range(10_000)) for _ in range(choose((1, 2, 3)))]

    match name:
        case "work":
            how = ("finish", "flush", "retry", "retry", "retry", "dead_letter", "release", "release", "keep", "keep")
            return {
                "process": choose(PROCESSES), "room": choose((1, 2, 5)), "most": choose((1, 2, 10)), "how": choose(how),
                "pause": choose(PAUSES[2:]), "ms": choose((0, 60, 1000)),
            }  # fmt: skip
        case "enqueue":
            tasks = [_any_task(choose) for _ in range(choose(range(1, 8)))]
            return {"tasks": tasks, "max_depth": choose((0, 0, 0, 4))}
        case "settle":
            return {
                "verb": choose(("finish", "retry", "retry", "release", "dead_letter", "renew")), "chosen": picks(),
                "delay": choose((0.0, 0.0, 0.5, 3.0)), "verdict": choose(VERDICTS), "pause": choose(PAUSES),
                "exclude": choose((True, True, False)), "reason": choose(("why", "expired: too late")),
                "process": choose(PROCESSES),
            }  # fmt: skip
        case "advance":
            return {"ms": choose((1, 60, 150, 500, 1000, 2500, 6000, 6000, 31_000, 60_000, 120_000))}
        case "sweep":
            quiet = choose((False, False, False, True))  # whether nobody was in contact
            return {"ms": choose((0, 1000, 6000, 31_000)), "deliveries": choose((1, 2, 3, 3, 5)), "quiet": quiet}
        case "crash":
            return {"process": choose(PROCESSES), "times": choose((1, 2, 3)), "ms": choose((500, 1000, 2500))}
        case "burst":
            return {"more": choose(range(1, 13)), "process": choose(PROCESSES)}
        case "claim":
            served = choose((ENDPOINTS, *((endpoint,) for endpoint in ENDPOINTS)))
            rooms = {endpoint: choose((0, 1, 2, 5)) for endpoint in served}
            return {"process": choose(PROCESSES), "rooms": rooms, "most": choose((1, 3, 10, 10))}
        case "manage":
            what = choose(("down", "up", "up", "drain", "undrain", "reset"))
            return {"endpoint": choose(ENDPOINTS), "what": what}
        case "register":
            return {"fleet": any_fleet(choose)}
        case "leave":
            return {"process": choose(PROCESSES)}
        case "watch":
            return {"reply": choose(("r", "w")), "chosen": picks(), "dead": choose((False, False, True))}
        case "ticket":
            duty, again = choose(("ear", "sweep")), choose((True, False))
            return {"duty": duty, "process": choose(PROCESSES), "again": again}
    return {"chosen": picks()}


class Caller:
    """Plays calls on Redis and the model: one pool, up to four endpoints, three processes. Leases are never forgotten:
    old ones are tried again and again.
    """

    def __init__(self, store: Store, policies: Policies, fleet: Sequence[Any]) -> None:
        self.twin = Twin(store)
        self.policies = policies
        self.made = 0  # tasks, numbered
        self.register(fleet)

    def play(self, call: Call) -> None:
        name, arguments = call
        getattr(self, name)(**arguments)
        self.twin.check()

    def _held(self) -> list[Lease]:
        return [lease for lease in self.twin.leases if f"{lease.id}:{lease.token}" in self.twin.model.wip]

    def _leases(self, chosen: Sequence[int]) -> list[Lease]:
        """Three of four are held; the others ended long ago, mostly; none twice."""
        every, held = self.twin.leases, self._held()
        pools = [held if one % 4 and held else every for one in chosen] if every else []
        return list(dict.fromkeys(pool[one // 4 % len(pool)] for pool, one in zip(pools, chosen, strict=False)))

    def _ids(self, chosen: Sequence[int], dead: bool) -> list[str]:
        """One of four is any task, or none; the others are dead letters, or alive, if there are any."""
        known = ["nobody", *self.twin.model.tasks]
        wanted = [
            task.id for task in self.twin.model.tasks.values() if task.outcome != "ok" and bool(task.outcome) == dead
        ]
        pools = [wanted if one % 4 and wanted else known for one in chosen]
        return list(dict.fromkeys(pool[one // 4 % len(pool)] for pool, one in zip(pools, chosen, strict=True)))

    def register(self, fleet: Sequence[Any]) -> None:
        rows = [
            row(name, cap, priority, on=on, capabilities=can, span=span) for name, cap, priority, on, can, span in fleet
        ]
        self.twin.register(rows, self.policies)

    def enqueue(self, tasks: Sequence[dict[str, Any]], max_depth: int) -> None:
        news: list[NewTask] = []
        for task in tasks:
            number = task["number"]
            if number is None:
                number, self.made = self.made, self.made + 1
            options = {name: value for name, value in task.items() if name != "number"}
            news.append(new(f"t{number}", reply="" if number % 3 else "r", max_attempts=2, **options))
        self.twin.enqueue(news, max_depth)

    def burst(self, more: int, process: str) -> None:
        """Tasks of all kinds, to one process with room."""
        known, self.made = self.made, self.made + more
        ranks, deadlines = ("normal", "high", "low", "high"), (0.0, 1.0, 0.0, 0.0, 0.0)
        news = [
            new(f"t{one}", priority=ranks[one % 4], requires=NEEDS[one % 4], deadline=deadlines[one % 5])
            for one in range(known, known + more)
        ]
        self.twin.enqueue(news)
        self.twin.claim(process, dict.fromkeys(ENDPOINTS, 5))

    def saturate(self, process: str, rounds: int, ms: int, per_slot: int, idle: int, pause: float) -> None:
        """Rounds in which all slots but `idle` are in use, and all succeed. Then it is too much for some, perhaps."""
        known = self.made
        for endpoint in list(self.twin.model.pool.endpoints):
            self.manage(endpoint, "reset")
        for _ in range(rounds):
            slots = sum(endpoint.cap for endpoint in self.twin.model.pool.endpoints.values())
            fresh, self.made = self.made, self.made + max(1, min(slots - idle, 20))
            self.twin.enqueue([new(f"t{number}") for number in range(fresh, self.made)])
            leases = self.twin.claim(process, dict.fromkeys(ENDPOINTS, 12))
            self.twin.advance(ms + per_slot * len(leases))
            self.twin.finish(leases)
        if pause:
            self.burst(4, process)
            self.twin.release(self._held()[-4:], pause)
        self.twin.purge([f"t{number}" for number in range(known, self.made)])

    def claim(self, process: str, rooms: dict[str, int], most: int) -> None:
        self.twin.claim(process, rooms, most)

    def work(self, process: str, room: int, most: int, how: str, pause: float, ms: int) -> None:
        """Claim for all endpoints, and settle, as a process does all day."""
        leases = self.twin.claim(process, dict.fromkeys(ENDPOINTS, room), most)
        self.twin.advance(ms)
        if how == "finish":
            self.twin.finish(leases)
        elif how == "flush":
            self.twin.finish(self._held())
        elif how == "retry":
            self.twin.retry(leases, 0.0, "count", exclude=True, pause=0.0)
        elif how == "dead_letter":
            self.twin.dead_letter(leases, "good", "why")
        elif how == "release":
            self.twin.release(leases, pause)

    def settle(
        self, verb: str, chosen: Sequence[int], delay: float, verdict: Verdict, exclude: bool, pause: float,
        reason: str, process: str,
    ) -> None:  # fmt: skip
        leases = self._leases(chosen)
        if verb == "finish":
            self.twin.finish(leases)
        elif verb == "retry":
            self.twin.retry(leases, delay, verdict, exclude, pause)
        elif verb == "release":
            self.twin.release(leases, pause)
        elif verb == "dead_letter":
            self.twin.dead_letter(leases, verdict, reason)
        else:
            self.twin.renew(process, leases, ENDPOINTS[: len(chosen)])

    def advance(self, ms: int) -> None:
        self.twin.advance(ms)

    def sweep(self, ms: int, deliveries: int, quiet: bool) -> None:
        if quiet:
            self.twin.advance(ms)
        else:
            self.twin.pass_time(ms)
        self.twin.expire()
        self.twin.reap(deliveries)
        self.twin.promote()

    def crash(self, process: str, times: int, ms: int) -> None:
        """A process takes what it can and dies, again and again; tasks are poison after the third time."""
        for _ in range(times):
            self.twin.claim(process, dict.fromkeys(ENDPOINTS, 5))
            self.twin.check()
            self.twin.pass_time(31_000)
            self.twin.reap(3)
            self.twin.pass_time(ms)
            self.twin.promote()

    def cancel(self, chosen: Sequence[int]) -> None:
        self.twin.cancel(self._ids(chosen, dead=False))

    def redrive(self, chosen: Sequence[int]) -> None:
        self.twin.redrive(self._ids(chosen, dead=True))

    def purge(self, chosen: Sequence[int]) -> None:
        self.twin.purge(self._ids(chosen, dead=True))

    def watch(self, reply: str, chosen: Sequence[int], dead: bool) -> None:
        self.twin.watch(reply, self._ids(chosen, dead))

    def ticket(self, duty: str, process: str, again: bool) -> None:
        self.twin.ticket(duty, process, again)

    def manage(self, endpoint: str, what: str) -> None:
        if what == "reset":
            self.twin.reset(endpoint)
        elif what in ("up", "down"):
            self.twin.health(endpoint, what == "up")
        else:
            self.twin.drain(endpoint, what == "drain")

    def leave(self, process: str) -> None:
        self.twin.leave(process)
