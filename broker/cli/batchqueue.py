"""The queue as a batch run sees it: send tasks, hear of outcomes, read them, drop them once they stand written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar, cast

from broker import core, flows, producer
from broker.batch import BatchTask, custom_id_key
from broker.errors import BrokerUnavailable
from broker.inspect import EndpointStatus, endpoint_states
from broker.outcome import FIELDS, read_result
from broker.registered import registered_key
from broker.scripts import BATCH, NewTask
from broker.store import AsyncStore
from broker.task import Result, TaskOptions

T = TypeVar("T")

PATIENCE_S: Final = 120.0  # without Redis, before a run gives up
FIRST_WAIT_S: Final = 0.1
LONGEST_WAIT_S: Final = 2.0
HEAR_AT_ONCE: Final = 500

Word = Literal["queued", "already", "full", "conflict"]


@dataclass(frozen=True, slots=True)
class Sending:
    """A line's task, encoded; its body is not kept beside that. `digest` is the line's."""

    number: int
    custom_id: str
    digest: str
    task: NewTask

    @property
    def id(self) -> str:
        return self.task.id

    @property
    def size(self) -> int:
        return len(self.task.data)


class BatchQueue:
    """One batch on one pool. `batch` is part of every task's id, so the same line sent again is the same task.

    own    the pool exists for this batch alone, and goes with it
    mend   called when Redis cannot be reached, before it is tried again (the embedded server is started again by it)
    said   told once per outage, in one line

    Everything raises BrokerError; BrokerUnavailable only after two minutes of trying.
    """

    def __init__(
        self,
        store: AsyncStore,
        pool: str,
        batch: str,
        *,
        own: bool,
        limits: producer.PoolLimits,
        max_attempts: int | None = None,
        mend: Callable[[], None] = lambda: None,
        said: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.store, self.pool, self.batch, self.own = store, pool, batch, own
        self._limits, self._max_attempts = limits, max_attempts
        self._mend, self._said = mend, said
        self._reply = f"run-{batch}"

    def encode(self, line: BatchTask) -> Sending:
        """Raises InvalidTask: too large, or nested too deeply."""
        options = TaskOptions(id=self.task_id(line.custom_id), max_attempts=self._max_attempts)
        task = producer.prepare(self.pool, (line.work, options), self._limits, self._reply)
        return Sending(line.number, line.custom_id, line.digest, task)

    def task_id(self, custom_id: str) -> str:
        return f"{self.batch}-{custom_id_key(custom_id).hex()}"

    async def send(self, tasks: Sequence[NewTask]) -> list[Word]:
        """A word a task. Harmless to repeat: the ids are ours. Raises QueueFull when Redis' memory is full."""
        commands = [self.store.scripts.enqueue(self.pool, chunk) for chunk in producer.chunks(tasks)]
        replies = await self._step(flows.Call(commands))
        return [cast(Word, each.word) for reply in replies for each in reply]

    async def hear(self, seconds: float) -> list[str]:
        """Ids of tasks that got their outcome, [] after `seconds` (below 10) of silence."""
        heard: list[str] = await self._step(flows.Pop(self.store.keys.reply(self._reply), HEAR_AT_ONCE, seconds))
        return heard

    async def watch(self, ids: Sequence[str]) -> list[str]:
        """A word a task: settled, watching, unknown."""
        watch = self.store.scripts.watch
        replies = await self._step(
            flows.Call([watch(self.pool, self._reply, chunk) for chunk in flows.in_batches(ids, BATCH)])
        )
        return [word for reply in replies for word in reply]

    async def read(self, ids: Sequence[str]) -> list[Result | None]:
        """Their outcomes; None where there is none."""
        rows = await self._plain([("HMGET", self.store.keys.job(each), *FIELDS) for each in ids])
        return [read_result(each, row) for each, row in zip(ids, rows, strict=True)]

    async def cancel(self, ids: Sequence[str]) -> None:
        await self._drive(core.cancel(self.store.scripts, self.pool, ids, self._limits.result_ttl))

    async def forget(self, ids: Sequence[str]) -> None:
        """Drops tasks that have an outcome."""
        await self._drive(core.discard(self.store.scripts, self.pool, ids))

    async def failures(self) -> dict[str, int]:
        """Failed attempts so far, by endpoint."""
        return {each.id: each.failed for each in await self.endpoints()}

    async def endpoints(self) -> tuple[EndpointStatus, ...]:
        _, found = await self._drive(endpoint_states(self.store.keys, self.pool))
        return found

    async def close_batch(self) -> None:
        """The batch is complete: its reply list goes, and every key of a pool of its own (nobody serves it by now)."""
        await self._plain([("UNLINK", self.store.keys.reply(self._reply))])
        if self.own:
            await self._remove_pool()

    async def abandon(self, ids: Sequence[str]) -> None:
        """The batch is given up: its tasks are canceled and dropped, then as `close_batch`."""
        await self.store.settle()  # or what a canceled call still sends would come behind
        await self.cancel(ids)
        await self.forget(ids)
        await self.close_batch()

    async def _remove_pool(self) -> None:
        keys, pool = self.store.keys, self.pool
        endpoints = [each.id for each in await self.endpoints()]
        variants, workers = await self._plain([("SMEMBERS", keys.lists(pool)), ("SMEMBERS", keys.workers(pool))])
        queues = [keys.queue(pool), *(keys.queue(pool, each.decode()) for each in variants)]
        registries = [keys.registry(name, pool) for name in ("finished", "failed", "canceled", "wip", "scheduled")]
        found = await self._plain(
            [*(("LRANGE", key, 0, -1) for key in queues), *(("ZRANGE", key, 0, -1) for key in registries)]
        )
        ids = {each.decode().partition(":")[0] for members in found for each in members}
        for some in flows.in_batches(sorted(ids)):
            await self._plain([("UNLINK", *(key for each in some for key in (keys.job(each), keys.results(each))))])
        gone = [
            keys.pool(pool), keys.lists(pool), keys.endpoints(pool), keys.deadlines(pool), keys.waiting(pool),
            keys.ghosts(pool), keys.workers(pool), registered_key(keys, pool), *queues, *registries,
            *(key for each in endpoints for key in (keys.endpoint(pool, each), keys.slots(pool, each))),
        ]  # fmt: skip
        await self._plain(
            [
                ("UNLINK", *gone), ("SREM", keys.queues(), *queues), ("SREM", keys.pools(), pool),
                *(("SREM", keys.workers(), each) for each in workers),
            ]
        )  # fmt: skip

    async def close(self) -> None:
        await self.store.close()

    # Every step here may be repeated: a lost reply costs a look at the tasks, never a task.

    async def _drive(self, flow: flows.Flow[T]) -> T:
        reply: Any = None
        while True:
            try:
                step = flow.send(reply)
            except StopIteration as end:
                value: T = end.value
                return value
            reply = await self._step(step)

    async def _plain(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        replies: list[Any] = await self._step(flows.Plain(commands))
        return replies

    async def _step(self, step: flows.Step) -> Any:
        return await self._patiently(lambda: flows.run_step_async(self.store, step))

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        wait, began = FIRST_WAIT_S, time.monotonic()
        while True:
            try:
                return await call()
            except BrokerUnavailable as error:
                if time.monotonic() - began > PATIENCE_S:
                    raise
                if wait == FIRST_WAIT_S:
                    self._said(f"{error}; trying again for {PATIENCE_S:g} s")
            await asyncio.sleep(wait)
            wait = min(wait * 2, LONGEST_WAIT_S)
            await asyncio.to_thread(self._mend)
