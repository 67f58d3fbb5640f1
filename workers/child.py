"""One worker process as the supervisor sees it: started, told what to serve, watched, started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from workers.spec import Spec

RESTART_S: Final = (0.5, 10.0)  # the first wait before a restart, and the longest
STEADY_S: Final = 30.0  # a process that lived so long starts its restarts from the beginning
FATAL: Final = (2, 3, 4)  # exit codes of a process that found its orders, configuration or Redis of no use
KILL_AFTER_S: Final = 15.0  # after a second stop, or a drain and its limit

log = logging.getLogger("headrace.supervisor")


class Child:
    """`keep` runs it until it has ended for good. `places` are its endpoints, as `pool/endpoint`.

    on_change  called when it has become ready, or applied a Spec
    """

    def __init__(self, number: int, places: tuple[str, ...], spec: Spec, on_change: Callable[[], None]) -> None:
        self.number, self.places, self.spec = number, places, spec
        self.ready = False  # it registered, at least once
        self.applied = 0  # the number of the Spec that it serves by
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._ending = asyncio.Event()
        self._now = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process is not None and running else None

    @property
    def leaving(self) -> bool:
        return self._ending.is_set()

    def tell(self, places: tuple[str, ...], spec: Spec) -> None:
        """What it serves from now on, over restarts."""
        self.places, self.spec = places, spec
        if self.pid is not None:
            self._write(spec)

    def drain(self) -> None:
        """It finishes what runs, and is not started again."""
        if not self._ending.is_set():
            self._ending.set()
            self._signal(signal.SIGTERM)

    def end_now(self) -> None:
        """It releases what runs. (Two signals in a row might arrive as one; the end of its input does not get lost.)"""
        self._ending.set()
        self._now.set()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def keep(self, may_give_up: Callable[[], bool]) -> int:
        """Until it ends as it should. Returns its exit code.

        may_give_up  whether a process that says, before it was ever ready, that it cannot work is left alone
        """
        pause = RESTART_S[0]
        while True:
            began = time.monotonic()
            code = await self._live()
            if self.leaving or (self.spec.burst and code == 0) or (code in FATAL and not self.ready and may_give_up()):
                return code
            if time.monotonic() - began > STEADY_S:
                pause = RESTART_S[0]
            log.error("process %d ended with %s; starting it again in %.1f s", self.number, _exit_text(code), pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
                return 0
            pause = min(pause * 2, RESTART_S[1])

    async def _live(self) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "workers.process",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=_environment(),
        )  # fmt: skip
        self._process = process
        self._write(self.spec)
        hearing = asyncio.create_task(self._hear(process, self.spec.number))
        if self._now.is_set():
            self.end_now()
        elif self.leaving:
            self._signal(signal.SIGTERM)
        ending = asyncio.create_task(process.wait())
        await self._watch(ending)
        await hearing
        return ending.result()

    def _write(self, spec: Spec) -> None:
        pipe = self._process.stdin if self._process is not None else None
        if pipe is not None and not pipe.is_closing():
            pipe.write(spec.to_json().encode() + b"\n")

    async def _hear(self, process: asyncio.subprocess.Process, began_with: int) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            word, _, number = line.decode().strip().partition(" ")
            if word == "ready":
                self.ready, self.applied = True, began_with
            elif word == "applied":
                self.applied = int(number)
            self._on_change()

    async def _watch(self, ended: asyncio.Task[int]) -> None:
        """Waits for its end; a process that outlives its drain, or a second stop, is killed."""
        await _first(ended, self._ending)
        drain = max((pool.queue.drain for pool in self.spec.pools), default=0.0)
        await _first(ended, self._now, drain + KILL_AFTER_S)
        if not ended.done():
            await asyncio.wait([ended], timeout=KILL_AFTER_S)
        if not ended.done():
            log.error("process %d does not end; killing it", self.number)
            self._signal(signal.SIGKILL)
            await ended

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


async def _first(ended: asyncio.Task[int], event: asyncio.Event, timeout: float | None = None) -> None:
    """Until either, or the timeout."""
    if ended.done():
        return
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait([ended, waiting], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _environment() -> dict[str, str]:
    """The child finds the packages where this process did."""
    paths = [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"
