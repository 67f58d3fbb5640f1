"""The broker for Python programs: enqueue, wait, map. For threads; `broker.asyncclient` is the same with awaits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from tenacity import Retrying

from broker import core
from broker.asyncclient import AsyncBroker, AsyncTask
from broker.connection import LONG_PATIENCE, PATIENCE, Address, Turns, again
from broker.core import Core
from broker.errors import BrokerError, BrokerUnavailable, QueueFull, ResultTimeout, TaskFailed
from broker.flows import Ask, Await, Flow, Pop, Pull, Sleep, Step, run, run_step
from broker.mailbox import Mailbox, Ticket, mailbox_name
from broker.mapping import GATHER_S, Fallback, MapCall, Refused
from broker.producer import Item, check_timeout, make_options
from broker.store import Store, masked
from broker.task import Priority, Result, Work, check_pool, check_task_id

__all__ = ["AsyncBroker", "AsyncTask", "Broker", "Task"]

T = TypeVar("T")

class Task:
    """A task in a pool. `id` and `pool` are all it is: it may have been enqueued anywhere (see `Broker.task`)."""

    __slots__ = ("_broker", "id", "pool")

    def __init__(self, broker: Broker, pool: str, task_id: str) -> None:
        self._broker, self.pool, self.id = broker, pool, task_id

    def result(
        self,
        timeout: float | None = None,
        *,
        raise_on_failure: bool = True,
        raise_if_down: bool = False,
        fallback: Callable[[], Any] | None = None,
    ) -> Result:
        """Waits for the outcome.

        timeout           seconds; None waits as long as it takes
        raise_on_failure  False: a Result for every outcome
        raise_if_down     ResultTimeout as soon as no endpoint of the pool can take tasks (breakers open, none there)
        fallback          called when there is no success: the time is up, the task failed, or no endpoint can take it.
                          The task is canceled first. What it returns becomes `json()` of the result (bytes: `body`)

        Raises DeadLettered, Poisoned, Expired, Canceled; ResultTimeout (the task goes on); UnknownTask;
        BrokerUnavailable.
        """
        strict = raise_on_failure or fallback is not None
        try:
            result = self._broker._wait(self, check_timeout(timeout), raise_if_down or fallback is not None)
            if strict and not result.ok:
                raise core.failure(result)
            return result
        except (ResultTimeout, TaskFailed):
            if fallback is None:
                raise
        settled = self._broker._run(lambda flows: flows.give_up(self.pool, self.id))
        return settled or core.fallback_result(self.id, fallback())

    def status(self) -> str:
        """'queued', 'scheduled', 'started', or its outcome. Raises UnknownTask."""
        return self._broker._run(lambda flows: core.read_status(flows.keys, self.id))

    def cancel(self) -> bool:
        """Whether it is canceled. A running one's connection is closed; one that has another outcome keeps it."""
        return self._broker.cancel(self.pool, [self.id])[0]

    def __repr__(self) -> str:
        return f"Task({self.pool!r}, {self.id!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and (self.pool, self.id) == (other.pool, other.id)

    def __hash__(self) -> int:
        return hash((self.pool, self.id))


class _Link:
    """What one process has of the connection."""

    def __init__(self, store: Store) -> None:
        self.store, self.core = store, Core(store.scripts)
        self.mailbox = Mailbox(self._pop)
        self.turns = Turns()

    def _pop(self, most: int, seconds: float) -> list[str]:
        found: list[str] = run_step(self.store, Pop(self.mailbox_key, most, seconds))
        return found

    @property
    def mailbox_key(self) -> str:
        return self.store.keys.reply(self.mailbox.name)


