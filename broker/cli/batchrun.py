"""A batch from lines to lines: sends with back-pressure, collects outcomes as they come, writes each one once.

It survives kill -9 at any moment: an outcome stays in Redis until its line is safe on the disk, a task's id is made of
the batch and its `custom_id`, and lines that stand in the output are not sent. The reply list only tells where to look;
what was heard and lost on the way is found by the sweep.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from broker.batch import BadLine, BatchTask, bad_line, refused, result_line
from broker.batch_output import OutputFile
from broker.cli.batchqueue import BatchQueue, Sending, Word
from broker.cli.tally import Tally
from broker.errors import HeadraceError, InvalidTask, QueueFull
from broker.task import Result

T = TypeVar("T")

HEAR_S: Final = 1.0
SWEEP_S: Final = 5.0  # between looks at all tasks under way, while nothing is heard
SWEEP_AT_MOST_S: Final = 30.0  # and while outcomes come in
FULL_WAIT_S: Final = 0.25
LINES_AT_ONCE: Final = 200
READ_AT_ONCE: Final = 64
FORGET_AT_ONCE: Final = 2000
STANDING_AT_MOST: Final = 5000  # written, not yet dropped from Redis


@dataclass(frozen=True, slots=True)
class Window:
    """How much may be under way: sent, and not yet collected. `size` in bytes of encoded tasks."""

    tasks: int = 4096
    size: int = 67_108_864


class LineReader:
    """Takes lines in a thread of its own, which ends with the process: a pipe may keep it waiting for ever."""

    def __init__(self, lines: Iterator[BatchTask | BadLine], at_once: int = LINES_AT_ONCE) -> None:
        self._lines, self._at_once = lines, at_once
        self._asked: SimpleQueue[Future[list[BatchTask | BadLine]]] = SimpleQueue()
        threading.Thread(target=self._serve, name="lines", daemon=True).start()

    async def take(self) -> list[BatchTask | BadLine]:
        """The next lines, [] at the end. Raises what reading raises."""
        asked: Future[list[BatchTask | BadLine]] = Future()
        self._asked.put(asked)
        return await asyncio.wrap_future(asked)

    def _serve(self) -> None:
        while True:
            asked = self._asked.get()
            try:
                taken = list(islice(self._lines, self._at_once))
            except Exception as error:
                _resolve(asked.set_exception, error)
                return
            _resolve(asked.set_result, taken)


def _resolve(tell: Callable[[Any], None], value: Any) -> None:
    try:
        tell(value)
    except Exception:  # nobody waits any more: the run was told to stop
        return


class BatchRun:
    """One run. `run()` returns when every line is settled, or after `stop()` and `give_up()`.

    resumed  an earlier run of this batch was cut short: what it left in Redis is dropped as its lines come by
    said     told what a person should know, one line each
    """

    def __init__(
        self,
        queue: BatchQueue,
        output: OutputFile,
        lines: LineReader,
        tally: Tally,
        *,
        window: Window = Window(),
        resumed: bool = False,
        said: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.tally = tally
        self.fed = False  # every line was read
        self._queue, self._output, self._lines = queue, output, lines
        self._window, self._resumed, self._said = window, resumed, said
        self._pending: dict[str, Sending] = {}
        self._size = 0
        self._sending: set[str] = set()
        self._standing: list[str] = []  # ids whose lines are written; dropped once they are safe
        self._loose: list[str] = []  # ids let go of on the way to an error: perhaps queued, perhaps not written
        self._writing = asyncio.Lock()
        self._moved = asyncio.Event()  # something was collected, or stop
        self.begun = asyncio.Event()  # a task is to be sent: workers are needed
        self._stopping = False
        self._given_up = False

    @property
    def pending(self) -> int:
        """Tasks under way."""
        return len(self._pending)

    @property
    def left(self) -> list[str]:
        """Ids of all tasks that may stand in Redis because of this run."""
        return [*self._pending, *self._standing, *self._loose]

    @property
    def complete(self) -> bool:
        """Every line of the input is settled and stands in the output."""
        return self.fed and not self._pending

    @property
    def stopping(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        """Send no more; go on collecting."""
        self._stopping = True
        self._moved.set()

    def give_up(self) -> None:
        """Nobody works any more: look once again, and return."""
        self._given_up = True
        self.stop()

    async def run(self) -> None:
        """Raises BrokerError, and HeadraceError if the output cannot be written."""
        collecting = asyncio.create_task(self._collect())
        try:
            await _beside(self._feed(), collecting)
            await _beside(self._wait_for_pending(), collecting)
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
        if self._pending:
            await self._sweep()
        async with self._writing:
            await asyncio.to_thread(self._output.sync)
            await self._forget()

    # Feeding

    async def _feed(self) -> None:
        while not self._stopping:
            taking = asyncio.ensure_future(self._lines.take())
            while not taking.done() and not self._stopping:
                await self._until_moved(taking)
            if not taking.done():
                taking.cancel()
                return
            lines = taking.result()
            if not lines:
                self.fed = True
                return
            await self._feed_lines(lines)

    async def _feed_lines(self, lines: Sequence[BatchTask | BadLine]) -> None:
        bad: list[bytes] = []
        new: list[Sending] = []
        gone: list[str] = []
        for line in lines:
            sending = self._sort(line, bad, gone)
            if sending is not None:
                new.append(sending)
        if bad or gone:
            await self._write(bad, gone)
        while new and not self._stopping:
            room = self._room(new)
            if room:
                await self._send(new[:room])
                del new[:room]
            else:
                await self._until_moved()

    def _sort(self, line: BatchTask | BadLine, bad: list[bytes], gone: list[str]) -> Sending | None:
        """What is to be sent of the line, if anything."""
        found = self._output.done.look(line)
        if found == "done":
            self.tally.earlier += 1
            if self._resumed and isinstance(line, BatchTask):
                gone.append(self._queue.task_id(line.custom_id))
            return None
        if isinstance(line, BadLine):
            self.tally.bad += 1
            bad.append(bad_line(line))
            return None
        if found == "changed":
            self.tally.changed += 1
            self._said(
                f"line {line.number}: custom_id {line.custom_id!r} has an answer to another request in "
                f"{self._output.path}; that answer stays: give the line an id of its own, or remove the answer"
            )
            return None
        try:
            return self._queue.encode(line)
        except InvalidTask as error:
            return self._sort(refused(line, error), bad, gone)

    def _room(self, new: Sequence[Sending]) -> int:
        """How many of the next may go now; a task larger than the whole window goes alone."""
        room, size = 0, self._size
        for task in new[: max(0, self._window.tasks - len(self._pending))]:
            size += task.size
            if size > self._window.size and (room or self._pending):
                break
            room += 1
        return room

    async def _send(self, tasks: Sequence[Sending]) -> None:
        """Returns when all are on the queue, or when the run is to stop."""
        for task in tasks:
            self._hold(task)
        try:
            while tasks and not self._stopping:
                tasks = await self._send_once(tasks)
                if tasks:
                    await self._until_moved(seconds=FULL_WAIT_S)
        finally:
            for task in tasks:  # not sent, as far as we know: the next run will
                self._drop(task.id)
                self._sending.discard(task.id)
                self._loose.append(task.id)

    async def _send_once(self, tasks: Sequence[Sending]) -> list[Sending]:
        """What is still to be sent."""
        try:
            words: list[Word] = await self._queue.send([each.task for each in tasks])
        except QueueFull:
            words = ["full"] * len(tasks)
        left, earlier = [], []
        for task, word in zip(tasks, words, strict=True):
            if word == "full":
                left.append(task)
                continue
            self._sending.discard(task.id)
            if word == "queued":
                self.tally.sent += 1
            elif word == "already":
                earlier.append(task.id)
            else:
                left.append(await self._replaced(task))
        if earlier:
            await self._look(earlier)
        return left

    async def _replaced(self, task: Sending) -> Sending:
        """An earlier run sent this custom_id with another body, and its answer does not stand in the output."""
        self._said(f"line {task.number}: custom_id {task.custom_id!r} has a new body; the earlier task is canceled")
        self._drop(task.id)  # first, or its cancellation would be taken for the line's outcome
        self._sending.discard(task.id)
        await self._queue.cancel([task.id])
        fresh = replace(task, task=task.task._replace(id=f"{task.id}-{task.digest[:12]}"))
        self._hold(fresh)
        return fresh

    def _hold(self, task: Sending) -> None:
        self.begun.set()
        self._pending[task.id] = task
        self._size += task.size
        self._sending.add(task.id)

    # Collecting

    async def _collect(self) -> None:
        looked, heard_at = time.monotonic(), time.monotonic()
        while True:
            heard = await self._queue.hear(HEAR_S)
            now = time.monotonic()
            if heard:
                heard_at = now
                await self._take_in(heard)
            elif self._standing:
                await self._write([], [], sync=True)
            if now - looked > (SWEEP_S if now - heard_at > HEAR_S else SWEEP_AT_MOST_S):
                looked = now
                await self._sweep()

    async def _sweep(self) -> None:
        """Finds what was heard and lost, and sends again what Redis has lost."""
        await self._look([each for each in self._pending if each not in self._sending])

    async def _look(self, ids: Sequence[str]) -> None:
        words = await self._queue.watch(ids)
        await self._take_in([each for each, word in zip(ids, words, strict=True) if word == "settled"])
        lost = [each for each, word in zip(ids, words, strict=True) if word == "unknown" and each in self._pending]
        if lost and not self._stopping:
            self._said(f"{len(lost)} tasks are gone from Redis, it must have lost its last writes; sending them again")
            self._sending.update(lost)
            try:
                await self._send_once([self._pending[each] for each in lost])
            finally:
                self._sending.difference_update(lost)  # what was not taken now is seen by the next sweep

    async def _take_in(self, ids: Sequence[str]) -> None:
        known = [each for each in dict.fromkeys(ids) if each in self._pending]
        for chunk in (known[i : i + READ_AT_ONCE] for i in range(0, len(known), READ_AT_ONCE)):
            lines: list[bytes] = []
            gone: list[str] = []
            for result in await self._queue.read(chunk):
                if result is not None and (line := self._line(result)):
                    lines.append(line)
                    if self._queue.own or result.outcome not in ("dead", "poison"):
                        gone.append(result.task_id)  # dead letters of a pool that others use stay for them to see
            if lines:
                await self._write(lines, gone)

    def _line(self, result: Result) -> bytes | None:
        task = self._drop(result.task_id)
        if task is None:  # heard twice
            return None
        self.tally.outcome(result)
        return result_line(task.custom_id, task.digest, result)

    def _drop(self, task_id: str) -> Sending | None:
        task = self._pending.pop(task_id, None)
        if task is not None:
            self._size -= task.size
        return task

    async def _write(self, lines: Sequence[bytes], gone: Sequence[str], *, sync: bool = False) -> None:
        async with self._writing:
            try:
                safe = await asyncio.to_thread(self._output.append, lines)
            except HeadraceError:
                self._loose += gone
                raise
            self._standing += gone
            sync = sync or len(self._standing) > STANDING_AT_MOST
            if sync and not safe:
                await asyncio.to_thread(self._output.sync)
            if safe or sync:
                await self._forget()
        self._moved.set()

    async def _forget(self) -> None:
        """Only with the output synced. A task whose sending may yet be repeated waits: it would be queued anew."""
        ready = [each for each in self._standing if each not in self._sending]
        self._standing = [each for each in self._standing if each in self._sending]
        for chunk in (ready[i : i + FORGET_AT_ONCE] for i in range(0, len(ready), FORGET_AT_ONCE)):
            await self._queue.forget(chunk)

    # Waiting

    async def _wait_for_pending(self) -> None:
        while self._pending and not self._given_up:
            await self._until_moved()

    async def _until_moved(self, other: asyncio.Future[Any] | None = None, seconds: float | None = None) -> None:
        moved = asyncio.ensure_future(self._moved.wait())
        try:
            awaited = {moved, other} if other is not None else {moved}
            await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()
            self._moved.clear()


async def _beside(work: Awaitable[T], other: asyncio.Task[None]) -> T:
    """The work's result; if `other` fails first, its error."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            other.result()
        return await task
    finally:
        task.cancel()
