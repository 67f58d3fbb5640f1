"""Every verb with the defaults tests want. Each call goes through the public wrappers, to Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from broker.adminscripts import EndpointRow
from broker.scripts import (
    Claims,
    Command,
    DeadLetter,
    Enqueued,
    Finish,
    Lease,
    NewTask,
    Offer,
    Reaped,
    Release,
    Retry,
    Verdict,
)
from broker.store import Store
from tests.support.stores import Clock

T = TypeVar("T")

POOL = "p"
LEASE = 30_000  # ms
DAY = 86_400_000  # ms


def row(
    name: str,
    cap: int = 1,
    priority: int = 5,
    *,
    on: bool = True,
    capabilities: Sequence[str] = (),
    span: tuple[int, int] | None = None,
) -> EndpointRow:
    """`span`: the slots adapt, between the two."""
    fixed = (name, priority, cap, on, tuple(sorted(capabilities)))
    return fixed if span is None else (*fixed, *span)


def new(
    name: str,
    *,
    priority: str = "normal",
    requires: Sequence[str] = (),
    delay: float = 0.0,
    deadline: float = 0.0,
    key: str = "",
    digest: str = "d",
    reply: str = "",
    max_attempts: int = 0,
) -> NewTask:
    return NewTask(
        name, b"{}", digest, "", priority, tuple(sorted(requires)), delay, deadline, max_attempts, reply, key
    )  # fmt: skip


# What an attempt came to: of each lease another text, so that one that lands with another task is seen.


def _head(lease: Lease, status: int) -> str:
    return f'{{"status":{status},"of":"{lease.id} {lease.token}"}}'


def _body(lease: Lease) -> bytes:
    return f"body of {lease.id} {lease.token}".encode()


def finish_of(lease: Lease) -> Finish:
    return Finish(lease, _head(lease, 200), _body(lease))


def retry_of(lease: Lease, delay: float, verdict: Verdict, exclude: bool, pause: float) -> Retry:
    return Retry(lease, delay, verdict, "why", _head(lease, 503), exclude, pause)


def dead_letter_of(lease: Lease, verdict: Verdict, reason: str) -> DeadLetter:
    return DeadLetter(lease, verdict, reason, _head(lease, 400), _body(lease), _head(lease, 400))


class Verbs:
    """One pool of an empty Redis, with a clock of its own. `events`: what the settling verbs said of breakers, but
    for the reason."""

    def __init__(self, store: Store) -> None:
        self.store = store
        store.redis.flushall()
        self.clock = Clock(store)
        self.scripts = store.scripts
        self.events: list[str] = []

    def run(self, command: Command[T]) -> T:
        return self.store.run(command)

    def settle(self, command: Command[Any]) -> list[str]:
        words = self.run(command)
        self.events += [" ".join(event.split(" ")[:3]) for event in getattr(words, "events", ())]
        return list(words)

    def register(self, *rows: EndpointRow, **policies: int) -> list[str]:
        return list(self.run(self.scripts.register(POOL, policies, rows)).gone)

    def enqueue(self, *tasks: NewTask | str, max_depth: int = 0) -> list[Enqueued]:
        news = [new(task) if isinstance(task, str) else task for task in tasks]
        return self.run(self.scripts.enqueue(POOL, news, max_depth))

    def claims(self, process: str, offers: Sequence[Offer], *, most: int = 100, lease: int = LEASE) -> Claims:
        return self.run(
            self.scripts.claim(POOL, process, offers, lease=lease / 1000, most=most)
        )  # fmt: skip

    def claim(self, process: str, most: int = 100, held: int = 0, **rooms: int) -> list[Lease]:
        """`rooms`: endpoint -> room; of each the process holds `held`."""
        claims = self.claims(process, [Offer(name, room, held) for name, room in rooms.items()], most=most)
        return [task.lease for task in claims.tasks]

    def finish(self, *leases: Lease) -> list[str]:
        items = [finish_of(lease) for lease in leases]
        return self.settle(self.scripts.finish(POOL, items, result_ttl=DAY / 1000))

    def retry(
        self,
        *leases: Lease,
        delay: float = 0.0,
        verdict: Verdict = "count",
        exclude: bool = True,
        pause: float = 0.0,
    ) -> list[str]:
        items = [retry_of(lease, delay, verdict, exclude, pause) for lease in leases]
        return self.settle(self.scripts.retry(POOL, items))

    def release(self, *leases: Lease, pause: float = 0.0) -> list[str]:
        return self.settle(self.scripts.release(POOL, [Release(lease, pause) for lease in leases]))

    def dead_letter(self, *leases: Lease, verdict: Verdict = "count", reason: str = "why") -> list[str]:
        items = [dead_letter_of(lease, verdict, reason) for lease in leases]
        command = self.scripts.dead_letter(POOL, items, dead_letter_ttl=2 * DAY / 1000, result_ttl=DAY / 1000)
        return self.settle(command)

    def renew(self, process: str, *leases: Lease, endpoints: Sequence[str] = ()) -> list[str]:
        return self.run(self.scripts.renew(POOL, process, endpoints, leases, lease=LEASE / 1000))

    def promote(self) -> int:
        return self.run(self.scripts.promote(POOL))

    def reap(self, max_deliveries: int = 5) -> Reaped:
        days, lease = 2 * DAY / 1000, LEASE / 1000
        return self.run(self.scripts.reap(POOL, max_deliveries=max_deliveries, dead_letter_ttl=days, lease=lease))

    def pass_time(self, ms: int, process: str = "bystander") -> None:
        """The clock goes on while a process renews what it holds, which is nothing: the pool is in contact."""
        self.renew(process)
        for step in [LEASE // 2] * (ms // (LEASE // 2)) + [ms % (LEASE // 2)]:
            self.clock.advance(step)
            self.renew(process)

    def expire(self) -> int:
        return self.run(self.scripts.expire(POOL, result_ttl=DAY / 1000))

    def cancel(self, *ids: str) -> list[str]:
        return self.run(self.scripts.cancel(POOL, ids, result_ttl=DAY / 1000))

    def redrive(self, *ids: str) -> list[str]:
        return self.run(self.scripts.redrive(POOL, ids))

    def purge(self, *ids: str) -> list[str]:
        return self.run(self.scripts.purge(POOL, ids))

    def watch(self, reply: str, *ids: str) -> list[str]:
        return self.run(self.scripts.watch(POOL, reply, ids))

    def ticket(self, duty: str, process: str, again: bool) -> bool:
        """For longer than a test: a ticket runs out by the server's own clock."""
        return self.run(self.scripts.ticket(POOL, duty, process, seconds=10_000, again=again))

    def health(self, endpoint: str, ok: bool) -> str:
        return self.run(self.scripts.health(POOL, endpoint, ok, "detail"))

    def drain(self, endpoint: str, on: bool = True) -> str:
        return self.run(self.scripts.drain(POOL, endpoint, on))

    def reset(self, endpoint: str) -> str:
        return self.run(self.scripts.reset(POOL, endpoint))

    def leave(self, process: str) -> None:
        self.run(self.scripts.leave(POOL, process))

    # -- what a reader of Redis sees

    def field(self, task: str, name: str) -> str:
        value = self.store.redis.hget(self.store.keys.job(task), name)
        return value.decode() if isinstance(value, bytes) else ""

    def outcome(self, task: str) -> str:
        return self.field(task, "x_out")

    def status(self, task: str) -> str:
        return self.field(task, "status")

    def in_flight(self, endpoint: str) -> int:
        return int(self.store.redis.zcard(self.store.keys.slots(POOL, endpoint)))

    def endpoint(self, endpoint: str, name: str) -> str:
        value = self.store.redis.hget(self.store.keys.endpoint(POOL, endpoint), name)
        return value.decode() if isinstance(value, bytes) else ""

    def counter(self, name: str) -> int:
        return int(self.store.redis.hget(self.store.keys.pool(POOL), name) or 0)


def run_one(verbs: Verbs, task: str = "t") -> Lease:
    """A task, enqueued and claimed by process p1 for endpoint a."""
    verbs.enqueue(task)
    (lease,) = verbs.claim("p1", a=1)
    return lease


def ids(leases: Sequence[Lease]) -> list[str]:
    return [lease.id for lease in leases]
