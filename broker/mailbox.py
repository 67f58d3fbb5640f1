"""Where outcomes are waited for: one reply list and one blocked connection for all waiting callers of a broker."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, Protocol, TypeVar

from broker.errors import BrokerError

MOST: Final = 100  # ids in one pop
BLOCK: Final = 5.0  # seconds; less than a store lets a command block


W = TypeVar("W")


def mailbox_name() -> str:
    return f"b-{secrets.token_hex(8)}"


class _Waiter(Protocol):
    arrived: bool

    def ring(self) -> None: ...


class Ticket:
    """One caller waiting in a thread."""

    def __init__(self) -> None:
        self.arrived = self.waits = False
        self.wake = threading.Event()

    def ring(self) -> None:
        self.arrived = True
        self.wake.set()


class Mailbox:
    """For threads. Whoever waits first pops for all; when it leaves, another takes over. No thread of its own.

    `pop(most, seconds)` takes ids from the reply list.
    """

    def __init__(self, pop: Callable[[int, float], list[str]]) -> None:
        self.name = mailbox_name()
        self._pop = pop
        self._lock = threading.Lock()
        self._tickets: dict[str, list[Ticket]] = {}
        self._has_leader = False

    @contextmanager
    def expect(self, task_id: str) -> Iterator[Ticket]:
        """From here on a message about the task is kept for the ticket."""
        ticket = Ticket()
        with self._lock:
            self._tickets.setdefault(task_id, []).append(ticket)
        try:
            yield ticket
        finally:
            with self._lock:
                _forget(self._tickets, task_id, ticket)

    def wait(self, ticket: Ticket, seconds: float) -> bool:
        """Whether a message came. Each message is told once."""
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                arrived, ticket.arrived = ticket.arrived, False
                left = end - time.monotonic()
                ticket.wake.clear()
                ticket.waits = not arrived and left > 0
                if not ticket.waits:
                    return arrived
                leads, self._has_leader = not self._has_leader, True
            if not leads:
                ticket.wake.wait(left)
                continue
            try:
                self._lead(ticket, end)
            finally:
                self._hand_over(ticket)

    def _lead(self, ticket: Ticket, end: float) -> None:
        while not ticket.arrived and (left := end - time.monotonic()) > 0:
            ids = self._pop(MOST, min(left, BLOCK))
            with self._lock:
                _deliver(self._tickets, ids)

    def _hand_over(self, leader: Ticket) -> None:
        with self._lock:
            self._has_leader = leader.waits = False
            for tickets in self._tickets.values():
                for ticket in tickets:
                    if ticket.waits and not ticket.arrived:
                        ticket.wake.set()
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
            _forget(self._tickets, task_id, ticket)

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
                _deliver(self._tickets, await self._pop(MOST, BLOCK))
        except BrokerError:
            for tickets in self._tickets.values():
                for ticket in tickets:
                    ticket.wake.set()

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)


def _deliver(tickets: Mapping[str, Sequence[_Waiter]], ids: Sequence[str]) -> None:
    for task_id in ids:
        for ticket in tickets.get(task_id, ()):
            ticket.ring()


def _forget(tickets: dict[str, list[W]], task_id: str, ticket: W) -> None:
    tickets[task_id].remove(ticket)
    if not tickets[task_id]:
        del tickets[task_id]
