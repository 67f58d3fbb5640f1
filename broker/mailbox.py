"""Where outcomes are waited for: one reply list and one blocked connection for all waiting callers of a broker."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Final

from broker.errors import BrokerError

MOST: Final = 100  # ids in one pop
BLOCK: Final = 5.0  # seconds; less than a store lets a command block
LEADS_FOR: Final = BLOCK + 2.0  # seconds from one pop to the next; who takes longer is gone, or Redis is


def mailbox_name() -> str:
    return f"b-{secrets.token_hex(8)}"


class Ticket:
    """One caller waiting in a thread for a message about one task."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self.thread = threading.get_ident()
        self.arrived = self.waits = False
        self.leads_until = 0.0  # by the monotonic clock
        self.bell: SimpleQueue[None] = SimpleQueue()  # an event, but one that no exception can leave locked

    def ring(self) -> None:
        self.arrived = True
        self.bell.put(None)


class Mailbox:
    """For threads. Whoever waits first pops for all; when it leaves, another takes over. No thread of its own.

    An exception out of a signal handler may keep a caller from clearing up: a leader leads for a time, and not if its
    thread is here again; a thread has one ticket. So what is left behind is taken over or overwritten.

    `pop(most, seconds)` takes ids from the reply list.
    """

    def __init__(self, pop: Callable[[int, float], list[str]]) -> None:
        self.name = mailbox_name()
        self._pop = pop
        self._lock = threading.Lock()
        self._tickets: dict[int, Ticket] = {}  # by thread
        self._leader: Ticket | None = None

    @contextmanager
    def expect(self, task_id: str) -> Iterator[Ticket]:
        """From here on a message about the task is kept for the ticket."""
        ticket = Ticket(task_id)
        with self._lock:
            self._tickets[ticket.thread] = ticket
        try:
            yield ticket
        finally:
            with self._lock:
                self._tickets.pop(ticket.thread, None)

    def wait(self, ticket: Ticket, seconds: float) -> bool:
        """Whether a message came. Each message is told once."""
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                arrived, ticket.arrived = ticket.arrived, False
                left = end - time.monotonic()
                ticket.waits = not arrived and left > 0
                if not ticket.waits:
                    return arrived
                leads = self._takes_lead(ticket)
            if not leads:
                with suppress(Empty):
                    ticket.bell.get(timeout=min(left, BLOCK))
                continue
            try:
                self._lead(ticket, end)
            finally:
                self._hand_over(ticket)

    def _takes_lead(self, ticket: Ticket) -> bool:
        now, leader = time.monotonic(), self._leader
        if leader is not None and leader.thread != ticket.thread and now < leader.leads_until:
            return False
        self._leader, ticket.leads_until = ticket, now + LEADS_FOR
        return True

    def _lead(self, ticket: Ticket, end: float) -> None:
        while not ticket.arrived and (left := end - time.monotonic()) > 0:
            ticket.leads_until = time.monotonic() + LEADS_FOR
            ids = set(self._pop(MOST, min(left, BLOCK)))
            with self._lock:
                for each in self._tickets.values():
                    if each.task_id in ids:
                        each.ring()

    def _hand_over(self, leader: Ticket) -> None:
        with self._lock:
            leader.waits = False
            if self._leader is leader:
                self._leader = None
            for ticket in self._tickets.values():
                if ticket.waits and not ticket.arrived:
                    ticket.bell.put(None)
                    return


class AsyncTicket:
    """One caller waiting on the loop."""

    def __init__(self) -> None:
        self.arrived = False
        self.wake = asyncio.Event()

    def ring(self) -> None:
        self.arrived = True
        self.wake.set()


class AsyncMailbox:
    """For one event loop. A task pops while anybody waits."""

    def __init__(self, pop: Callable[[int, float], Awaitable[list[str]]]) -> None:
        self.name = mailbox_name()
        self._pop = pop
        self._tickets: dict[str, list[AsyncTicket]] = {}
        self._pump: asyncio.Task[None] | None = None

    @contextmanager
    def expect(self, task_id: str) -> Iterator[AsyncTicket]:
        ticket = AsyncTicket()
        self._tickets.setdefault(task_id, []).append(ticket)
        try:
            yield ticket
        finally:
            self._tickets[task_id].remove(ticket)
            if not self._tickets[task_id]:
                del self._tickets[task_id]

    async def wait(self, ticket: AsyncTicket, seconds: float) -> bool:
        """Whether a message came; False also at once when Redis fails, for the caller to find out why."""
        if not ticket.arrived:
            if self._pump is None or self._pump.done():
                self._pump = asyncio.create_task(self._run())
            with suppress(TimeoutError):
                await asyncio.wait_for(ticket.wake.wait(), seconds)
        ticket.wake.clear()
        arrived, ticket.arrived = ticket.arrived, False
        return arrived

    async def _run(self) -> None:
        try:
            while self._tickets:
                for task_id in await self._pop(MOST, BLOCK):
                    for ticket in self._tickets.get(task_id, ()):
                        ticket.ring()
        except BrokerError:
            for tickets in self._tickets.values():
                for ticket in tickets:
                    ticket.wake.set()

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
