"""What a client does, as flows: enqueue, wait for a result, cancel, discard."""

from __future__ import annotations

import json
import logging
import time
from base64 import b64decode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from broker import producer
from broker.errors import (
    BrokerError,
    BrokerUnsuitable,
    Canceled,
    DeadLettered,
    Expired,
    Poisoned,
    QueueFull,
    ResultTimeout,
    TaskFailed,
    UnknownTask,
)
from broker.fields import as_headers, as_number, as_object, as_status, as_text
from broker.flows import Await, Call, Flow, Made, Plain, Stream, in_batches
from broker.inspect import pool_names, why_down
from broker.keys import Keys
from broker.outcome import FIELDS, read_result
from broker.producer import Checked, Item, PoolLimits
from broker.rqjob import rq_why
from broker.scripts import ENQUEUE_PART, Command, Enqueued, NewTask, Scripts
from broker.store import unsuitable
from broker.task import Result, new_task_id

SILENCE: Final = 5.0  # seconds without news after which a task is looked at: its message may be lost
LIMITS_FOR: Final = 10.0  # seconds for which a pool's limits are remembered
MOST_NAMED: Final = 8  # pools in a warning

log = logging.getLogger("headrace.client")


class Core:
    """The flows of one client. Several threads may use one."""

    def __init__(self, scripts: Scripts) -> None:
        self.scripts, self.keys = scripts, scripts.keys
        self._limits: dict[str, tuple[float, PoolLimits]] = {}
        self._looked_for: set[str] = set()

    def limits(self, pool: str) -> Flow[PoolLimits]:
        until, known = self._limits.get(pool, (0.0, PoolLimits()))
        if time.monotonic() >= until:
            known = yield from pool_limits(self.keys, pool)
            self._limits[pool] = (time.monotonic() + LIMITS_FOR, known)
            if pool not in self._looked_for:
                yield from self._look_for(pool)
        return known

    def _look_for(self, pool: str) -> Flow[None]:
        """Tells, once, of a pool that no worker has registered while there are others: it may be a slip of the pen."""
        names = yield from pool_names(self.keys)
        if not names:  # workers may be about to start
            return
        self._looked_for.add(pool)
        if pool not in names:
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            log.warning(
                "pool %r: no worker has registered it, its tasks wait until one does; registered: %s%s",
                pool, ", ".join(names[:MOST_NAMED]), more,
            )  # fmt: skip

    def enqueue(self, pool: str, items: Sequence[Item]) -> Flow[list[str]]:
        """Everything is checked before anything is queued. The ids, in order."""
        limits = yield from self.limits(pool)
        checked = [producer.check(item, limits) for item in items]
        return (yield from enqueue(self.scripts, pool, checked, limits))

    def cancel(self, pool: str, ids: Sequence[str]) -> Flow[list[bool]]:
        limits = yield from self.limits(pool)
        return (yield from cancel(self.scripts, pool, ids, limits.result_ttl))

    def give_up(self, pool: str, task_id: str) -> Flow[Result | None]:
        """Cancels the task, so that it does not run beside its fallback. Its result if it was ok just before."""
        yield from self.cancel(pool, [task_id])
        try:
            result = yield from fetch(self.keys, task_id)
        except UnknownTask:
            return None
        return result if result is not None and result.ok else None


def check_server(shown: str) -> Flow[None]:
    """Raises BrokerUnsuitable for a server that would lose tasks. `shown`: its address without password."""
    (info,) = yield Plain([("INFO",)])
    if complaint := unsuitable(info, shown):
        raise BrokerUnsuitable(f"Redis at {shown}: {complaint}")


def pool_limits(keys: Keys, pool: str) -> Flow[PoolLimits]:
    (values,) = yield Plain([("HMGET", keys.pool(pool), *PoolLimits.FIELDS)])
    return PoolLimits.read(values)


