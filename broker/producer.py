"""From work and options to what the enqueue script takes, and from its words to an answer. No I/O."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, cast

from broker.configmodel import QueuePolicy
from broker.errors import IdempotencyConflict, InvalidTask, QueueFull, UsageError
from broker.fields import as_count, as_seconds
from broker.rqjob import describe, encode_work
from broker.scripts import ENQUEUE_BATCH, Enqueued, NewTask
from broker.task import NpuTask, Priority, Request, TaskOptions, Work, check_names, new_task_id, shortened

Item = Work | tuple[Work, TaskOptions]

CHUNK_BYTES: Final = 4 << 20  # most task data in one round trip
NO_OPTIONS: Final = TaskOptions()
_DEFAULTS: Final = QueuePolicy()


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What a producer needs of a pool's policies: as its workers registered them, else the defaults.

    Tasks, bytes and seconds.
    """

    max_depth: int = _DEFAULTS.max_depth
    payload_limit: int = _DEFAULTS.payload_limit
    result_ttl: float = _DEFAULTS.result_ttl

    FIELDS: ClassVar = ("max_depth", "payload_limit", "result_ttl")

    @classmethod
    def read(cls, values: Sequence[bytes | None]) -> PoolLimits:
        """From what HMGET gave for FIELDS."""
        depth, payload, ttl = values
        return cls(
            as_count(depth, _DEFAULTS.max_depth),
            as_count(payload, _DEFAULTS.payload_limit),
            as_seconds(ttl) or _DEFAULTS.result_ttl,
        )


def make_options(
    task_id: str | None,
    idempotency_key: str | None,
    deadline: float | None,
    priority: Priority | None,
    requires: Iterable[str],
    max_attempts: int | None,
    delay: float | None,
) -> TaskOptions:
    """The keyword arguments of enqueue as TaskOptions. Raises InvalidTask."""
    names = check_names("requires", requires)
    return TaskOptions(task_id, idempotency_key, deadline, priority, names, max_attempts, delay)


def check_timeout(timeout: float | None) -> float | None:
    """Seconds, 0 or more, or None. Raises UsageError."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < 1e9:
        raise UsageError(f"timeout {timeout!r}: must be a number of seconds, 0 or more, or None")
    return float(timeout)


def unpack(item: object) -> tuple[Work, TaskOptions]:
    """A Request or NpuTask, alone or with its TaskOptions. Raises InvalidTask."""
    pair = cast("tuple[object, object]", item) if isinstance(item, tuple) and len(item) == 2 else (item, NO_OPTIONS)
    work, options = pair
    if not isinstance(work, Request | NpuTask):
        raise InvalidTask(f"work {type(work).__name__}: must be a Request or NpuTask, or a pair of one and TaskOptions")
    if not isinstance(options, TaskOptions):
        raise InvalidTask(f"options {type(options).__name__}: must be TaskOptions")
    return work, options


class Checked(NamedTuple):
    """A work that may be queued: encoded, with all that can be wrong with it looked at."""

    work: Work
    options: TaskOptions
    data: bytes

    def named(self, pool: str, reply: str = "") -> NewTask:
        """With its id chosen."""
        work, options, data = self
        # Without a digest, the same task is known by the bytes of its data: what zlib makes of it differs by version.
        compared = options.id or options.idempotency_key or data[:1] == b"x"
        task_id, whole = options.id or new_task_id(), digest(pool, data) if compared else ""
        if options is NO_OPTIONS and not reply:
            return NewTask(task_id, data, whole, describe(work))
        return NewTask(
            id=task_id,
            data=data,
            digest=whole,
            description=describe(work),
            priority=options.priority or "normal",
            requires=options.requires,
            delay=options.delay or 0.0,
            deadline=options.deadline or 0.0,
            max_attempts=options.max_attempts or 0,
            reply=reply,
            idempotency_key=options.idempotency_key or "",
        )


Sized = TypeVar("Sized", Checked, NewTask)


def check(item: Item, limits: PoolLimits) -> Checked:
    """Raises InvalidTask, PayloadTooLarge."""
    work, options = unpack(item)
    return Checked(work, options, encode_work(work, limits.payload_limit))


def prepare(pool: str, item: Item, limits: PoolLimits, reply: str = "") -> NewTask:
    """Checked and encoded, with its id chosen. Raises InvalidTask, PayloadTooLarge."""
    return check(item, limits).named(pool, reply)


def digest(pool: str, data: bytes) -> str:
    """32 hex digits that are equal for the same task in the same pool, whichever zlib compressed it."""
    raw = zlib.decompress(data) if data[:1] == b"x" else data
    return blake2b(raw, digest_size=16, person=_person(pool)).hexdigest()


@lru_cache(maxsize=256)
def _person(pool: str) -> bytes:
    return blake2b(pool.encode(), digest_size=16).digest()


def chunks(tasks: Iterable[Sized]) -> Iterator[list[Sized]]:
    """In order, each small enough for one round trip."""
    chunk: list[Sized] = []
    size = 0
    for task in tasks:
        if chunk and (len(chunk) == ENQUEUE_BATCH or size + len(task.data) > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(task)
        size += len(task.data)
    if chunk:
        yield chunk


def conflict(task: NewTask, answer: Enqueued) -> IdempotencyConflict:
    what = f"idempotency key {shortened(task.idempotency_key)!r}" if answer.id != task.id else f"task id {task.id!r}"
    return IdempotencyConflict(
        f"{what} stands for task {answer.id} with another payload or pool; use another, or send the same", answer.id
    )


def full(pool: str, limits: PoolLimits, queued: Sequence[Any], asked: int) -> QueueFull:
    so_far = f"{len(queued)} of {asked} were queued" if asked > 1 else "nothing was queued"
    return QueueFull(
        f"pool {pool!r} is full: {limits.max_depth} tasks (queue.max_depth); {so_far}; try later, or raise the limit",
        queued,
    )
