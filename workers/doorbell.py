"""How an idle process hears of work without polling: its own doorbell, and one process's ear at the queue itself.

Our producers ring the doorbell of the process that should take a task. A plain RQ producer rings nothing: for those one
process per pool, whichever holds the ticket, waits at the queue, and at those of high and low priority, with a move
that moves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

from broker.errors import BrokerError
from broker.store import BLOCK_AT_MOST, AsyncStore

TICKET_S: Final = 8.0
PEEK_S: Final = 4.0  # shorter than the ticket
PLAIN_LISTS: Final = ("", "high", "low")

log = logging.getLogger("headrace.doorbell")


async def answer_doorbell(
    store: AsyncStore, process: str, on_work: Callable[[], None], on_cancel: Callable[[str, str], None]
) -> None:
    """Until canceled: `on_work()` when a task waits for us, `on_cancel(task id, token)` when one of ours ended."""
    key = store.keys.bell(process)
    while True:
        try:
            rung = await store.blocking("BLPOP", key, BLOCK_AT_MOST)
        except BrokerError as error:
            log.debug("doorbell: %s", error)
            await asyncio.sleep(random.uniform(0.2, 1.0))
            continue
        if not rung:
            continue
        message = rung[1].decode().split(" ")
        if message[0] == "cancel" and len(message) == 3:
            on_cancel(message[1], message[2])
        else:
            on_work()
            await asyncio.sleep(0)  # the claim goes out before we listen again


class Ear:
    """Waits at the lists of one pool for what plain RQ producers put there: one for each priority. Those of
    capabilities and of exclusions are headrace's own, whose producers ring."""

    def __init__(self, store: AsyncStore, pool: str, process: str, on_work: Callable[[], None]) -> None:
        self._store = store
        self._pool = pool
        self._process = process
        self._on_work = on_work
        self._empty = asyncio.Event()
        self._asking = asyncio.Lock()
        self._ours_until = 0.0  # by the event loop's clock, as is the next
        self._not_before = 0.0  # another process has the ticket

    def queue_is_empty(self) -> None:
        """Told by the claim that found nothing waiting: only then is there something to wait for."""
        self._empty.set()

    async def listen(self) -> None:
        """Until canceled."""
        keys = self._store.keys
        async with asyncio.TaskGroup() as group:
            for variant in PLAIN_LISTS:
                group.create_task(self._listen_at(keys.queue(self._pool, variant)))

    async def _listen_at(self, queue: str) -> None:
        """A move that moves nothing, so that no kill can lose what is heard."""
        while True:
            await self._empty.wait()
            try:
                if not await self._holds_ticket():
                    await asyncio.sleep(self._not_before - asyncio.get_running_loop().time())
                    continue
                if await self._store.blocking("BLMOVE", queue, queue, "RIGHT", "RIGHT", PEEK_S) is not None:
                    self._empty.clear()
                    self._on_work()
            except BrokerError as error:
                log.debug("ear at %s: %s", queue, error)
                await asyncio.sleep(random.uniform(0.2, 1.0))

    async def _holds_ticket(self) -> bool:
        """For one more peek. The lists are heard by one process, on one ticket."""
        scripts, clock = self._store.scripts, asyncio.get_running_loop().time
        async with self._asking:
            asked = clock()
            if asked < self._not_before:
                return False
            if asked + PEEK_S > self._ours_until:
                command = scripts.ticket(self._pool, "ear", self._process, seconds=TICKET_S, again=True)
                if await self._store.run(command):
                    self._ours_until = asked + TICKET_S
                else:
                    self._not_before = asked + random.uniform(TICKET_S / 2, TICKET_S)
                    return False
            return True
