"""The broker for asyncio. What it does stands in `core` and `mapping`; what the arguments mean, in `broker.client`."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from tenacity import AsyncRetrying

from broker import core
from broker.connection import AT_ONCE, LONG_PATIENCE, PATIENCE, Address, again
from broker.core import Core
from broker.errors import BrokerError, BrokerUnavailable, QueueFull, ResultTimeout, TaskFailed
from broker.flows import Ask, Await, Flow, Pop, Pull, Sleep, Step, run_step_async
from broker.mailbox import AsyncMailbox, AsyncTicket, mailbox_name
from broker.mapping import GATHER_S, Fallback, MapCall, Refused
from broker.producer import Item, check_timeout, make_options
from broker.store import AsyncStore, masked
from broker.task import Priority, Result, Work, check_pool, check_task_id

T = TypeVar("T")


class AsyncTask:
    """A task in a pool, as `broker.Task`."""

    __slots__ = ("_broker", "id", "pool")

    def __init__(self, broker: AsyncBroker, pool: str, task_id: str) -> None:
        self._broker, self.pool, self.id = broker, pool, task_id

    async def result(
        self,
        timeout: float | None = None,
        *,
        raise_on_failure: bool = True,
        raise_if_down: bool = False,
        fallback: Callable[[], Any | Awaitable[Any]] | None = None,
    ) -> Result:
        """Waits for the outcome, as `Task.result`. Being canceled cancels the waiting, not the task."""
        strict = raise_on_failure or fallback is not None
        try:
            result = await self._broker._wait(self, check_timeout(timeout), raise_if_down or fallback is not None)
            if strict and not result.ok:
                raise core.failure(result)
            return result
        except (ResultTimeout, TaskFailed):
            if fallback is None:
                raise
        settled = await self._broker._run(lambda flows: flows.give_up(self.pool, self.id))
        if settled is not None:
            return settled
        value = fallback()
        return core.fallback_result(self.id, await value if inspect.isawaitable(value) else value)

    async def status(self) -> str:
        """'queued', 'scheduled', 'started', or its outcome. Raises UnknownTask."""
        return await self._broker._run(lambda flows: core.read_status(flows.keys, self.id))

    async def cancel(self) -> bool:
        """Whether it is canceled."""
        return (await self._broker.cancel(self.pool, [self.id]))[0]

    def __repr__(self) -> str:
        return f"AsyncTask({self.pool!r}, {self.id!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsyncTask) and (self.pool, self.id) == (other.pool, other.id)

    def __hash__(self) -> int:
        return hash((self.pool, self.id))


class _Link:
    """What one event loop has of the connection."""

    def __init__(self, store: AsyncStore) -> None:
        self.store, self.core = store, Core(store.scripts)
        self.mailbox = AsyncMailbox(self._pop)
        self.turns = asyncio.Semaphore(AT_ONCE)

    async def _pop(self, most: int, seconds: float) -> list[str]:
        found: list[str] = await run_step_async(self.store, Pop(self.mailbox_key, most, seconds))
        return found

    @property
    def mailbox_key(self) -> str:
        return self.store.keys.reply(self.mailbox.name)


class AsyncBroker:
    """As `Broker`, for one event loop: connects in the loop that first uses it."""

    def __init__(
        self, url: str = "embedded", *, prefix: str | None = None, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self._address, self._prefix = Address(url, folder), prefix
        self._lock = asyncio.Lock()
        self._link: _Link | None = None
        self._pid, self._closed = os.getpid(), False

    @classmethod
    def embedded(cls, folder: str | os.PathLike[str] | None = None) -> AsyncBroker:
        """On the server that belongs to `folder`, shared with every process that uses the same."""
        return cls("embedded", folder=folder)

    async def __aenter__(self) -> AsyncBroker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncBroker({str(self._address)!r})"

    async def close(self) -> None:
        """Gives the connections back, and the share in an embedded server. Tasks go on."""
        link, self._link = self._link, None
        self._closed = True
        if self._pid != os.getpid():
            return
        if link is not None:
            await link.mailbox.close()
            with suppress(BrokerError):
                await link.store.pipelined([("DEL", link.mailbox_key)])
            await link.store.close()
        await asyncio.to_thread(self._address.close)

    # Tasks

    def task(self, pool: str, task_id: str) -> AsyncTask:
        """A handle; nothing is asked of Redis."""
        return AsyncTask(self, check_pool(pool), check_task_id(task_id))

    async def enqueue(
        self,
        pool: str,
        work: Work,
        *,
        id: str | None = None,
        idempotency_key: str | None = None,
        deadline: float | None = None,
        priority: Priority | None = None,
        requires: Iterable[str] = (),
        max_attempts: int | None = None,
        delay: float | None = None,
    ) -> AsyncTask:
        """As `Broker.enqueue`."""
        options = make_options(id, idempotency_key, deadline, priority, requires, max_attempts, delay)
        return (await self.enqueue_many(pool, [(work, options)]))[0]

    async def enqueue_many(self, pool: str, works: Iterable[Item]) -> list[AsyncTask]:
        """As `Broker.enqueue_many`."""
        check_pool(pool)
        items = list(works)
        try:
            ids = await self._run(lambda flows: flows.enqueue(pool, items))
        except QueueFull as error:
            raise QueueFull(str(error), [AsyncTask(self, pool, task_id) for task_id in error.queued]) from None
        return [AsyncTask(self, pool, task_id) for task_id in ids]

    async def map(
        self,
        pool: str,
        works: Iterable[Item] | AsyncIterable[Item],
        *,
        window: int = 1000,
        ordered: bool = False,
        timeout: float | None = None,
        raise_on_failure: bool = False,
        on_refused: Refused | None = None,
        fallback: Fallback | None = None,
    ) -> AsyncIterator[Result]:
        """As `Broker.map`. `works` may be asynchronous; while the next one is awaited, no result is handed on.

        What `fallback` returns is awaited if it can be.
        """
        link = await self._connected()
        call = MapCall(
            link.core,
            check_pool(pool),
            mailbox_name(),
            window=window,
            ordered=ordered,
            timeout=check_timeout(timeout),
            raise_on_failure=raise_on_failure,
            on_refused=on_refused,
            fallback=fallback,
        )
        flow, reply, error = call.flow(), None, None
        source = aiter(works) if isinstance(works, AsyncIterable) else iter(works)
        try:
            while True:
                try:
                    step = flow.send(reply) if error is None else flow.throw(error)
                except StopIteration:
                    return
                reply, error = None, None
                if isinstance(step, Result):
                    yield step
                    continue
                if isinstance(step, Pull):
                    reply = await _pull(source, step)
                    continue
                if isinstance(step, Ask):
                    value = step.function(step.argument)
                    reply = await value if inspect.isawaitable(value) else value
                    continue
                try:
                    reply = await self._perform(link, step, LONG_PATIENCE)
                except BrokerError as failed:
                    error = failed
        finally:
            with suppress(BrokerError):
                await link.store.pipelined([("DEL", call.reply_key)])

    async def cancel(self, pool: str, ids: Iterable[str]) -> list[bool]:
        """Whether each is canceled, in order."""
        wanted = [check_task_id(task_id) for task_id in ids]
        return await self._run(lambda flows: flows.cancel(check_pool(pool), wanted))

    async def discard(self, pool: str, ids: Iterable[str]) -> int:
        """Deletes tasks that have an outcome, and their results, before their time; returns how many."""
        wanted = [check_task_id(task_id) for task_id in ids]
        return await self._run(lambda flows: core.discard(flows.scripts, check_pool(pool), wanted))

    # Driving

    async def _connected(self) -> _Link:
        if self._pid != os.getpid():
            self._pid, self._lock, self._link = os.getpid(), asyncio.Lock(), None
            self._address.after_fork()
        if self._link is None:
            async with self._lock:
                if self._closed:
                    raise BrokerError("the broker is closed; make a new one")
                if self._link is None:
                    self._link = await self._connect()
        return self._link

    async def _connect(self) -> _Link:
        url = await asyncio.to_thread(self._address.connect)
        link = _Link(AsyncStore(url, prefix=self._prefix))
        try:
            await self._drive(link, core.check_server(masked(url)), PATIENCE)
        except BaseException:
            await link.store.close()
            raise
        return link

    async def _run(self, make: Callable[[Core], Flow[T]]) -> T:
        link = await self._connected()
        return await self._drive(link, make(link.core), PATIENCE)

    async def _wait(self, task: AsyncTask, timeout: float | None, raise_if_down: bool) -> Result:
        link = await self._connected()
        patience = LONG_PATIENCE if timeout is None else min(timeout, LONG_PATIENCE)
        with link.mailbox.expect(task.id) as ticket:
            flow = core.wait_for_result(
                link.core.scripts, task.pool, task.id, link.mailbox.name, timeout, raise_if_down=raise_if_down
            )
            return await self._drive(link, flow, patience, ticket)

    async def _drive(self, link: _Link, flow: Flow[T], patience: float, ticket: AsyncTicket | None = None) -> T:
        reply: Any = None
        error: BrokerError | None = None
        while True:
            try:
                step = flow.send(reply) if error is None else flow.throw(error)
            except StopIteration as end:
                value: T = end.value
                return value
            reply, error = None, None
            try:
                reply = await self._perform(link, step, patience, ticket)
            except BrokerError as failed:
                error = failed

    async def _perform(self, link: _Link, step: Step, patience: float, ticket: AsyncTicket | None = None) -> Any:
        try:
            return await _once(link, step, ticket)
        except BrokerUnavailable:
            async for attempt in AsyncRetrying(**again(patience)):
                with attempt:
                    await asyncio.to_thread(self._address.revive)
                    return await _once(link, step, ticket)
        raise AssertionError("unreachable")


async def _once(link: _Link, step: Step, ticket: AsyncTicket | None) -> Any:
    if isinstance(step, Sleep):
        return await asyncio.sleep(step.seconds)
    if isinstance(step, Await):
        assert ticket is not None
        return await link.mailbox.wait(ticket, step.seconds)
    if isinstance(step, Pop):
        return await run_step_async(link.store, step)
    async with link.turns:
        return await run_step_async(link.store, step)


async def _pull(source: Iterator[Item] | AsyncIterator[Item], step: Pull) -> tuple[list[Item], bool]:
    """Up to `most` works, fewer if the source is slow, and whether it is at its end."""
    items: list[Item] = []
    until = time.monotonic() + GATHER_S
    while len(items) < step.most and time.monotonic() < until:
        try:
            items.append(await anext(source) if isinstance(source, AsyncIterator) else next(source))
        except (StopIteration, StopAsyncIteration):
            return items, True
    return items, False
