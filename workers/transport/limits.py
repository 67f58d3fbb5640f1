"""The limits of one attempt as a single timer, and the paced, bounded set of connections it runs in."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Final

from workers.errors import AttemptFailed, FailureKind
from workers.transport.types import Timeouts

# New connections to one endpoint: this many at once, then as many per second (a listen backlog of 128 must cope).
OPEN_AT_ONCE: Final = 64
OPEN_PER_SECOND: Final = 1280.0

# A limit that rings late by more than LATE_S rings on a loop that stood still. What came meanwhile lies unread: the
# endpoint is not to blame, and gets SPARE_S more, in which it is read.
LATE_S: Final = 0.5
SPARE_S: Final = 1.0

# What had not happened when a limit passed.
UNMET: Final[Mapping[str, str]] = MappingProxyType(
    {
        "first_byte_timeout": "no answer",
        "idle_timeout": "the answer stalled",
        "attempt_timeout": "the attempt was not over",
    }
)


class Watch:
    """Ends the attempt in its `with` block when a limit passes: AttemptFailed says which. One timer, re-armed lazily.

    `heard()` after the headers and after every chunk. Works as asyncio.timeout does, by canceling the current task.
    `started` is the loop's time when the attempt began; None says now.
    """

    __slots__ = (
        "_began",
        "_canceling",
        "_due",
        "_end",
        "_fired",
        "_handle",
        "_kind",
        "_loop",
        "_rings_at",
        "_spared",
        "_task",
        "_timeouts",
        "started",
    )

    def __init__(self, timeouts: Timeouts, started: float | None = None) -> None:
        self._timeouts, self._began = timeouts, started
        self._fired = False

    def __enter__(self) -> Watch:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._canceling = task, task.cancelling()
        self._loop = asyncio.get_running_loop()
        self.started = self._loop.time() if self._began is None else self._began
        self._end = self.started + self._timeouts.attempt
        self._arm(self.started + self._timeouts.first_byte, "first_byte_timeout")
        self._ring_at(self._due)
        return self

    def heard(self) -> float:
        """Something came: from now on the idle limit counts. The seconds since the start."""
        now = self._loop.time()
        self._arm(now + self._timeouts.idle, "idle_timeout")
        if self._due < self._rings_at:
            self._handle.cancel()
            self._ring_at(self._due)
        return now - self.started

    def elapsed(self) -> float:
        return self._loop.time() - self.started

    def _arm(self, due: float, kind: FailureKind) -> None:
        self._due, self._kind = (due, kind) if due < self._end else (self._end, "attempt_timeout")
        self._spared = False

    def _ring_at(self, when: float) -> None:
        self._rings_at = when  # the handle knows it only if it is still to come, on uvloop
        self._handle = self._loop.call_at(when, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        if now < self._due:
            self._ring_at(self._due)
            return
        if now - self._due > LATE_S and not self._spared:
            self._spared = True
            self._ring_at(now + SPARE_S)
            return
        self._fired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        if not self._fired:
            return
        mine = self._task.uncancel() <= self._canceling
        if mine and isinstance(error, asyncio.CancelledError):
            raise AttemptFailed(self._kind, f"{UNMET[self._kind]} after {self.elapsed():.3g} s") from error


class Pace:
    """Spaces out new connections: OPEN_AT_ONCE, then OPEN_PER_SECOND."""

    def __init__(self) -> None:
        self._tokens = float(OPEN_AT_ONCE)
        self._counted = 0.0

    def wait(self, now: float) -> float:
        """Seconds to wait before one more connection is opened."""
        self._tokens = min(float(OPEN_AT_ONCE), self._tokens + (now - self._counted) * OPEN_PER_SECOND) - 1.0
        self._counted = now
        return max(0.0, -self._tokens / OPEN_PER_SECOND)


class Lanes:
    """At most `slots` calls at a time; new connections opened in paced steps; a count of those that lie idle.

    The libraries do not tell how many idle connections they keep, so it is an upper bound: a call that ended well left
    one, and after `idle_discard` seconds it is gone.
    """

    def __init__(self, slots: int, idle_discard: float) -> None:
        self._free = asyncio.Semaphore(slots)
        self._idle: deque[float] = deque(maxlen=slots)
        self._idle_discard = idle_discard
        self._pace = Pace()

    async def enter(self) -> bool:
        """Wait for a lane. True if the call may run on a kept connection, False if it will open one."""
        await self._free.acquire()
        now = asyncio.get_running_loop().time()
        idle = self._idle
        while idle and now - idle[0] > self._idle_discard:
            idle.popleft()
        if idle:
            idle.pop()
            return True
        wait = self._pace.wait(now)
        if wait > 0:
            try:
                await asyncio.sleep(wait)
            except BaseException:
                self._free.release()
                raise
        return False

    def leave(self, kept: bool) -> None:
        """The call is over; `kept` if its connection can serve another."""
        if kept:
            self._idle.append(asyncio.get_running_loop().time())
        self._free.release()
