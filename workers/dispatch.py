"""The loop that claims for all endpoints of one pool in this process and settles what ended, in one round trip.

It keeps no scheduling state: it asks the scripts, starts what it is given, hands back what came of it. Outcomes that
end while a round trip is under way travel with the next one, so batches grow with load and cost no latency when idle.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from broker.configmodel import Pool
from broker.durations import span
from broker.errors import BrokerError, QueueFull
from broker.scripts import BATCH, Claimed, Claims, Command, DeadLetter, Finish, Lease, Offer, Release, Retry
from broker.store import AsyncStore
from workers.policies import most_slots
from workers.retry import GUARD_INITIAL_S, OUTAGES, redis_guard
from workers.transport import Transport
from workers.worker import Settlement, Worker

CLAIM_BATCH: Final = BATCH
POLL_S: Final = (1.0, 2.0)  # an idle process claims so often even if no doorbell rang, with jitter between the two
ALONE_TRIES: Final = 3
GRACE_S: Final = 5.0  # an attempt still running so long after its limit is hung: its lease is not renewed

log = logging.getLogger("headrace.dispatch")


class Running(NamedTuple):
    """An attempt under way. `until`: when its own limits have ended it for sure, by the monotonic clock."""

    claimed: Claimed
    task: asyncio.Task[None]
    until: float
    worker: Worker


@dataclass(slots=True)
class Counts:
    """What this process did since it started, for its RQ worker records."""

    ok: int = 0
    failed: int = 0
    released: int = 0
    refused: int = 0


class Dispatcher:
    """One pool in one process. `run` ends when it was told to stop and everything is settled."""

    def __init__(
        self,
        store: AsyncStore,
        process: str,
        workers: Sequence[Worker],
        *,
        most: int,
        burst: bool = False,
    ) -> None:
        self.pool = workers[0].pool
        self.process = process
        self.workers = {worker.endpoint.id: worker for worker in workers}
        self.running: dict[Lease, Running] = {}
        self.held = dict.fromkeys(self.workers, 0)
        self.counts: dict[str, Counts] = {endpoint: Counts() for endpoint in self.workers}
        self.left = 0  # tasks that waited when last seen
        self._store = store
        self._most = most
        self._burst = burst
        self.on_idle: Callable[[], None] = lambda: None  # the last claim left nothing waiting
        self.on_stale: Callable[[Sequence[str]], object] = lambda endpoints: None  # check these, tasks wait for them
        self._outbox: list[Settlement] = []
        self.settling: dict[Lease, None] = {}  # ended, its settle not answered yet: renewed, or the work is done again
        self._alone: dict[Lease, int] = {}  # settled one by one, and how often that failed: Redis stumbled over a batch
        self._retired: set[Transport] = set()  # of workers that were replaced; closed when their last attempt ends
        self._closing: set[asyncio.Task[None]] = set()
        self._doubt = False  # a claim was sent and no reply seen: the server may have given what we do not know of
        self._wake = asyncio.Event()
        self._claiming = True
        self._rng = random.Random()

    # What others call

    def wake(self) -> None:
        """Claim now: a doorbell rang."""
        self._wake.set()

    def stop_claiming(self) -> None:
        self._claiming = False
        self._wake.set()

    def attach(self, pool: Pool, workers: Sequence[Worker]) -> None:
        """These serve from the next claim on, by the pool's rules as they are now. What runs ends where it began."""
        old = self.workers
        for worker in workers:
            self.counts.setdefault(worker.endpoint.id, Counts())
        held = {endpoint: count for endpoint, count in self.held.items() if count}
        self.held = {**dict.fromkeys((worker.endpoint.id for worker in workers), 0), **held}
        self.pool, self.workers = pool, {worker.endpoint.id: worker for worker in workers}
        self._retired |= {each.transport for each in old.values()} - {each.transport for each in workers}
        self._close_unused()
        self.wake()

    async def aclose(self) -> None:
        """Closes every connection, once nothing runs."""
        transports = {worker.transport for worker in self.workers.values()} | self._retired
        self._retired = set()
        await asyncio.gather(*(transport.aclose() for transport in transports), *self._closing)

    def abandon(self, lease: Lease) -> None:
        """Close the connection of one attempt and release its lease: it was canceled, or is somebody else's."""
        running = self.running.get(lease)
        if running is not None:
            running.task.cancel()

    def abandon_all(self) -> None:
        for running in list(self.running.values()):
            running.task.cancel()

    @property
    def claiming(self) -> bool:
        return self._claiming

    async def run(self) -> None:
        """Raises BrokerError for what waiting will not mend."""
        while not self._is_done():
            self._wake.clear()
            try:
                wake = await self._round()
            except OUTAGES:  # tenacity costs more than the whole call: it is engaged on failure alone
                wake = await self._round_when_redis_is_back()
            await self._sleep(wake)

    def _is_done(self) -> bool:
        """It was told to stop, and all that it ran is settled."""
        return not (self._claiming or self.running or self._outbox)

    async def _round_when_redis_is_back(self) -> float | None:
        guard = redis_guard(on_wait=self._say_waiting, give_up=self._is_done, sleep=self._nap)
        try:
            return await guard(self._round)
        except OUTAGES:
            return 0.0

    # One round trip

    async def _round(self) -> float | None:
        """Settles, claims, starts. Returns seconds until the next claim is due; None: when something happens."""
        outbox, self._outbox = self._outbox, []
        commands, items = self._settling(outbox)
        offers = self._offers()
        if offers:
            commands.append(self._claim(offers, self._known(outbox) if self._doubt else None))
            self._doubt = True
        if not commands:
            return None
        asked = time.monotonic()
        try:
            replies = await self._send(commands, items)
        except OUTAGES:
            self._outbox[:0] = outbox
            raise
        claims = replies[-1] if offers else None
        if isinstance(claims, Claims) and claims.tasks and time.monotonic() - asked > self.pool.queue.lease / 2:
            return 0.0  # it lay unread: some leases may be over by now. Those that are not are given again
        self._doubt = self._doubt and not isinstance(claims, Claims)
        return self._start(claims) if isinstance(claims, Claims) else self._poll()

    async def _send(self, commands: list[Command[Any]], items: list[Sequence[Settlement]]) -> list[Any]:
        """Settles are safe to repeat (a repeat answers "already"), and so is a claim: what it gave is given again."""
        replies = await self._store.try_many(commands)
        for reply in replies:
            if isinstance(reply, OUTAGES):
                raise reply
        for reply, batch in zip(replies, items, strict=False):
            if isinstance(reply, BrokerError):
                self._refused(reply, batch)
            else:
                self._settled(reply, batch)
                _tell(getattr(reply, "events", ()))
        if isinstance(replies[-1], BrokerError):
            await asyncio.sleep(self._rng.uniform(GUARD_INITIAL_S, 10 * GUARD_INITIAL_S))
        return replies

    def _settling(self, outbox: Sequence[Settlement]) -> tuple[list[Command[Any]], list[Sequence[Settlement]]]:
        scripts, name, queue = self._store.scripts, self.pool.name, self.pool.queue
        commands: list[Command[Any]] = []
        items: list[Sequence[Settlement]] = []
        by_kind: dict[type, list[Any]] = {Finish: [], Retry: [], Release: [], DeadLetter: []}
        for item in outbox:
            by_kind[type(item)].append(item)
        for kind, every in by_kind.items():
            for batch in self._batches(every):
                if kind is Finish:
                    command: Command[Any] = scripts.finish(name, batch, result_ttl=queue.result_ttl)
                elif kind is Retry:
                    command = scripts.retry(name, batch)
                elif kind is Release:
                    command = scripts.release(name, batch)
                else:
                    dead_ttl, ttl = queue.dead_letter_ttl, queue.result_ttl
                    command = scripts.dead_letter(
                        name, batch, dead_letter_ttl=dead_ttl, result_ttl=ttl
                    )
                commands.append(command)
                items.append(batch)
        return commands, items

    def _batches(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        if self._alone:
            return [[item] for item in items]
        return [items[i : i + BATCH] for i in range(0, len(items), BATCH)]

    def _refused(self, error: BrokerError, batch: Sequence[Settlement]) -> None:
        """Again, unless it is one task that Redis stumbles over: then that one alone, and in the end not at all. Its
        lease runs out and reap sees to it; the others must not wait for it."""
        if error.passing or isinstance(error, QueueFull):
            log.warning("%s; trying again", error)
        elif len(batch) == 1:
            lease = batch[0].lease
            self._alone[lease] = self._alone.get(lease, 0) + 1
            if self._alone[lease] >= ALONE_TRIES:
                log.error("task %s: its settle fails, and is given up: %s", lease.id, error)
                del self._alone[lease]
                self.settling.pop(lease, None)
                return
        else:
            self._alone.update({item.lease: 0 for item in batch})
        self._outbox += batch

    def _settled(self, words: Sequence[str], batch: Sequence[Settlement]) -> None:
        for word, item in zip(words, batch, strict=True):
            self._alone.pop(item.lease, None)
            self.settling.pop(item.lease, None)
            counts = self.counts[item.lease.endpoint]
            if word not in ("done", "already"):
                counts.refused += 1
                log.debug("task %s: settle refused, it is %s", item.lease.id, word)
            elif isinstance(item, Finish):
                counts.ok += 1
            elif isinstance(item, Release):
                counts.released += 1
            else:
                counts.failed += 1

    def _offers(self) -> list[Offer]:
        if not self._claiming:
            return []
        free = self._most - len(self.running)
        if free <= 0:
            return []
        return [
            Offer(endpoint, min(free, max(0, most_slots(worker.endpoint) - self.held[endpoint])), self.held[endpoint])
            for endpoint, worker in self.workers.items()
        ]

    def _known(self, outbox: Sequence[Settlement]) -> list[Lease]:
        """Leases that run, or whose settle is on its way."""
        return [*self.running, *(item.lease for item in (*outbox, *self._outbox))]

    def _claim(self, offers: Sequence[Offer], known: Sequence[Lease] | None) -> Command[Claims]:
        most = min(CLAIM_BATCH, self._most - len(self.running))
        return self._store.scripts.claim(
            self.pool.name,
            self.process,
            offers,
            lease=self.pool.queue.lease,
            most=most,
            known=known,
        )

    def _start(self, claims: Claims) -> float | None:
        self.left = claims.left
        if claims.stale:
            self.on_stale(claims.stale)
        now = time.monotonic()
        for claimed in claims.tasks:
            worker = self.workers.get(claimed.lease.endpoint)
            if worker is None:  # removed while the claim was under way
                self._outbox.append(Release(claimed.lease))
                self._wake.set()
                continue
            if claimed.lease in self.settling or claimed.lease in self.running:
                continue  # given before, and Redis forgot that: a crash, a failover. It runs, under this very token
            log.debug("task %s: given to %s", claimed.lease.id, claimed.lease.endpoint)
            task = asyncio.create_task(self._attempt(worker, claimed))
            self.held[claimed.lease.endpoint] += 1
            self.running[claimed.lease] = Running(claimed, task, now + worker.limit(claimed) + GRACE_S, worker)
        if claims.left == 0:
            self.on_idle()
            if self._burst and not self.running and not self._outbox and claims.wake is None:
                self.stop_claiming()
        poll = self._poll()
        return poll if claims.wake is None else min(poll, claims.wake)

    async def _attempt(self, worker: Worker, claimed: Claimed) -> None:
        settlement: Settlement | None = None
        try:
            settlement = await worker.run(claimed)
        except Exception:  # released it would come back at once, for ever; a lease that runs out is counted
            log.exception("task %s: left to the end of its lease: a fault inside headrace", claimed.lease.id)
        except BaseException:  # canceled: no attempt counted
            settlement = Release(claimed.lease)
            raise
        finally:
            del self.running[claimed.lease]
            self.held[worker.endpoint.id] -= 1
            if settlement is not None:
                self._outbox.append(settlement)
                self.settling[claimed.lease] = None
            self._wake.set()
            if self._retired:
                self._close_unused()

    def _close_unused(self) -> None:
        unused = self._retired - {running.worker.transport for running in self.running.values()}
        self._retired -= unused
        for transport in unused:
            task = asyncio.create_task(transport.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _sleep(self, seconds: float | None) -> None:
        if self._wake.is_set():
            return
        handle = None
        if seconds is not None:
            handle = asyncio.get_running_loop().call_later(seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if handle is not None:
                handle.cancel()

    async def _nap(self, seconds: float) -> None:
        """Cut short when an attempt ends, or when it is told to stop."""
        self._wake.clear()
        await self._sleep(seconds)

    def _poll(self) -> float:
        return self._rng.uniform(*POLL_S)

    def _say_waiting(self, attempt: int, seconds: float, error: BaseException) -> None:
        log.log(logging.WARNING if attempt == 1 else logging.DEBUG, "%s; trying again in %s", error, span(seconds))


def _tell(events: Sequence[str]) -> None:
    """What became of breakers, for the log."""
    for event in events:
        what, endpoint, *rest = event.split(" ", 3)
        if what == "opened":
            log.error("endpoint %s: breaker opened for %.1f s: %s", endpoint, int(rest[0]) / 1000, rest[1])
        else:
            log.info("endpoint %s: breaker closed", endpoint)
