"""map(): works in, results out as they come, with a bounded number in between.

One reply list serves the whole call: each task's id comes there with its outcome. A message can be lost (a pop whose
reply was lost, a list that was evicted), so after some silence the tasks themselves are looked at.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, Final

from broker import producer
from broker.core import SILENCE, Core, failure, fallback_result, stock_result
from broker.errors import InvalidTask, QueueFull, ResultTimeout, TaskError, UnknownTask, UsageError
from broker.flows import Ask, Call, Flow, Plain, Pop, Pull, Sleep, Step, in_batches
from broker.inspect import why_down
from broker.outcome import FIELDS, read_result
from broker.producer import Item, PoolLimits
from broker.scripts import BATCH, ENQUEUE_BATCH, Enqueued, NewTask
from broker.task import Result, Work

FETCH: Final = 100  # results read in one round trip; each may be as large as the pool's result limit
LOOK_AT: Final = 2000  # most tasks looked at after a silence
GATHER_S: Final = 0.05  # seconds for which a driver lets a slow source fill a batch
FULL_PAUSE: Final = 0.25  # seconds until a full pool is tried again

Refused = Callable[[Item, TaskError], object]
Fallback = Callable[[Work], Any]


@dataclass(slots=True)
class _Job:
    """A task and the inputs it stands for: several if they share an idempotency key. `item` only until it is sent."""

    task: NewTask
    item: Item | None
    positions: list[int]
    sent_again: bool = False
    given_up: bool = False  # canceled for its fallback


class MapCall:
    """One call of map(). `flow` yields steps, and each Result as soon as it may be handed on."""

    def __init__(
        self,
        core: Core,
        pool: str,
        reply: str,
        *,
        window: int,
        ordered: bool,
        timeout: float | None,
        raise_on_failure: bool,
        on_refused: Refused | None,
        fallback: Fallback | None = None,
    ) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise UsageError(f"window {window!r}: must be a whole number of tasks, 1 or more")
        self._core, self._scripts, self._keys = core, core.scripts, core.keys
        self._pool, self._reply = pool, reply
        self._window, self._ordered, self._timeout = window, ordered, timeout
        self._raise, self._on_refused, self._fallback = raise_on_failure, on_refused, fallback
        self._limits = PoolLimits()
        self._open: dict[str, _Job] = {}
        self._unsent: deque[_Job] = deque()
        self._arrived: deque[str] = deque()  # ids whose outcome stands in Redis
        self._held: dict[int, Result | None] = {}  # by input: done (None: refused) and not handed on
        self._works: dict[int, Work] = {}  # by input: what a fallback may be asked about
        self._next_in = self._next_out = 0
        self._exhausted = self._full = False
        self._inside = 0  # inputs taken and not handed on
        self._news = self._handed = time.monotonic()

    @property
    def reply_key(self) -> str:
        return self._keys.reply(self._reply)

    def flow(self) -> Generator[Step | Result, Any, None]:
        """Fills up before it hands on, so that endpoints have work while the caller has results."""
        self._limits = yield from self._core.limits(self._pool)
        results: list[tuple[Result, Work | None]] = []
        while True:
            yield from self._fill()
            for result, work in results:
                if result.ok:
                    yield result
                elif self._fallback is not None:  # one by one: it may take long
                    value = yield Ask(self._fallback, work)
                    yield fallback_result(result.task_id, value)
                elif self._raise:
                    raise failure(result)
                else:
                    yield result
                self._handed = time.monotonic()
            if self._exhausted and not self._inside:
                return
            results = yield from self._collect()

    # In

    def _fill(self) -> Flow[None]:
        self._full = False
        while self._unsent or (not self._exhausted and self._inside < self._window):
            pulled = 0
            if not self._unsent:
                pulled = min(self._window - self._inside, ENQUEUE_BATCH)
                items, self._exhausted = yield Pull(pulled)
                self._admit(items)
                pulled -= len(items)
            yield from self._enqueue()
            if self._full or (pulled and not self._exhausted):
                return  # the pool is full, or the source is slow: see what has come

    def _admit(self, items: Sequence[Item]) -> None:
        for item in items:
            position, self._next_in = self._next_in, self._next_in + 1
            self._inside += 1
            try:
                task = producer.prepare(self._pool, item, self._limits, self._reply)
            except InvalidTask as error:
                self._refuse(item, error, [position])
            else:
                self._unsent.append(_Job(task, item, [position]))
                if self._fallback is not None:
                    self._works[position], _ = producer.unpack(item)

    def _refuse(self, item: Item | None, error: TaskError, positions: Sequence[int]) -> None:
        if self._on_refused is None or item is None:
            raise error
        self._on_refused(item, error)
        self._held.update(dict.fromkeys(positions))

    def _enqueue(self) -> Flow[None]:
        earlier: list[str] = []
        while self._unsent and not self._full:
            chunk = next(producer.chunks(job.task for job in self._unsent))
            try:
                (answers,) = yield Call([self._scripts.enqueue(self._pool, chunk)])
            except QueueFull:  # Redis is at its memory limit
                self._full = True
                break
            earlier += self._sent(answers)
        yield from self._look_at(earlier)

    def _sent(self, answers: Sequence[Enqueued]) -> list[str]:
        """Notes what happened to the first unsent tasks; returns those that were there already."""
        earlier: list[str] = []
        again: list[_Job] = []
        for answer in answers:
            job = self._unsent.popleft()
            if answer.word == "full":
                again.append(job)
            elif answer.word == "conflict":
                self._refuse(job.item, producer.conflict(job.task, answer), job.positions)
            else:
                job.item = None
                known = self._open.setdefault(answer.id, job)
                if known is not job:
                    known.positions += job.positions
                if answer.word == "already":  # it may not know our reply list
                    earlier.append(answer.id)
        self._full = bool(again)
        self._unsent.extendleft(reversed(again))
        return earlier

    # Out

    def _collect(self) -> Flow[list[tuple[Result, Work | None]]]:
        """What has come, in the order of hand-over; empty after a pause in which nothing came."""
        if not self._arrived:
            yield from self._listen()
        ids = [self._arrived.popleft() for _ in range(min(len(self._arrived), FETCH))]
        ids = [task_id for task_id in dict.fromkeys(ids) if task_id in self._open]
        rows = (yield Plain([("HMGET", self._keys.job(task_id), *FIELDS) for task_id in ids])) if ids else ()
        for task_id, values in zip(ids, rows, strict=True):
            result = read_result(task_id, values)
            if result is not None:
                if values[1] is None:
                    result = yield from stock_result(self._keys, result)
                self._held.update(dict.fromkeys(self._open.pop(task_id).positions, result))
            elif values[0] is None and self._open[task_id].given_up:
                self._give_up(self._open.pop(task_id))
            elif values[0] is None:
                self._send_again(task_id)
        return self._release()

    def _listen(self) -> Flow[None]:
        if not self._open:
            if self._full:
                yield Sleep(FULL_PAUSE)
                if time.monotonic() - self._news >= SILENCE:
                    yield from self._give_up_if_down()
                    self._news = time.monotonic()
                    if not self._unsent:
                        return
            self._check_time()
            return
        slow_source = not self._exhausted and not self._full and self._inside < self._window
        wait = 0.0 if slow_source else FULL_PAUSE if self._full else SILENCE
        if self._timeout is not None:
            wait = min(wait, max(0.0, self._handed + self._timeout - time.monotonic()))
        found = yield Pop(self.reply_key, FETCH, wait)
        self._arrived.extend(found)
        now = time.monotonic()
        if found:
            self._news = now
        elif now - self._news >= SILENCE:
            yield from self._look_at(list(self._open)[:LOOK_AT])
            yield from self._give_up_if_down()
            self._news = time.monotonic()
        if not self._arrived:
            self._check_time()

    def _check_time(self) -> None:
        if self._timeout is not None and time.monotonic() - self._handed >= self._timeout:
            raise ResultTimeout(f"no result within {self._timeout:g} s; {len(self._open)} tasks go on")

    def _look_at(self, ids: Sequence[str]) -> Flow[None]:
        """Asks about tasks whose message may be lost, or never asked for."""
        batches = list(in_batches(ids, BATCH))
        if not batches:
            return
        answers = yield Call([self._scripts.watch(self._pool, self._reply, batch) for batch in batches])
        for batch, words in zip(batches, answers, strict=True):
            for task_id, word in zip(batch, words, strict=True):
                if word != "watching":
                    self._arrived.append(task_id)
                else:  # to the end of the line, so that each gets its turn
                    self._open[task_id] = self._open.pop(task_id)

    def _give_up_if_down(self) -> Flow[None]:
        """Leaves everything to the fallback if no endpoint can take tasks; what is ok by now stays so."""
        if self._fallback is None or not (yield from why_down(self._keys, self._pool)):
            return
        yield from self._core.cancel(self._pool, list(self._open))
        for job in self._open.values():
            job.given_up = True
        self._arrived.extend(self._open)
        while self._unsent:  # the pool is full
            self._give_up(self._unsent.popleft())

    def _give_up(self, job: _Job) -> None:
        self._held.update(dict.fromkeys(job.positions, Result(job.task.id, "canceled")))

    def _release(self) -> list[tuple[Result, Work | None]]:
        """Takes from `_held` what may be handed on now, each with its work if there is a fallback."""
        ready = list(self._held)
        if self._ordered:
            ready = list(takewhile(self._held.__contains__, count(self._next_out)))
            self._next_out += len(ready)
        self._inside -= len(ready)
        taken = [(self._held.pop(position), self._works.pop(position, None)) for position in ready]
        return [(result, work) for result, work in taken if result is not None]

    def _send_again(self, task_id: str) -> None:
        """Redis lost it: a crash may cost what it acknowledged in its last seconds."""
        job = self._open.pop(task_id)
        if job.sent_again:
            raise UnknownTask(f"task {task_id}: gone from Redis twice before it was read; raise queue.result_ttl")
        job.sent_again = True
        self._unsent.append(job)