def enqueue(scripts: Scripts, pool: str, works: Sequence[Checked], limits: PoolLimits) -> Flow[list[str]]:
    """The ids, earlier ones for repeats. Raises QueueFull with the ids queued so far, IdempotencyConflict."""
    ids: list[str] = []
    for chunk in producer.chunks(works):
        tasks, commands = _in_parts(scripts, pool, chunk)
        replies = yield Stream(commands)
        queued = _queued(pool, tasks, replies, limits, ids, len(works))
        if len(queued) < len(chunk):  # a note between two parts was lost: as one call then, which needs none
            tasks = [[task for part in tasks for task in part]]
            replies = yield Stream([scripts.enqueue(pool, tasks[0])])
            queued = _queued(pool, tasks, replies, limits, ids, len(works))
        ids += queued
    return ids


def _queued(
    pool: str,
    tasks: Sequence[Sequence[NewTask]],
    replies: Sequence[Any],
    limits: PoolLimits,
    ids: Sequence[str],
    asked: int,
) -> list[str]:
    """The ids of those queued, up to a part that waits for one before it. `ids`: queued before. Raises as `enqueue`."""
    queued: list[str] = []
    for part, answers in zip(tasks, replies, strict=True):
        if isinstance(answers, QueueFull):  # Redis is at its memory limit
            raise QueueFull(str(answers), [*ids, *queued]) from answers
        if isinstance(answers, BrokerError):
            raise answers
        for task, answer in zip(part, answers, strict=True):
            if answer.word == "full":
                raise producer.full(pool, limits, [*ids, *queued], asked)
            if answer.word == "conflict":
                raise producer.conflict(task, answer)
            if answer.word == "after":
                return queued
            queued.append(answer.id)
    return queued


def _in_parts(
    scripts: Scripts, pool: str, works: Sequence[Checked]
) -> tuple[Sequence[Sequence[NewTask]], Sequence[Command[list[Enqueued]]]]:
    """The tasks of each part, and the call that queues it. The server works on one part while the next is made: what is
    left to make needs no check. Ids are chosen when a part is made, and kept."""
    if len(works) <= ENQUEUE_PART:
        only = [each.named(pool) for each in works]
        return [only], [scripts.enqueue(pool, only)]
    first, second = ENQUEUE_PART // 4, ENQUEUE_PART // 4 * 3  # the server has nothing to do until the first is there
    parts = [works[:first], works[first:second], *in_batches(works[second:], ENQUEUE_PART)]
    tasks = Made(len(parts), lambda at: [each.named(pool) for each in parts[at]])
    name = new_task_id()
    return tasks, Made(len(parts), lambda at: scripts.enqueue(pool, tasks[at], part=(name, at)))


def read_status(keys: Keys, task_id: str) -> Flow[str]:
    """'queued', 'scheduled', 'started' or an outcome. Raises UnknownTask."""
    (values,) = yield Plain([("HMGET", keys.job(task_id), *FIELDS)])
    if values[0] is None:
        raise unknown(task_id)
    result = read_result(task_id, values)
    return result.outcome if result else as_text(values[0])


def wait_for_result(
    scripts: Scripts, pool: str, task_id: str, mailbox: str, seconds: float | None, *, raise_if_down: bool = False
) -> Flow[Result]:
    """The mailbox expects the id already, so that no message between two steps is lost.

    Raises ResultTimeout, UnknownTask.
    """
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        ((word,),) = yield Call([scripts.watch(pool, mailbox, [task_id])])
        if word != "watching":
            result = yield from fetch(scripts.keys, task_id)
            if result is not None:
                return result
        if raise_if_down and (why := (yield from why_down(scripts.keys, pool))):
            raise ResultTimeout(f"task {task_id}: no endpoint of pool {pool!r} can take it ({why}); it waits")
        left = SILENCE if end is None else min(SILENCE, end - time.monotonic())
        if left <= 0:
            raise ResultTimeout(f"task {task_id}: no outcome within {seconds:g} s; it goes on, ask for it again")
        if (yield Await(left)):
            result = yield from fetch(scripts.keys, task_id)
            if result is not None:
                return result


