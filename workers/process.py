"""One worker process: an event loop that hosts a worker for each endpoint attached to it.

Started by the supervisor as `python -m workers.process`, which writes a Spec to its standard input and keeps it open: when
that closes, the supervisor has died and the process ends by itself, releasing what it holds.
First SIGTERM or SIGINT: drain. Second: now.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from broker.configmodel import Endpoint, Pool
from broker.errors import HeadraceError
from broker.scripts import Lease
from broker.store import AsyncStore, Store
from workers.dispatch import Dispatcher
from workers.doorbell import Ear, answer_doorbell
from workers.health import Checker
from workers.housekeeper import Housekeeper
from workers.policies import endpoint_rows, most_slots, policies
from workers.transport import make_transport
from workers.worker import Worker

MOST_IN_FLIGHT: Final = 2000  # attempts in one process
SETTLE_AT_EXIT_S: Final = 5.0
FIRST_CHECKS_S: Final = 2.0

log = logging.getLogger("headrace.process")


@dataclass(frozen=True, slots=True)
class Spec:
    """What a process is told: Redis, and per pool the endpoints it attaches to."""

    redis_url: str
    pools: tuple[Pool, ...]
    attach: Mapping[str, tuple[str, ...]]
    burst: bool = False
    prefix: str | None = None
    log_level: str = "info"
    log_format: str = "text"

    def to_json(self) -> str:
        return json.dumps(
            {
                "redis_url": self.redis_url,
                "pools": [pool.to_wire() for pool in self.pools],
                "attach": {pool: list(endpoints) for pool, endpoints in self.attach.items()},
                "burst": self.burst,
                "prefix": self.prefix,
                "log_level": self.log_level,
                "log_format": self.log_format,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Spec:
        raw = json.loads(text)
        raw["pools"] = tuple(Pool.from_wire(pool) for pool in raw["pools"])
        raw["attach"] = {pool: tuple(endpoints) for pool, endpoints in raw["attach"].items()}
        return cls(**raw)


def process_name() -> str:
    """Unique over hosts and restarts."""
    return f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(3)}"


class Process:
    """`run` until drained. `drain()` and `stop_now()` may be called from signal handlers on the loop."""

    def __init__(self, spec: Spec, on_ready: Callable[[], None] = lambda: None) -> None:
        self.spec = spec
        self.name = process_name()
        self._on_ready = on_ready
        self._stopping = asyncio.Event()
        self._now = asyncio.Event()
        self.dispatchers: list[Dispatcher] = []

    def drain(self) -> None:
        """First call: stop claiming, finish what runs. Second: release what runs."""
        if self._stopping.is_set():
            self._now.set()
        self._stopping.set()

    def stop_now(self) -> None:
        self._stopping.set()
        self._now.set()

    async def run(self) -> None:
        """Raises HeadraceError if Redis is unsuitable or out of reach at the start."""
        store = AsyncStore(self.spec.redis_url, prefix=self.spec.prefix)
        own = Store(self.spec.redis_url, prefix=self.spec.prefix)  # the housekeeper's connection
        workers = self._make_workers()
        try:
            await asyncio.to_thread(self._register, own)
            self.dispatchers = self._make_dispatchers(store, workers)
            housekeeper = Housekeeper(own, self.name, self.dispatchers, self._lost(asyncio.get_running_loop()))
            checkers = [Checker(store, self.name, dispatcher) for dispatcher in self.dispatchers]
            await self._check_first(checkers)
            await asyncio.to_thread(housekeeper.start)
            self._on_ready()
            try:
                await self._serve(store, checkers)
            finally:
                await asyncio.to_thread(housekeeper.stop)
                for checker in checkers:
                    await checker.aclose()
        finally:
            for worker in workers:
                await worker.transport.aclose()
            await store.close()
            own.close()

    # Parts

    def _endpoints(self, pool: Pool) -> list[Endpoint]:
        attached = self.spec.attach.get(pool.name, ())
        return [endpoint for endpoint in pool.enabled if endpoint.id in attached]

    def _make_workers(self) -> list[Worker]:
        found = []
        for pool in self.spec.pools:
            for endpoint in self._endpoints(pool):
                connection = pool.connection
                transport = make_transport(
                    connection.transport, slots=most_slots(endpoint), idle_discard=connection.idle_discard
                )
                found.append(Worker(endpoint, pool, transport))
        return found

    def _make_dispatchers(self, store: AsyncStore, workers: Sequence[Worker]) -> list[Dispatcher]:
        made = []
        for pool in self.spec.pools:
            attached = [worker for worker in workers if worker.pool.name == pool.name]
            if attached:
                made.append(Dispatcher(store, self.name, attached, most=MOST_IN_FLIGHT, burst=self.spec.burst))
        return made

    def _register(self, store: Store) -> None:
        store.check()
        for pool in self.spec.pools:
            store.run(store.scripts.register(pool.name, policies(pool), endpoint_rows(pool)))

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

    async def _serve(self, store: AsyncStore, checkers: Sequence[Checker]) -> None:
        background = [asyncio.create_task(answer_doorbell(store, self.name, self._wake_all, self._canceled))]
        for dispatcher in self.dispatchers:
            ear = Ear(store, dispatcher.pool.name, self.name, dispatcher.wake)
            dispatcher.on_idle = ear.queue_is_empty
            background.append(asyncio.create_task(ear.listen()))
        background += [asyncio.create_task(checker.run()) for checker in checkers]
        loops = [asyncio.create_task(dispatcher.run()) for dispatcher in self.dispatchers]
        stopping = asyncio.create_task(self._stopping.wait())
        ended = asyncio.gather(*loops)  # all of a burst, or the first that failed
        await asyncio.wait(_futures(stopping, ended), return_when=asyncio.FIRST_COMPLETED)
        await self._drain(store, loops)
        for task in (*background, stopping):
            task.cancel()
        await asyncio.gather(*background, stopping, return_exceptions=True)
        if not ended.cancelled() and (error := ended.exception()):
            raise error

    async def _check_first(self, checkers: Sequence[Checker]) -> None:
        """An endpoint that is down at the start must not be found out by tasks; one that hangs must not hold us up."""
        looks = [asyncio.create_task(checker.look()) for checker in checkers]
        if looks:
            await asyncio.wait(looks, timeout=FIRST_CHECKS_S)

    async def _drain(self, store: AsyncStore, loops: Sequence[asyncio.Task[None]]) -> None:
        for dispatcher in self.dispatchers:
            dispatcher.stop_claiming()
        leaving = [store.run(store.scripts.leave(d.pool.name, self.name)) for d in self.dispatchers]
        await _within(SETTLE_AT_EXIT_S, asyncio.gather(*leaving, return_exceptions=True))
        fits = max((d.pool.queue.drain for d in self.dispatchers), default=0.0)
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


async def _within(seconds: float, work: Awaitable[Any]) -> None:
    try:
        await asyncio.wait_for(work, seconds)
    except TimeoutError:
        log.debug("gave up after %.0f s", seconds)


# Entry points


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run, on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def run_process(spec: Spec, *, on_ready: Callable[[], None] = lambda: None, watch_stdin: bool = False) -> None:
    """Runs one process until it is drained: SIGTERM or SIGINT drains, a second one ends now. Raises HeadraceError."""

    async def main() -> None:
        process = Process(spec, on_ready)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, process.drain)
        # A terminal's Ctrl-C reaches the whole group: under a supervisor it is the supervisor's to pass on.
        loop.add_signal_handler(signal.SIGINT, (lambda: None) if watch_stdin else process.drain)
        if watch_stdin:
            _watch_supervisor(lambda: loop.call_soon_threadsafe(process.stop_now))
        await process.run()

    run_loop(main())


def _watch_supervisor(gone: Callable[[], object]) -> None:
    """Standard input stays open as long as the supervisor lives."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        gone()

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()


def _first_line() -> str:
    """Byte by byte: what follows belongs to nobody, and a buffered reader would block on it."""
    line = bytearray()
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


def main() -> int:
    """`python -m workers.process`: Spec on standard input, "ready" on standard output."""
    text = _first_line()
    if not text:
        sys.stderr.write("workers.process: started by headrace's supervisor only; use `headrace worker`\n")
        return 2
    spec = Spec.from_json(text)
    from broker.logs import set_up

    set_up(spec.log_level, spec.log_format)

    def ready() -> None:
        os.write(1, b"ready\n")

    try:
        run_process(spec, on_ready=ready, watch_stdin=True)
    except HeadraceError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
