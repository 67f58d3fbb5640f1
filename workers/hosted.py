"""One pool in one process: its workers, and the loops that serve it. Both may change while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from broker.configmodel import Endpoint, Pool
from broker.errors import BrokerError
from broker.store import AsyncStore
from workers.clock import ServerClock
from workers.dispatch import Dispatcher
from workers.doorbell import Ear
from workers.health import Checker
from workers.policies import most_slots
from workers.reload import worker_changes
from workers.transport import make_transport
from workers.worker import Worker

MOST_IN_FLIGHT: Final = 2000  # attempts of one pool in one process
LEAVE_S: Final = 5.0

log = logging.getLogger("headrace.process")


class HostedPool:
    """`start`; then `change` and `leave` as the configuration does; `close` once `loop` has ended."""

    def __init__(
        self,
        store: AsyncStore,
        process: str,
        pool: Pool,
        endpoints: Sequence[Endpoint],
        sharers: Mapping[str, int],
        clock: ServerClock,
        *,
        burst: bool = False,
    ) -> None:
        self._store, self._clock = store, clock
        workers = [_worker(endpoint, pool, clock) for endpoint in endpoints]
        _share(workers, sharers)
        self.dispatcher = Dispatcher(store, process, workers, most=MOST_IN_FLIGHT, burst=burst)
        self.checker = Checker(store, process, self.dispatcher)
        self._ear = Ear(store, pool.name, process, self.dispatcher.wake)
        self.dispatcher.on_idle = self._ear.queue_is_empty
        self._background: list[asyncio.Task[None]] = []
        self.loop: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def name(self) -> str:
        return self.dispatcher.pool.name

    @property
    def leaving(self) -> bool:
        return not self.dispatcher.claiming

    def start(self) -> None:
        """`loop` ends when it was told to leave and everything is settled, or with a burst when nothing waits."""
        self._background = [asyncio.create_task(self._ear.listen()), asyncio.create_task(self.checker.run())]
        self.loop = asyncio.create_task(self.dispatcher.run())

    def change(self, pool: Pool, endpoints: Sequence[Endpoint], sharers: Mapping[str, int]) -> tuple[str, ...]:
        """From the next claim on it serves these, by these rules; what runs ends where it began. Gives who is gone."""
        now = self.dispatcher.workers
        changes = worker_changes(self.dispatcher.pool, [worker.endpoint for worker in now.values()], pool, endpoints)
        workers: list[Worker] = []
        for endpoint in endpoints:
            if endpoint.id in changes.kept:
                workers.append(now[endpoint.id])
            elif endpoint.id in changes.replaced:
                workers.append(Worker(endpoint, pool, now[endpoint.id].transport, wall=self._clock.now))
            else:
                workers.append(_worker(endpoint, pool, self._clock))
        _share(workers, sharers)
        self.dispatcher.attach(pool, workers)
        return changes.removed

    async def leave(self) -> None:
        """Claims no more, and nobody waits for it."""
        self.dispatcher.stop_claiming()
        try:
            leaving = self._store.run(self._store.scripts.leave(self.name, self.dispatcher.process))
            await asyncio.wait_for(leaving, LEAVE_S)
        except (BrokerError, TimeoutError) as error:
            log.debug("leaving %s: %s", self.name, error)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.checker.aclose()
        await self.dispatcher.aclose()


def _worker(endpoint: Endpoint, pool: Pool, clock: ServerClock) -> Worker:
    connection = pool.connection
    transport = make_transport(connection.transport, slots=most_slots(endpoint), idle_discard=connection.idle_discard)
    return Worker(endpoint, pool, transport, wall=clock.now)


def _share(workers: Sequence[Worker], sharers: Mapping[str, int]) -> None:
    """Idle connections of all processes together must not be more than the endpoint has slots."""
    for worker in workers:
        worker.transport.keep = most_slots(worker.endpoint) // sharers.get(worker.endpoint.id, 1)
