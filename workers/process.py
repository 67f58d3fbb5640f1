"""One worker process: an event loop that hosts a worker for each endpoint attached to it.

Started by the supervisor as `python -m workers.process`, which writes a Spec to its standard input, another one
whenever the configuration changes, and keeps it open: when that closes, the supervisor has died and the process ends by
itself, releasing what it holds. First SIGTERM or SIGINT: drain. Second: now.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

from broker import logs
from broker.configmodel import Config
from broker.errors import HeadraceError
from broker.scripts import Lease
from broker.store import AsyncStore, Store
from workers.clock import ServerClock
from workers.dispatch import Dispatcher
from workers.doorbell import answer_doorbell
from workers.hosted import HostedPool
from workers.housekeeper import Housekeeper
from workers.lag import LoopLag
from workers.registration import Registration
from workers.spec import Spec

SETTLE_AT_EXIT_S: Final = 5.0
FIRST_CHECKS_S: Final = 2.0
ECHO_S: Final = 1.0  # a signal so soon after the first is the same one: sent to the group, and passed on by a parent

__all__ = ["Process", "Spec", "process_name", "run_loop", "run_process", "spare_the_collector"]

log = logging.getLogger("headrace.process")


def process_name() -> str:
    """Unique over hosts and restarts."""
    return f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(3)}"


class Process:
    """`run` until drained. `drain()`, `stop_now()` and `update()` are called on the loop.

    on_applied  called with the number of each Spec that came by `update` and is in force
    registers   whether it sees to it itself that Redis knows its pools; else its supervisor does
    """

    def __init__(
        self,
        spec: Spec,
        on_ready: Callable[[], None] = lambda: None,
        on_applied: Callable[[int], None] = lambda number: None,
        *,
        registers: bool = True,
    ) -> None:
        self.spec = spec
        self.name = process_name()
        self._on_ready, self._on_applied = on_ready, on_applied
        self._registers = registers
        self._stopping = asyncio.Event()
        self._now = asyncio.Event()
        self._wanted = spec
        self._news = asyncio.Event()
        self._hosted: list[HostedPool] = []
        self._clock, self._lag = ServerClock(), LoopLag()
        self.dispatchers: list[Dispatcher] = []  # changed in place: the housekeeper's thread looks at it

    def drain(self) -> None:
        """First call: stop claiming, finish what runs. Second: release what runs."""
        if self._stopping.is_set():
            self._now.set()
        self._stopping.set()

    def stop_now(self) -> None:
        self._stopping.set()
        self._now.set()

    def update(self, spec: Spec) -> None:
        """New rules: at once for new tasks, while running ones end where they are."""
        self._wanted = spec
        self._news.set()

    async def run(self) -> None:
        """Raises HeadraceError if Redis is unsuitable or out of reach at the start."""
        store = AsyncStore(self.spec.redis_url, prefix=self.spec.prefix)
        own = Store(self.spec.redis_url, prefix=self.spec.prefix)  # the housekeeper's connection
        try:
            await asyncio.to_thread(self._check, own)
            registration = Registration(own)
            if self._registers:
                await asyncio.to_thread(self._register, registration)
            for pool in self.spec.pools:
                if endpoints := self.spec.attached(pool):
                    sharers, burst = self.spec.sharers(pool), self.spec.burst
                    self._hosted.append(
                        HostedPool(store, self.name, pool, endpoints, sharers, self._clock, burst=burst)
                    )
            self._show()
            loop = asyncio.get_running_loop()
            self._lag.start(loop)
            housekeeper = Housekeeper(own, self.name, self.dispatchers, self._lost(loop), self._clock, self._lag)
            if self._registers:
                housekeeper.on_look = lambda: self._look(registration)
            await self._check_first()
            await asyncio.to_thread(housekeeper.start)
            self._on_ready()
            try:
                await self._serve(store, housekeeper)
            finally:
                await asyncio.to_thread(housekeeper.stop)
        finally:
            for hosted in self._hosted:
                await hosted.close()
            await store.close()
            own.close()

    # Parts

    def _check(self, store: Store) -> None:
        store.check()
        asked = time.monotonic()
        self._clock.heard(store.pipelined([("TIME",)])[0], asked)

    def _register(self, registration: Registration) -> None:
        """With what was added to the pools at run time, by others perhaps: it must not look gone."""
        whole = registration.with_added(Config(pools={pool.name: pool for pool in self.spec.pools}))
        registration.serve(whole.pools.values())
        registration.ask(whole.pools)
        registration.register()

    def _look(self, registration: Registration) -> None:
        glances = registration.look()
        if any(glance.revised for glance in glances.values()):
            self._register(registration)
        else:
            registration.register()

    def _show(self) -> None:
        self.dispatchers[:] = [hosted.dispatcher for hosted in self._hosted]

    def _lost(self, loop: asyncio.AbstractEventLoop) -> Callable[[Dispatcher, Lease, str], None]:
        def lost(dispatcher: Dispatcher, lease: Lease, word: str) -> None:
            log.warning("task %s: its lease is %s; closing the connection", lease.id, word)
            loop.call_soon_threadsafe(dispatcher.abandon, lease)

        return lost

    def _canceled(self, task_id: str, token: str) -> None:
        for dispatcher in self.dispatchers:
            for lease in list(dispatcher.running):
                if lease.id == task_id and lease.token == token:
                    dispatcher.abandon(lease)

    def _wake_all(self) -> None:
        for dispatcher in self.dispatchers:
            dispatcher.wake()

    # Serving and ending

    async def _serve(self, store: AsyncStore, housekeeper: Housekeeper) -> None:
        bell = asyncio.create_task(answer_doorbell(store, self.name, self._wake_all, self._canceled))
        for hosted in self._hosted:
            hosted.start()
        try:
            await self._until_stopped(store, housekeeper)
        finally:
            await self._drain()
            bell.cancel()
            await asyncio.gather(bell, return_exceptions=True)

    async def _until_stopped(self, store: AsyncStore, housekeeper: Housekeeper) -> None:
        """Or until nothing is hosted any longer. Raises BrokerError for what waiting will not mend."""
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while self._hosted and not self._stopping.is_set():
                news = asyncio.create_task(self._news.wait())
                loops = [hosted.loop for hosted in self._hosted]
                await asyncio.wait(_futures(stopping, news, *loops), return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                for ended in [hosted for hosted in self._hosted if hosted.loop.done()]:
                    ended.loop.result()
                    await self._let_go(ended, housekeeper)
                if self._news.is_set():
                    self._news.clear()
                    await self._apply(self._wanted, store, housekeeper)
        finally:
            stopping.cancel()

    async def _let_go(self, hosted: HostedPool, housekeeper: Housekeeper) -> None:
        self._hosted.remove(hosted)
        self._show()
        await asyncio.to_thread(housekeeper.forget, hosted.name, list(hosted.dispatcher.workers))
        await hosted.close()

    async def _apply(self, spec: Spec, store: AsyncStore, housekeeper: Housekeeper) -> None:
        serving = {hosted.name: hosted for hosted in self._hosted if not hosted.leaving}
        for pool in spec.pools:
            endpoints = spec.attached(pool)
            hosted = serving.get(pool.name) if endpoints else None
            if hosted is not None:
                del serving[pool.name]
                gone = hosted.change(pool, endpoints, spec.sharers(pool))
                await asyncio.to_thread(housekeeper.forget, pool.name, gone)
            elif endpoints:
                sharers = spec.sharers(pool)
                hosted = HostedPool(store, self.name, pool, endpoints, sharers, self._clock, burst=spec.burst)
                self._hosted.append(hosted)
                self._show()
                hosted.start()
        for left in serving.values():
            await left.leave()
        if (spec.log_level, spec.log_format) != (self.spec.log_level, self.spec.log_format):
            logs.set_up(spec.log_level, "json" if spec.log_format == "json" else "text")
        self.spec = spec
        self._on_applied(spec.number)

    async def _check_first(self) -> None:
        """An endpoint that is down at the start must not be found out by tasks; one that hangs must not hold us up."""
        looks = [asyncio.create_task(hosted.checker.look()) for hosted in self._hosted]
        if looks:
            await asyncio.wait(looks, timeout=FIRST_CHECKS_S)

    async def _drain(self) -> None:
        if not self._hosted:
            return
        await asyncio.gather(*(hosted.leave() for hosted in self._hosted))
        loops = [hosted.loop for hosted in self._hosted]
        fits = max(hosted.dispatcher.pool.queue.drain for hosted in self._hosted)
        now = asyncio.create_task(self._now.wait())
        drained = asyncio.create_task(asyncio.wait(loops))
        await asyncio.wait(_futures(now, drained), timeout=fits, return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        for dispatcher in self.dispatchers:
            dispatcher.abandon_all()
        await asyncio.wait(_futures(drained), timeout=SETTLE_AT_EXIT_S)
        for loop in loops:
            loop.cancel()
        await asyncio.wait(_futures(drained))


def _futures(*futures: asyncio.Future[Any]) -> list[asyncio.Future[Any]]:
    return list(futures)


# Entry points


def spare_the_collector() -> None:
    """What was imported is here to stay, and a task's objects die with it: look for cycles less often. The usual pace
    costs a process under load a few percent, and its slowest tasks milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run, on uvloop where there is one."""
    spare_the_collector()
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


class _Orders:
    """What the supervisor writes to standard input: a Spec a line, for as long as it lives."""

    def __init__(self) -> None:
        self._read = b""

    def next(self) -> Spec | None:
        """Waits for it; None when the supervisor is gone."""
        while b"\n" not in self._read:
            more = os.read(0, 65_536)
            if not more:
                return None
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return Spec.from_json(line.decode())

    def follow(self, loop: asyncio.AbstractEventLoop, process: Process) -> None:
        """In a thread of its own, to the end."""

        def follow() -> None:
            while (spec := self.next()) is not None:
                loop.call_soon_threadsafe(process.update, spec)
            loop.call_soon_threadsafe(process.stop_now)

        threading.Thread(target=follow, name="supervisor-watch", daemon=True).start()


def run_process(spec: Spec) -> None:
    """Runs one process until it is drained: SIGTERM or SIGINT drains, a second one ends now. Raises HeadraceError."""

    async def main() -> None:
        process = Process(spec)
        loop = asyncio.get_running_loop()
        drain = _without_echo(process.drain, loop.time)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, drain)
        await process.run()

    run_loop(main())


def _without_echo(action: Callable[[], None], clock: Callable[[], float]) -> Callable[[], None]:
    """A Ctrl-C goes to the whole group, and `rq worker-pool` passes it on as well: that is one order, not two."""
    last = [-ECHO_S]

    def act() -> None:
        if clock() - last[0] >= ECHO_S:
            last[0] = clock()
            action()

    return act


def _run_supervised(spec: Spec, orders: _Orders) -> None:
    """The same under a supervisor: it alone passes signals on, and says what to serve."""

    def said(text: str) -> None:
        os.write(1, f"{text}\n".encode())

    async def main() -> None:
        process = Process(spec, lambda: said("ready"), lambda number: said(f"applied {number}"), registers=False)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, process.drain)
        for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal, to the whole group
            signal.signal(number, signal.SIG_IGN)
        orders.follow(loop, process)
        await process.run()

    run_loop(main())


def _share_of(spec: Spec) -> AbstractContextManager[object]:
    """The embedded server lives as long as one of its users does."""
    if spec.data_dir is None:
        return nullcontext()
    from broker.embedded import EmbeddedServer

    return EmbeddedServer.acquire(Path(spec.data_dir))


def main() -> int:
    """`python -m workers.process`: a Spec a line on standard input; "ready", "applied NUMBER" on standard output."""
    orders = _Orders()
    spec = orders.next()
    if spec is None:
        sys.stderr.write("workers.process: started by headrace's supervisor only; use `headrace worker`\n")
        return 2
    logs.set_up(spec.log_level, "json" if spec.log_format == "json" else "text")
    try:
        with _share_of(spec):
            _run_supervised(spec, orders)
    except HeadraceError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