class Broker:
    """Puts tasks on queues and waits for their results. For any number of threads, and for forked children.

    An exception that a signal handler raises ends the call it comes into, and harms no other. What that call had sent
    may have happened: a repeat with the same id or key is the same task.

    url     redis://, rediss:// or unix://; `embedded` starts (or finds) the server that belongs to a folder
    prefix  of all keys; None takes RQ_KEY_PREFIX, else `rq`
    folder  of the embedded server's data; None: `.headrace` in the working folder

    Connects at first use. A lost connection is tried again for some seconds; what was sent twice counts once. Limits
    (depth, payload) are those that the pool's workers registered, or the defaults.
    """

    def __init__(
        self, url: str = "embedded", *, prefix: str | None = None, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self._address, self._prefix = Address(url, folder), prefix
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._pid, self._closed = os.getpid(), False

    @classmethod
    def embedded(cls, folder: str | os.PathLike[str] | None = None) -> Broker:
        """On the server that belongs to `folder`, shared with every process that uses the same."""
        return cls("embedded", folder=folder)

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Broker({str(self._address)!r})"

    @property
    def store(self) -> Store:
        """The connection, for `broker.admin` and `broker.inspect`."""
        return self._connected().store

    def close(self) -> None:
        """Gives the connections back, and the share in an embedded server. Tasks go on."""
        link, self._link = self._link, None
        self._closed = True
        if self._pid != os.getpid():
            return
        if link is not None:
            with suppress(BrokerError):
                link.store.pipelined([("DEL", link.mailbox_key)])
            link.store.close()
        self._address.close()

    # Tasks

    def task(self, pool: str, task_id: str) -> Task:
        """A handle; nothing is asked of Redis."""
        return Task(self, check_pool(pool), check_task_id(task_id))

    def enqueue(
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
    ) -> Task:
        """Queues one task; the options are those of TaskOptions. A repeat with the same id or key is the same task.

        Raises InvalidTask, PayloadTooLarge, IdempotencyConflict, QueueFull, BrokerUnavailable.
        """
        options = make_options(id, idempotency_key, deadline, priority, requires, max_attempts, delay)
        return self.enqueue_many(pool, [(work, options)])[0]

    def enqueue_many(self, pool: str, works: Iterable[Item]) -> list[Task]:
        """Queues works, each alone or in a pair with its TaskOptions; 500 in one round trip. For millions: `map`.

        Everything is checked before anything is queued. Raises as `enqueue`; QueueFull has what was queued in `queued`.
        After an IdempotencyConflict, the works before it and up to 499 behind it are queued.
        """
        check_pool(pool)
        items = list(works)
        try:
            ids = self._run(lambda flows: flows.enqueue(pool, items))
        except QueueFull as error:
            raise QueueFull(str(error), [Task(self, pool, task_id) for task_id in error.queued]) from None
        return [Task(self, pool, task_id) for task_id in ids]

    def map(
        self,
        pool: str,
        works: Iterable[Item],
        *,
        window: int = 1000,
        ordered: bool = False,
        timeout: float | None = None,
        raise_on_failure: bool = False,
        on_refused: Refused | None = None,
        fallback: Fallback | None = None,
    ) -> Iterator[Result]:
        """Results as they come (`ordered`: in the order of the works), for any number of works in flat memory.

        window      most works taken from the iterable and not handed back as results
        timeout     seconds without a result until ResultTimeout; None waits
        on_refused  called with the work (or pair) and its error, which then has no result; without it the error
                    (InvalidTask, IdempotencyConflict) ends the call
        fallback    called with each work that got no success: its task failed, or no endpoint of the pool can take
                    tasks, which is looked at after 5 s without news (what is outstanding is canceled first). What it
                    returns becomes `json()` of the result (bytes: `body`), whose `endpoint` is ""

        A full pool is waited for. What Redis lost is sent again. Ending early, for whatever reason, cancels nothing.
        """
        call = MapCall(
            self._connected().core,
            check_pool(pool),
            mailbox_name(),
            window=window,
            ordered=ordered,
            timeout=check_timeout(timeout),
            raise_on_failure=raise_on_failure,
            on_refused=on_refused,
            fallback=fallback,
        )
        return self._map(call, iter(works))

    def cancel(self, pool: str, ids: Iterable[str]) -> list[bool]:
        """Whether each is canceled, in order."""
        wanted = [check_task_id(task_id) for task_id in ids]
        return self._run(lambda flows: flows.cancel(check_pool(pool), wanted))

    def discard(self, pool: str, ids: Iterable[str]) -> int:
        """Deletes tasks that have an outcome, and their results, before their time; returns how many."""
        wanted = [check_task_id(task_id) for task_id in ids]
        return self._run(lambda flows: core.discard(flows.scripts, check_pool(pool), wanted))

    # Driving

    def _connected(self) -> _Link:
        if self._pid != os.getpid():  # forked: the parent's sockets, lock and share are not ours
            self._pid, self._lock, self._link = os.getpid(), threading.Lock(), None
            self._address.after_fork()
        link = self._link
        if link is None:
            with self._lock:
                if self._closed:
                    raise BrokerError("the broker is closed; make a new one")
                if self._link is None:
                    self._link = self._connect()
                link = self._link
        return link

    def _connect(self) -> _Link:
        link = _Link(Store(self._address.connect(), prefix=self._prefix))
        try:
            self._drive(link, core.check_server(masked(link.store.url)), PATIENCE)
        except BaseException:
            link.store.close()
            raise
        return link

    def _run(self, make: Callable[[Core], Flow[T]]) -> T:
        link = self._connected()
        return self._drive(link, make(link.core), PATIENCE)

    def _wait(self, task: Task, timeout: float | None, raise_if_down: bool) -> Result:
        link = self._connected()
        patience = LONG_PATIENCE if timeout is None else min(timeout, LONG_PATIENCE)
        with link.mailbox.expect(task.id) as ticket:
            flow = core.wait_for_result(
                link.core.scripts, task.pool, task.id, link.mailbox.name, timeout, raise_if_down=raise_if_down
            )
            return self._drive(link, flow, patience, ticket)

    def _drive(self, link: _Link, flow: Flow[T], patience: float, ticket: Ticket | None = None) -> T:
        return run(flow, lambda step: self._perform(link, step, patience, ticket))

    def _perform(self, link: _Link, step: Step, patience: float, ticket: Ticket | None = None) -> Any:
        """The first try is bare; tenacity, which costs more than the whole call, comes in when it failed."""
        try:
            return _once(link, step, ticket)
        except BrokerUnavailable:
            for attempt in Retrying(**again(patience)):
                with attempt:
                    self._address.revive()
                    return _once(link, step, ticket)
        raise AssertionError("unreachable")

    def _map(self, call: MapCall, source: Iterator[Item]) -> Iterator[Result]:
        link = self._connected()
        flow = call.flow()
        reply: Any = None
        error: BrokerError | None = None
        try:
            while True:
                try:
                    step = flow.send(reply) if error is None else flow.throw(error)
                except StopIteration:
                    return
                reply, error = None, None
                if isinstance(step, Result):
                    yield step
                elif isinstance(step, Pull):
                    reply = _pull(source, step.most)
                elif isinstance(step, Ask):
                    reply = step.function(step.argument)
                else:
                    try:
                        reply = self._perform(link, step, LONG_PATIENCE)
                    except BrokerError as failed:
                        error = failed
        finally:
            with suppress(BrokerError):
                link.store.pipelined([("DEL", call.reply_key)])


def _once(link: _Link, step: Step, ticket: Ticket | None) -> Any:
    if isinstance(step, Sleep):
        time.sleep(step.seconds)
        return None
    if isinstance(step, Await):
        assert ticket is not None
        return link.mailbox.wait(ticket, step.seconds)
    if isinstance(step, Pop):
        return run_step(link.store, step)
    with link.turns.one():
        return run_step(link.store, step)


def _pull(source: Iterator[Item], most: int) -> tuple[list[Item], bool]:
    """Up to `most` works, fewer if the source is slow, and whether it is at its end."""
    items: list[Item] = []
    until = time.monotonic() + GATHER_S
    for item in source:
        items.append(item)
        if len(items) >= most or time.monotonic() >= until:
            return items, False
    return items, True