def fetch(keys: Keys, task_id: str) -> Flow[Result | None]:
    """None while it has no outcome. Raises UnknownTask."""
    (values,) = yield Plain([("HMGET", keys.job(task_id), *FIELDS)])
    if values[0] is None:
        raise unknown(task_id)
    result = read_result(task_id, values)
    if result is None or values[1] is not None:
        return result
    return (yield from stock_result(keys, result))


def stock_result(keys: Keys, bare: Result) -> Flow[Result]:
    """Completes the result of a task that a stock `rq worker` ran: its answer stands where RQ keeps answers."""
    why, entries = yield Plain(
        [("HGET", keys.job(bare.task_id), "exc_info"), ("XREVRANGE", keys.results(bare.task_id), "+", "-", "COUNT", 1)]
    )
    if not bare.ok:
        lines = as_text(why or b"").strip().splitlines()
        if not lines and entries:
            lines = [rq_why(entries[0][1].get(b"exc_string", b""))]
        return replace(bare, reason=lines[-1] if lines else "")
    told: dict[str, Any] = {}
    with suppress(ValueError, KeyError, IndexError):
        told = as_object(b64decode(entries[0][1][b"return_value"]))
    if not told:
        return bare
    body = json.dumps(told["json"]) if "json" in told else str(told.get("body", ""))
    return replace(
        bare,
        status_code=as_status(told.get("status_code")),
        headers=as_headers(told.get("headers")),
        body=body.encode("utf-8", "replace"),
        endpoint=str(told.get("endpoint", "")),
        attempts=int(as_number(told.get("attempts")) or 1),
    )


def cancel(scripts: Scripts, pool: str, ids: Sequence[str], result_ttl: float) -> Flow[list[bool]]:
    """Whether each is canceled now, by this call or an earlier one."""
    canceled: list[bool] = []
    for batch in in_batches(ids):
        words, *outcomes = yield from _cancel_batch(scripts, pool, batch, result_ttl)
        canceled += [
            word in ("canceled", "running") or (word == "settled" and outcome == b"canceled")
            for word, outcome in zip(words, outcomes, strict=True)
        ]
    return canceled


def _cancel_batch(scripts: Scripts, pool: str, ids: Sequence[str], result_ttl: float) -> Flow[list[Any]]:
    (words,) = yield Call([scripts.cancel(pool, ids, result_ttl=result_ttl)])
    # a repeat after a lost reply finds its own work done
    outcomes = yield Plain([("HGET", scripts.keys.job(task_id), "x_out") for task_id in ids])
    return [words, *outcomes]


def discard(scripts: Scripts, pool: str, ids: Sequence[str]) -> Flow[int]:
    """Deletes tasks that have an outcome and do not run any more; returns how many."""
    deleted = 0
    for batch in in_batches(ids):
        (words,) = yield Call([scripts.purge(pool, batch)])
        deleted += words.count("purged")
    return deleted


def unknown(task_id: str) -> UnknownTask:
    return UnknownTask(f"task {task_id}: not in Redis; it never was, or its outcome has expired (queue.result_ttl)")


_FAILURES: Final = {"dead": DeadLettered, "poison": Poisoned, "expired": Expired, "canceled": Canceled}


def failure(result: Result) -> TaskFailed:
    """The error that stands for a result that is no success."""
    kind = _FAILURES.get(result.outcome, DeadLettered)
    return kind(result.task_id, result.reason or "no reason was kept", result.status_code, result.body)


def fallback_result(task_id: str, value: object) -> Result:
    """The Result of a fallback: one that it made itself, else its value as JSON in the body."""
    if isinstance(value, Result):
        return value
    return Result(task_id, "ok", body=value if isinstance(value, bytes) else json.dumps(value).encode())
