"""How late the event loop of a process is. Whatever blocks it (a slow callback, a starved machine) holds up every
attempt of the process, while its leases live on; so it has to be seen.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from typing import Final

BEAT_S: Final = 0.5  # each beat wakes an idle process; what a block shows is its length less a beat, at worst
SHOWN_S: Final = 60.0  # the worst of so long is told: a look now and then must not miss it
TOO_LATE_S: Final = 2.0

log = logging.getLogger("headrace.process")


class LoopLag:
    """`start` on the loop; `worst` from any thread, even while the loop is blocked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._late: deque[tuple[float, float]] = deque()  # (when, seconds late), falling
        self._due = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._next()

    def worst(self) -> float:
        """Seconds that a callback was late, at most, in the last minute; one that is late now counts."""
        now = time.monotonic()
        late_now = max(0.0, now - self._due) if self._due else 0.0
        if late_now >= TOO_LATE_S and not self._told:
            self._told = True
            log.warning("the event loop is blocked, for %.1f s by now; attempts stand still, leases live on", late_now)
        with self._lock:
            while self._late and self._late[0][0] < now - SHOWN_S:
                self._late.popleft()
            return max(late_now, self._late[0][1] if self._late else 0.0)

    def _next(self) -> None:
        if self._loop is not None:
            self._due = time.monotonic() + BEAT_S
            self._loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        now = time.monotonic()
        late = max(0.0, now - self._due)
        if late >= TOO_LATE_S:
            log.warning("the event loop was blocked for %.1f s; every attempt of this process stood still", late)
        self._told = False
        with self._lock:
            while self._late and self._late[-1][1] <= late:
                self._late.pop()
            self._late.append((now, late))
        self._next()
