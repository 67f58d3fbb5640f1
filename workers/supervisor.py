"""Starts the worker processes of a plan, watches them, starts again what dies, and passes on what the configuration
becomes: the file, and what is added at run time. A change is taken as a whole or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

from broker.configmodel import Config
from broker.errors import BrokerError, ConfigError, HeadraceError, Problem, unforeseen
from broker.store import Store
from workers.child import FATAL, Child
from workers.configwatch import ConfigFile
from workers.layout import Layout, Selection, layout, unknown
from workers.plan import Plan
from workers.pools import Pools, Reply
from workers.reload import changes, match
from workers.spec import Spec

FILE_LOOK_S: Final = 1.0
REDIS_LOOK_S: Final = 0.5
APPLIED_WITHIN_S: Final = 3.0

log = logging.getLogger("headrace.supervisor")


class Supervisor:
    """The processes that serve a configuration's pools.

    pools, endpoints  restrict what is served; None for all
    processes         overrides the configuration's
    burst             each process ends once nothing waits
    file              where the configuration comes from, to be followed; None: it stays as it is

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
        file: ConfigFile | None = None,
    ) -> None:
        self._selection = Selection(_tuple(pools), _tuple(endpoints), processes)
        self._file = file
        self._config = config  # the file's; `_layout.config` has what was added at run time too
        self._layout: Layout = layout(config, self._selection, _cpus())
        if endpoints is not None and not self._layout.shares:
            raise unknown(config, f"no enabled endpoint is called {', '.join(endpoints)}")
        data_dir = str(config.data_dir) if config.redis.embedded else None
        self._base = Spec(redis_url, (), {}, burst, prefix, number=1, data_dir=data_dir)
        self._pools = Pools(Store(redis_url, prefix=prefix))
        self._burst = burst
        self._children: list[Child] = []
        self._tasks: dict[Child, asyncio.Task[int]] = {}
        self._looks: list[asyncio.Task[None]] = []
        self._started = False
        self._stops = 0
        self._stopping = asyncio.Event()
        self._waiters: set[asyncio.Future[None]] = set()
        self._one_at_a_time = asyncio.Lock()

    @property
    def plan(self) -> Plan:
        return self._layout.plan

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [pid for child in self._children if (pid := child.pid) is not None]

    def take_added(self) -> None:
        """Adds to the plan what was added to the pools at run time. `start` does it too.

        Raises BrokerError: BrokerUnsuitable for a Redis that must not be used, before anything is read or written.
        """
        self._pools.check()
        self._layout = layout(self._pools.with_added(self._config), self._selection, _cpus())

    async def start(self) -> None:
        """Returns when every process has registered. Raises HeadraceError if one ends before that."""
        self._pools.serve(self._layout.served)
        await asyncio.to_thread(self._pools.check)
        await asyncio.to_thread(self._pools.look)  # from here on a wish for a reload is heard
        await asyncio.to_thread(self.take_added)
        self._pools.serve(self._layout.served)
        hosted = {place.partition("/")[0] for share in self._layout.shares for place in share}
        await asyncio.to_thread(self._pools.register, hosted)
        self._lay_out()
        while not all(child.ready for child in self._children):
            await self._until_changed()
            for child, task in list(self._tasks.items()):
                if task.done() and not child.ready and task.result() in FATAL:
                    await self._give_up(task.result())
            if all(task.done() for task in self._tasks.values()):
                break
        self._started = True
        self._looks = [asyncio.create_task(self._follow_redis())]
        if self._file is not None:
            self._looks.append(asyncio.create_task(self._follow_file(self._file)))

    async def wait(self) -> int:
        """Until all have ended. Returns the worst exit code."""
        worst = 0
        try:
            while True:
                for child in [child for child, task in self._tasks.items() if task.done()]:
                    worst = max(worst, self._tasks.pop(child).result())
                    self._children.remove(child)
                if not self._tasks and (self._burst or self._stopping.is_set()):
                    return worst
                await self._until_changed()
        finally:
            for look in self._looks:
                look.cancel()
            await asyncio.gather(*self._looks, return_exceptions=True)
            self._pools.close()

    def stop(self) -> None:
        """First call: drain. Second: now."""
        self._stops += 1
        self._stopping.set()
        self._notify()
        for child in self._children:
            if self._stops > 1:
                child.end_now()
            else:
                child.drain()

    async def run(self) -> int:
        """Start, wait; SIGTERM or SIGINT drains, a second one ends now; SIGHUP reads the configuration again."""
        loop = asyncio.get_running_loop()
        had_terminal = os.isatty(0)
        asked: set[asyncio.Task[Reply]] = set()

        def hang_up() -> None:
            if self._file is None or (had_terminal and not os.isatty(0)):  # its terminal was closed
                self.stop()
                return
            task = asyncio.create_task(self.reload("SIGHUP"))
            asked.add(task)
            task.add_done_callback(asked.discard)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, hang_up)
        await self.start()
        return await self.wait()

    async def reload(self, asked_by: str) -> Reply:
        """The configuration file as it now stands, all of it or nothing. What came of it is logged, and returned."""
        if self._file is None:
            return Reply(False, "this worker follows no configuration file; start it with -c FILE")
        async with self._one_at_a_time:
            outcome = "nothing changed"
            try:
                config = await asyncio.to_thread(self._file.load)
                _refuse_empty(config, self._config)
                layout(config, self._selection, _cpus())
                outcome = "perhaps not all of it is taken"
                return await self._take(config, f"{asked_by}: {self._file.path}")
            except ConfigError as error:
                for problem in error.problems:
                    log.error("%s: %s: %s", asked_by, outcome, problem)
                return Reply(False, f"{outcome}: " + "; ".join(map(str, error.problems)))
            except HeadraceError as error:
                said = f"{outcome}: {error}"
            except Exception as error:  # the watch goes on, and who asked is answered
                said = f"{outcome}: {self._file.path}: {unforeseen(error)}"
            log.error("%s: %s", asked_by, said)
            return Reply(False, said)

    # What changes while it runs

    async def _follow_file(self, file: ConfigFile) -> None:
        while True:
            await asyncio.sleep(FILE_LOOK_S)
            try:
                if file.is_new():
                    await self.reload("configuration file changed")
            except Exception as error:  # a watch that ended would go unnoticed
                log.error("%s could not be followed: %s; going on", file.path, unforeseen(error))

    async def _follow_redis(self) -> None:
        told = ""
        while True:
            await asyncio.sleep(REDIS_LOOK_S)
            try:
                seen = await asyncio.to_thread(self._pools.look)
                if seen.asked and self._file is not None:
                    reply = await self.reload("reload asked for")
                    await asyncio.to_thread(self._pools.answer, seen.asked, reply)
                if seen.revised:
                    async with self._one_at_a_time:
                        await self._take(self._config, "endpoints at run time")
            except BrokerError as error:
                log.debug("looking at the pools: %s", error)
            except Exception as error:
                if (said := unforeseen(error)) != told:  # what is wrong in Redis may stay so
                    log.error("looking at the pools failed: %s; going on", said)
                told = said

    async def _take(self, config: Config, source: str) -> Reply:
        """Serves by this configuration from now on. Redis out of reach only delays what it has to know."""
        if self._stopping.is_set():
            return Reply(False, "nothing changed: this worker is ending")
        earlier = self._layout
        try:
            whole = await asyncio.to_thread(self._pools.with_added, config)
        except BrokerError as error:
            log.error("%s: nothing changed: %s", source, error)
            return Reply(False, f"nothing changed: {error}")
        told = changes(earlier.config, whole)
        self._config, self._layout = config, layout(whole, self._selection, _cpus())
        if told.applied:
            await asyncio.to_thread(self._pools.change, earlier.served, self._layout.served)
            self._lay_out()
            for warning in self._layout.plan.warnings:
                log.warning("%s", warning)
            await self._all_applied()
            await asyncio.to_thread(self._pools.applied)
        log.info("%s: %s", source, told)
        loaded = {pool.name: len(pool.endpoints) for pool in self._layout.served}
        return Reply(True, str(told), loaded)

    def _lay_out(self) -> None:
        """Gives every process its share: those that run, new ones for what is left; those without a share drain."""
        if self._stopping.is_set():
            return
        number = self._base.number + 1
        self._base = replace(self._base, number=number)
        staying = [child for child in self._children if not child.leaving]
        takers = match([child.places for child in staying], self._layout.shares)
        for share, taker in zip(self._layout.shares, takers, strict=True):
            spec = self._layout.spec(share, self._base)
            if taker is not None:
                staying[taker].tell(share, spec)
            else:
                self._begin(share, spec)
        for at, child in enumerate(staying):
            if at not in takers:
                log.info("process %d drains: it is not needed any longer", child.number)
                child.drain()

    def _begin(self, share: tuple[str, ...], spec: Spec) -> None:
        used = {child.number for child in self._children}
        number = next(n for n in range(1, len(used) + 2) if n not in used)
        child = Child(number, share, spec, self._notify)
        self._children.append(child)
        task = asyncio.create_task(child.keep(lambda: not self._started))
        task.add_done_callback(lambda _: self._notify())
        self._tasks[child] = task
        self._notify()

    async def _all_applied(self) -> None:
        """Every process that runs serves by the newest Spec; or one takes long, and will."""
        end = time.monotonic() + APPLIED_WITHIN_S
        while any(c.pid is not None and not c.leaving and c.applied < self._base.number for c in self._children):
            left = end - time.monotonic()
            if left <= 0:
                log.warning("a process has not taken the new configuration within %.0f s", APPLIED_WITHIN_S)
                return
            await self._until_changed(left)

    async def _until_changed(self, timeout: float | None = None) -> None:
        """Something happened to a child, or it is time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        await asyncio.wait([waiter], timeout=timeout)
        self._waiters.discard(waiter)

    def _notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _give_up(self, code: int) -> None:
        self.stop()
        self.stop()
        await self.wait()
        failure = BrokerError("a worker process ended before it was ready; its message stands above")
        failure.exit_code = code
        raise failure


def _refuse_empty(new: Config, old: Config) -> None:
    """A file that was just emptied is no wish to serve nothing."""
    if old.pools and not new.pools:
        message = "names no pool; to serve nothing, set `enabled: false`, or end the worker"
        raise ConfigError([Problem(new.source or "configuration", None, "pools", message)])


def _tuple(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def _cpus() -> int:
    return os.cpu_count() or 1
