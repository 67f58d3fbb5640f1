"""Checks of endpoints: in the background, side by side, on connections of their own; and before an idle endpoint's
first task. One process does each check: whoever takes the ticket.

A check looks at `GET path`. An endpoint that answers without having such a route is healthy: it answers. A probe, where
the configuration has one, is a real small request besides: a server may look healthy while inference hangs.
A failed check never opens a breaker, a good one never closes it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Final

from broker.configmodel import Endpoint, Pool
from broker.errors import BrokerError
from broker.store import AsyncStore
from broker.task import Request
from workers.adapters import Adapter, make_adapter
from workers.dispatch import Dispatcher
from workers.echoes import Echoes
from workers.errors import AttemptFailed
from workers.transport import make_transport
from workers.transport.types import Timeouts, Transport

NO_SUCH_ROUTE: Final = frozenset({404, 405, 501})
BACKOFF: Final = (1, 2, 4, 8)  # intervals until the next check, by failures in a row
JITTER: Final = 0.1
LOOKS_PER_INTERVAL: Final = 6
ANSWER_LIMIT: Final = 65_536  # bytes

log = logging.getLogger("headrace.health")


class Checker:
    """Checks the endpoints that this process serves in one pool, whichever these are at the time."""

    def __init__(self, store: AsyncStore, process: str, dispatcher: Dispatcher) -> None:
        self._store = store
        self._process = process
        self._dispatcher = dispatcher
        self._ways: dict[str, tuple[Endpoint, Adapter, Transport]] = {}
        self._under_way: set[str] = set()
        self._warned: set[str] = set()  # endpoints that were down at their first check: said once, loudly
        self._tasks: set[asyncio.Task[None]] = set()
        dispatcher.on_stale = self._soon

    @property
    def _pool(self) -> Pool:
        return self._dispatcher.pool

    async def run(self) -> None:
        """Until canceled: a look at every ticket a few times an interval, and a check where it is due."""
        while True:
            await self.look()
            await asyncio.sleep(random.uniform(0.8, 1.2) * self._pool.health.interval / LOOKS_PER_INTERVAL)

    async def look(self) -> None:
        """Checks what is due, side by side."""
        if not self._pool.health.enabled:
            return
        try:
            await asyncio.gather(*(self._check_if_due(endpoint) for endpoint in list(self._dispatcher.workers)))
        except BrokerError as error:
            log.debug("health of %s: %s", self._pool.name, error)

    def _soon(self, endpoints: Sequence[str]) -> None:
        """Tasks wait for these."""
        task = asyncio.create_task(self._check_now(endpoints))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check_now(self, endpoints: Sequence[str]) -> None:
        async def one(endpoint: str) -> None:
            if await self._takes_ticket(endpoint, "check", self._pool.health.timeout + 1.0):
                await self._check(endpoint)
                self._dispatcher.wake()

        try:
            await asyncio.gather(*(one(endpoint) for endpoint in endpoints if endpoint not in self._under_way))
        except BrokerError as error:
            log.debug("health of %s: %s", self._pool.name, error)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, _, transport in self._ways.values():
            await transport.aclose()

    # One endpoint

    async def _check_if_due(self, endpoint: str) -> None:
        health = self._pool.health
        if not await self._takes_ticket(endpoint, "health", 2 * health.timeout + 1.0):
            return
        await self._check(endpoint)
        # How long the ticket lasts depends on what was found, by all processes together.
        key = self._store.keys.endpoint(self._pool.name, endpoint)
        (fails,) = await self._store.pipelined([("HGET", key, "health_fails")])
        backoff = BACKOFF[min(int(fails or 0), len(BACKOFF) - 1)]
        wait = health.interval * backoff * random.uniform(1 - JITTER, 1 + JITTER)
        ticket = self._store.keys.ticket(self._pool.name, f"health.{endpoint}")
        await self._store.pipelined([("PEXPIRE", ticket, round(wait * 1000))])

    async def _takes_ticket(self, endpoint: str, duty: str, seconds: float) -> bool:
        ticket = self._store.scripts.ticket(self._pool.name, f"{duty}.{endpoint}", self._process, seconds=seconds)
        return await self._store.run(ticket)

    async def _check(self, endpoint: str) -> None:
        worker = self._dispatcher.workers.get(endpoint)
        if worker is None:  # removed meanwhile
            return
        self._under_way.add(endpoint)
        try:
            detail = await self._complaint(worker.endpoint)
        finally:
            self._under_way.discard(endpoint)
        ok = not detail
        word = await self._store.run(self._store.scripts.health(self._pool.name, endpoint, ok, detail or "healthy"))
        if not ok:
            first = word == "down" and endpoint not in self._warned
            self._warned.add(endpoint)
            level = logging.WARNING if first else logging.DEBUG
            log.log(level, "endpoint %s: health check failed: %s; no tasks until one succeeds", endpoint, detail)
        elif word == "recovered":
            log.info("endpoint %s: healthy again", endpoint)

    async def _complaint(self, endpoint: Endpoint) -> str:
        """What is wrong, in one line; "" if nothing."""
        health = self._pool.health
        try:
            answer = await self._send(endpoint, Request("GET", health.path))
            if not 200 <= answer < 300 and answer not in NO_SUCH_ROUTE:
                return f"GET {health.path} answered {answer}"
            if health.probe is not None:
                answer = await self._send(endpoint, health.probe)
                if not 200 <= answer < 300:
                    return f"probe {health.probe.method} {health.probe.path} answered {answer}"
        except AttemptFailed as failure:
            return Echoes(endpoint).text(str(failure))
        return ""

    async def _send(self, endpoint: Endpoint, request: Request) -> int:
        """The status. Raises AttemptFailed."""
        known, adapter, transport = self._ways.get(endpoint.id, (None, None, None))
        if known != endpoint or adapter is None or transport is None:
            if transport is not None:
                await transport.aclose()
            adapter = make_adapter(endpoint, self._pool)
            transport = make_transport(self._pool.connection.transport, slots=2)
            self._ways[endpoint.id] = (endpoint, adapter, transport)
        limit = self._pool.health.timeout
        call = adapter.call(request, f"health-{endpoint.id}", 1)
        call = call._replace(timeouts=Timeouts(limit, limit, limit, limit), max_bytes=ANSWER_LIMIT)
        return (await transport.send(call)).status
