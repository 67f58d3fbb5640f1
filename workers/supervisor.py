"""Starts the worker processes of a plan, watches them, and starts again what dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from broker.configmodel import Config, Pool
from broker.errors import BrokerError, ConfigError, Problem
from workers.plan import Plan, plan
from workers.process import Spec

RESTART_S: Final = (0.5, 10.0)  # the first wait before a restart, and the longest
STEADY_S: Final = 30.0  # a process that lived so long starts its restarts from the beginning
KILL_AFTER_S: Final = 15.0  # after a second stop, or a drain and its limit

log = logging.getLogger("headrace.supervisor")


@dataclass(slots=True)
class _Child:
    number: int
    spec: Spec
    process: asyncio.subprocess.Process | None = None
    ready: bool = False


class Supervisor:
    """The processes that serve a configuration's pools.

    pools, endpoints  restrict what is served; None for all
    processes         overrides the configuration's
    burst             each process ends once nothing waits

    Raises ConfigError for a pool or endpoint that the configuration does not have.
    """

    def __init__(
        self,
        config: Config,
        *,
        redis_url: str,
        pools: Sequence[str] | None = None,
        endpoints: Sequence[str] | None = None,
        processes: int | Literal["auto"] | None = None,
        burst: bool = False,
        prefix: str | None = None,
    ) -> None:
        self._served = _served(config, pools)
        shares = [
            (_place(pool, endpoint.id), endpoint.max_concurrent, endpoint.priority)
            for pool in self._served
            for endpoint in pool.enabled
            if endpoints is None or endpoint.id in endpoints or endpoint.url in endpoints
        ]
        if endpoints is not None and not shares:
            raise _unknown(config, f"no enabled endpoint is called {', '.join(endpoints)}")
        self.plan: Plan = plan(config.processes if processes is None else processes, shares, os.cpu_count() or 1)
        if len(self._served) == 1:
            self.plan = _without_pool(self.plan)
        self._children = [
            _Child(number, self._spec(config, places, redis_url, burst, prefix))
            for number, places in enumerate(self.plan.processes, 1)
        ]
        self._burst = burst
        self._stops = 0
        self._stopping = asyncio.Event()
        self._now = asyncio.Event()
        self._tasks: list[asyncio.Task[int]] = []
        self._some_ready = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [c.process.pid for c in self._children if c.process is not None and c.process.returncode is None]

    async def start(self) -> None:
        """Returns when every process has registered. Raises HeadraceError if one ends before that."""
        self._tasks = [asyncio.create_task(self._keep(child)) for child in self._children]
        while not all(child.ready for child in self._children):
            self._some_ready.clear()
            waiting = asyncio.create_task(self._some_ready.wait())
            done, _ = await asyncio.wait([waiting, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            for task in self._tasks:
                if task in done and (code := task.result()) != 0:
                    self.stop()
                    self.stop()
                    await self.wait()
                    failure = BrokerError("a worker process ended before it was ready; its message stands above")
                    failure.exit_code = code if code in (2, 3, 4) else 4
                    raise failure
            if done >= set(self._tasks):
                return

    async def wait(self) -> int:
        """Until all have ended. Returns the worst exit code."""
        return max(await asyncio.gather(*self._tasks), default=0)

    def stop(self) -> None:
        """First call: drain. Second: now."""
        self._stops += 1
        self._stopping.set()
        if self._stops > 1:
            self._now.set()
        for child in self._children:
            _signal(child.process, signal.SIGTERM)

    async def run(self) -> int:
        """Start, wait; SIGTERM or SIGINT drains, a second one ends now."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self.start()
        return await self.wait()

    # One process

    async def _keep(self, child: _Child) -> int:
        """Until it ends as it should. Returns its exit code."""
        pause = RESTART_S[0]
        while True:
            began = time.monotonic()
            code = await self._live(child)
            if self._stopping.is_set() or (self._burst and code == 0) or not child.ready:
                return code
            if time.monotonic() - began > STEADY_S:
                pause = RESTART_S[0]
            log.error("process %d ended with %s; starting it again in %.1f s", child.number, _exit_text(code), pause)
            if await _is_set_within(self._stopping, pause):
                return 0
            pause = min(pause * 2, RESTART_S[1])

    async def _live(self, child: _Child) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "workers.process",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=_environment(),
        )  # fmt: skip
        child.process = process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(child.spec.to_json().encode() + b"\n")
        try:
            await process.stdin.drain()
            if (await process.stdout.readline()).strip() == b"ready":
                child.ready = True
                self._some_ready.set()
        except (BrokenPipeError, ConnectionResetError):
            log.debug("process %d ended at once", child.number)
        ending = asyncio.create_task(process.wait())
        if self._stopping.is_set():
            _signal(process, signal.SIGTERM)
        await self._watch(child, ending)
        return ending.result()

    async def _watch(self, child: _Child, ending: asyncio.Task[int]) -> None:
        """Waits for its end; a process that outlives its drain, or a second stop, is killed."""
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([ending, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        drain = max((pool.queue.drain for pool in child.spec.pools), default=0.0)
        if not ending.done():
            now = asyncio.create_task(self._now.wait())
            await asyncio.wait(
                [ending, now], timeout=drain + KILL_AFTER_S, return_when=asyncio.FIRST_COMPLETED
            )
            now.cancel()
        if not ending.done():
            await asyncio.wait([ending], timeout=KILL_AFTER_S)
        if not ending.done():
            log.error("process %d does not end; killing it", child.number)
            _signal(child.process, signal.SIGKILL)
            await ending

    def _spec(self, config: Config, places: Sequence[str], redis_url: str, burst: bool, prefix: str | None) -> Spec:
        attach: dict[str, tuple[str, ...]] = {}
        for pool in self._served:
            here = tuple(
                endpoint.id
                for endpoint in pool.enabled
                if endpoint.id in places or _place(pool, endpoint.id) in places
            )
            if here:
                attach[pool.name] = here
        hosted = tuple(pool for pool in self._served if pool.name in attach)
        return Spec(redis_url, hosted, attach, burst, prefix, config.log.level, config.log.format)


def _place(pool: Pool, endpoint: str) -> str:
    return f"{pool.name}/{endpoint}"


def _without_pool(whole: Plan) -> Plan:
    """With one pool its name is noise."""

    def short(place: str) -> str:
        return place.partition("/")[2]

    return replace(
        whole,
        processes=tuple(tuple(short(place) for place in places) for places in whole.processes),
        endpoints=tuple(share._replace(id=short(share.id)) for share in whole.endpoints),
    )


def _served(config: Config, pools: Sequence[str] | None) -> tuple[Pool, ...]:
    for name in pools or ():
        if name not in config.pools:
            raise _unknown(config, f"no pool is called {name}; there are {', '.join(config.pools) or 'none'}")
    return tuple(pool for name, pool in config.pools.items() if pools is None or name in pools)


def _unknown(config: Config, message: str) -> ConfigError:
    return ConfigError([Problem(config.source or "configuration", None, "pools", message)])


def _environment() -> dict[str, str]:
    """The child finds the packages where this process did."""
    paths = [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _signal(process: Any, number: signal.Signals) -> None:
    if process is not None and process.returncode is None:
        try:
            process.send_signal(number)
        except ProcessLookupError:
            return


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


