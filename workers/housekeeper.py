"""What must go on even while the event loop is blocked: renewing leases, sweeping, and RQ's picture of the workers.

Runs in a thread of its own with a connection of its own. A blocked event loop must not cost every lease; a hung attempt
must not keep its.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from broker import __version__
from broker.errors import BrokerError, QueueFull
from broker.inspect import pools
from broker.keys import LAG_FIELD
from broker.rqjob import utc
from broker.scripts import BATCH, SCRUB_START, Command, Lease, Reaped, Scrubbed
from broker.store import Store
from workers.clock import ServerClock
from workers.dispatch import Counts, Dispatcher
from workers.lag import LoopLag

LOOK_S: Final = 2.0
SWEEP_S: Final = 5.0
SCRUB_S: Final = 50.0  # from one pass of a pool to the next
AWAY_S: Final = 86_400.0  # a pool that holds nothing and was not served for so long is retired
SCRUB_AT_ONCE_S: Final = 0.2  # of a pass, then the leases come first
RENEW_SHARE: Final = 3  # renewed each third of a lease
WORKER_TTL_S: Final = 60
SHOWN: Final = 20  # running tasks that RQ's tools are shown per worker; the leases are the truth

log = logging.getLogger("headrace.housekeeper")

OnLost = Callable[[Dispatcher, Lease, str], None]


class Housekeeper:
    """`start`, `stop`.

    on_lost      called in the housekeeper's thread for each lease that is ours no longer
    on_look      called there every LOOK_S
    dispatchers  may be changed in place while it runs
    """

    def __init__(
        self,
        store: Store,
        process: str,
        dispatchers: Sequence[Dispatcher],
        on_lost: OnLost,
        clock: ServerClock,
        lag: LoopLag,
    ) -> None:
        self._store = store
        self._process = process
        self._dispatchers = dispatchers
        self._on_lost = on_lost
        self.on_look: Callable[[], None] = lambda: None
        self._clock, self._lag = clock, lag
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="housekeeper", daemon=True)
        self._born = utc(clock.now())
        self._scrubs: dict[str, Scrubbed] = {}  # passes under way, by pool
        self._told: dict[tuple[str, str], tuple[int, int]] = {}

    def start(self) -> None:
        self.tell_rq()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and takes the workers out of RQ's list."""
        self._stop.set()
        self._thread.join(timeout=5.0)
        try:
            self._store.pipelined(self._farewell())
        except BrokerError as error:
            log.debug("farewell: %s", error)

    def _run(self) -> None:
        renewed = swept = looked = time.monotonic()
        retired = -SCRUB_S
        while not self._stop.wait(min(self._lease / RENEW_SHARE, 1.0)):
            now = time.monotonic()
            if now - looked >= LOOK_S:
                looked = now
                self._look()
            try:
                if now - renewed >= self._lease / RENEW_SHARE:
                    self._renew(now)
                    self.tell_rq()
                    renewed = now
                if now - swept >= SWEEP_S:
                    self._sweep()
                    self._begin_scrubs()
                    swept = now
                self._scrub()
                if now - retired >= SCRUB_S:
                    retired = now
                    self._retire()
            except BrokerError as error:
                log.debug("housekeeping: %s", error)
            except Exception:
                log.exception("housekeeping failed; going on")

    def _look(self) -> None:
        """By itself: the rest may fail over what this repairs."""
        try:
            self.on_look()
        except BrokerError as error:
            log.debug("looking at the pools: %s", error)
        except Exception:
            log.exception("looking at the pools failed; going on")

    @property
    def _lease(self) -> float:
        return min((each.pool.queue.lease for each in list(self._dispatchers)), default=SWEEP_S)

    # Leases

    def _renew(self, now: float) -> None:
        for dispatcher in list(self._dispatchers):
            running = [(lease, run) for lease, run in list(dispatcher.running.items())]
            hung = [lease for lease, run in running if run.until < now]
            for lease in hung:
                log.error("task %s on %s is past its limits; its lease is not renewed", lease.id, lease.endpoint)
            held = [lease for lease, run in running if run.until >= now] + list(dispatcher.settling)
            for batch in [held[i : i + BATCH] for i in range(0, len(held), BATCH)] or [[]]:
                words = self._store.run(
                    self._store.scripts.renew(
                        dispatcher.pool.name,
                        self._process,
                        list(dispatcher.workers),
                        batch,
                        lease=dispatcher.pool.queue.lease,
                    )
                )
                for lease, word in zip(batch, words, strict=True):
                    if word in ("lost", "canceled"):
                        self._on_lost(dispatcher, lease, word)

    # Sweeping: whoever takes the ticket

    def _sweep(self) -> None:
        for dispatcher in list(self._dispatchers):
            pool, queue = dispatcher.pool.name, dispatcher.pool.queue
            scripts = self._store.scripts
            if not self._store.run(scripts.ticket(pool, "sweep", self._process, seconds=SWEEP_S * 0.9)):
                continue
            self._until_done(scripts.promote(pool))
            self._until_done(scripts.expire(pool, result_ttl=queue.result_ttl))
            most, dead_ttl = queue.max_deliveries, queue.dead_letter_ttl
            reap = scripts.reap(pool, max_deliveries=most, dead_letter_ttl=dead_ttl, lease=queue.lease)
            found: Reaped = self._store.run(reap)
            if found.requeued or found.poisoned:
                log.warning("%s: %d leases expired, %d tasks are poison", pool, found.requeued, found.poisoned)

    # Scrubbing: whoever takes the ticket, one piece after the other

    def _begin_scrubs(self) -> None:
        for dispatcher in list(self._dispatchers):
            pool = dispatcher.pool.name
            scripts = self._store.scripts
            if pool not in self._scrubs and self._store.run(
                scripts.ticket(pool, "scrub", self._process, seconds=SCRUB_S)
            ):
                self._scrubs[pool] = SCRUB_START

    def _scrub(self) -> None:
        end = time.monotonic() + SCRUB_AT_ONCE_S
        for dispatcher in list(self._dispatchers):
            pool, queue = dispatcher.pool.name, dispatcher.pool.queue
            while (at := self._scrubs.get(pool)) is not None and time.monotonic() < end:
                del self._scrubs[pool]  # what fails is left to the next pass
                at = self._store.run(
                    self._store.scripts.scrub(pool, at, lease=queue.lease, dead_letter_ttl=queue.dead_letter_ttl)
                )
                if at.repairs:
                    log.warning("%s: scrub repaired %d; see the counters r_... of the pool", pool, at.repairs)
                if not at.done:
                    self._scrubs[pool] = at

    def _retire(self) -> None:
        """Pools that left the configuration, and hold nothing any more, leave Redis."""
        own = {dispatcher.pool.name for dispatcher in list(self._dispatchers)}
        for pool in pools(self._store):
            if pool not in own and self._store.run(self._store.scripts.retire(pool, away=AWAY_S)) == "retired":
                log.info("pool %s: nobody serves it and it holds nothing; it is forgotten", pool)

    def _until_done(self, command: Command[int]) -> None:
        for _ in range(100):
            if self._store.run(command) < BATCH:
                return

    # RQ's picture

    def tell_rq(self) -> None:
        """Writes `rq:worker:<name>` for each of our workers, as RQ's own workers do. Asks the server's time, too."""
        commands: list[tuple[Any, ...]] = [("TIME",)]
        for dispatcher in list(self._dispatchers):
            for endpoint in dispatcher.workers:
                commands += self._record(dispatcher, endpoint)
        try:
            asked = time.monotonic()
            self._clock.heard(self._store.pipelined(commands)[0], asked)
        except QueueFull as error:  # a picture for people; it must not stop who frees the memory
            log.debug("RQ's picture of the workers is not written: %s", error)

    def _record(self, dispatcher: Dispatcher, endpoint: str) -> list[tuple[Any, ...]]:
        keys, pool = self._store.keys, dispatcher.pool.name
        key = keys.worker(worker_name(self._process, endpoint))
        running = [lease for lease in list(dispatcher.running) if lease.endpoint == endpoint]
        counts: Counts = dispatcher.counts[endpoint]
        fields = {
            "birth": self._born,
            "last_heartbeat": utc(self._clock.now()),
            "queues": pool,
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "ip_address": "127.0.0.1",
            "version": __version__,
            "python_version": platform.python_version(),
            "state": "busy" if running else "idle",
            "current_job": running[0].id if running else "",
            "successful_job_count": counts.ok,
            "failed_job_count": counts.failed,
            "total_working_time": 0,
            LAG_FIELD: int(self._lag.worst() * 1000),
        }
        flat = [part for pair in fields.items() for part in pair]
        index = f"{key}:executions"  # rq 3 reads it for the running jobs
        commands: list[tuple[Any, ...]] = [
            ("HSET", key, *flat),
            ("EXPIRE", key, WORKER_TTL_S),
            ("SADD", keys.workers(), key),
            ("SADD", keys.workers(pool), key),
            ("DEL", index),
        ]
        if running:
            shown = [f"{lease.id}:{lease.token}" for lease in running[:SHOWN]]
            commands += [("SADD", index, *shown), ("EXPIRE", index, WORKER_TTL_S)]
            commands += self._executions(shown, worker_name(self._process, endpoint))
        return commands

    def _executions(self, shown: Sequence[str], worker: str) -> list[tuple[Any, ...]]:
        commands: list[tuple[Any, ...]] = []
        now = f"{self._clock.now():.3f}"
        for composite in shown:
            task_id, _, token = composite.partition(":")
            key = f"{self._store.keys.prefix}:execution:{composite}"
            fields = ("id", token, "job_id", task_id, "created_at", now, "last_heartbeat", now, "worker_name", worker)
            commands += [("HSET", key, *fields), ("EXPIRE", key, WORKER_TTL_S)]
        return commands

    def forget(self, pool: str, endpoints: Iterable[str]) -> None:
        """Takes workers that are no more out of RQ's list. What fails here, RQ cleans up itself."""
        try:
            self._store.pipelined([command for endpoint in endpoints for command in self._gone(pool, endpoint)])
        except BrokerError as error:
            log.debug("workers of %s: %s", pool, error)

    def _farewell(self) -> list[tuple[Any, ...]]:
        return [
            command
            for dispatcher in list(self._dispatchers)
            for endpoint in dispatcher.workers
            for command in self._gone(dispatcher.pool.name, endpoint)
        ]

    def _gone(self, pool: str, endpoint: str) -> list[tuple[Any, ...]]:
        keys = self._store.keys
        key = keys.worker(worker_name(self._process, endpoint))
        return [("SREM", keys.workers(), key), ("SREM", keys.workers(pool), key), ("DEL", key, f"{key}:executions")]


def worker_name(process: str, endpoint: str) -> str:
    """RQ's name for the worker that `process` attaches to `endpoint`."""
    return f"{process}.{endpoint}"
