"""The world of one round: a server, endpoints, workers behind a proxy, a producer that never stops, and an observer."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker import Broker, Request, TaskOptions
from broker.errors import BrokerError
from tests.chaos.clock import WrongClock
from tests.chaos.history import History
from tests.chaos.observer import Observer, text
from tests.chaos.proxy import Proxy
from tests.support.endpoints import SimulatedEndpoint
from tests.support.fleet import Fleet, until
from tests.support.sentinels import Trio, sentinel_trio
from tests.support.servers import RealServer, redis_server

POOL = "llm"
REPLY = "chaos"
SWEEP_S = 5.0
SCRUB_S = 60.0


@dataclass(frozen=True)
class Settings:
    """What differs between scenarios. Times in seconds; `outstanding`: tasks without an outcome at a time."""

    lease: float = 2.0
    endpoints: int = 3
    slots: int = 4
    processes: int = 2
    fleets: int = 1
    outstanding: int = 40
    batch: int = 10
    rate: float = 0.0  # tasks a second; 0: as many as `outstanding` allows
    latency: str = "60ms"
    jitter: str = "50ms"
    pool: dict[str, Any] = field(default_factory=dict)
    server: dict[str, str] = field(default_factory=dict)
    sentinels: bool = False  # a primary and a replica, found by Sentinels, with no proxy before them
    lossy_producer: bool = False  # the producer speaks through a proxy of its own
    priorities: bool = True
    deadline: float | None = None
    unowned: float = 0.0  # a task is never longer without a lease; 0: not checked
    all_ok: bool = False  # nothing here may cost a task its success
    wrong_clocks: bool = False  # each fleet has a wall clock that the scenario sets
    module: str = "broker.cli"  # what runs `worker`
    env: dict[str, str] = field(default_factory=dict)

    @property
    def recovery(self) -> float:
        """So long after a fault its tasks have their outcome: lease, two sweeps, backoff, start of a process, queue."""
        return self.lease * 2 + SWEEP_S * 2 + 6.0


class World:
    """What scenarios act on."""

    def __init__(self, name: str, settings: Settings, seed: int, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.rng = random.Random(seed)
        self.history = History(folder / f"{name}-{seed}.jsonl")
        self.path = self.history.path
        config = {"appendonly": "yes", "appendfsync": "everysec", "enable-debug-command": "yes", **settings.server}
        window = 1.0 if settings.sentinels else 2.5 if config["appendfsync"] == "everysec" else 0.0
        self.history.write(
            "meta", scenario=name, seed=seed, lease=settings.lease, max_attempts=3, recovery=settings.recovery,
            window=window, slots=settings.slots, unowned=settings.unowned,
            all_ok=settings.all_ok,
        )  # fmt: skip
        self._stack = ExitStack()
        self.injected = 0
        self._producing = threading.Event()
        self.idle = threading.Event()  # while set, nothing is produced
        self.clocks: list[WrongClock] = []
        self._producer = threading.Thread(target=self._produce, name="producer", daemon=True)
        self._number = self._own = 0
        self._killed: set[int] = set()  # a killed process is listed until its parent has looked
        self.refused = 0  # enqueues that were told FULL
        self.sending: list[str] | None = None  # not acknowledged yet
        if settings.sentinels:
            self.trio: Trio = self._stack.enter_context(sentinel_trio(config=config, logs=folder))
            self.server: RealServer = self.trio.servers[0]
            self.url = self.trio.url
        else:
            self.server = self._stack.enter_context(redis_server(_kind(), config, log=folder / "server.log"))
            self.url = self.server.unix_url
        links = settings.fleets + settings.lossy_producer
        self.proxies = [Proxy(self.server.port) for _ in range(links)]  # the producer's is the last
        for proxy in self.proxies:
            self._stack.callback(proxy.close)
        self.endpoints = [self._endpoint(number, seed) for number in range(settings.endpoints)]
        self.observer = Observer(self.url, POOL, self.history, 3)
        self.fleets: list[Fleet] = []

    @property
    def proxy(self) -> Proxy:
        return self.proxies[0]

    @property
    def pids(self) -> list[int]:
        return [pid for fleet in self.fleets for pid in self.of(fleet)]

    def of(self, fleet: Fleet) -> list[int]:
        """Its processes that run now."""
        with suppress(FileNotFoundError, ProcessLookupError):  # one ended while it was looked at
            return [pid for pid in fleet.pids if pid not in self._killed]
        return []

    def start(self) -> None:
        for number in range(self.settings.fleets):
            self.start_fleet(number)
        self.history.write("processes", moment="start", pids=self.pids)
        self.observer.start()
        self._producing.set()
        self._producer.start()
        self.flowing()

    def start_fleet(self, number: int = 0) -> Fleet:
        folder = self.folder / f"fleet{len(self.fleets)}-{self.rng.randrange(10**9)}"
        folder.mkdir()
        queue = {"lease": f"{self.settings.lease}s", **self.settings.pool.get("queue", {})}
        pool = {
            "endpoints": [
                {"id": f"e{i}", "url": each.url, "max_concurrent": self.settings.slots}
                for i, each in enumerate(self.endpoints)
            ],
            "timeout": {"connect": "2s", "first_byte": "20s", "idle": "2s", "attempt": "30s"},
            "retry": {"max_attempts": 3, "backoff": {"initial": "100ms", "max": "500ms"}},
            "breaker": {"failures": 20, "cooldown": "1s"},
            "health": {"interval": "2s", "timeout": "1s"},
            **{name: value for name, value in self.settings.pool.items() if name != "queue"},
            "queue": queue,
        }
        env = self.settings.env
        if self.settings.wrong_clocks:
            self.clocks.append(WrongClock(folder / "clock"))
            env = {**env, **self.clocks[-1].env}
        url = self.url if self.settings.sentinels else self.proxies[number].url
        fleet = Fleet(folder, url, {POOL: pool}, self.settings.processes, module=self.settings.module, env=env)
        self.fleets.append(fleet)
        self._stack.callback(fleet.close)
        until(lambda: self._waits(fleet), "each of its processes has asked for work")
        return fleet

    def _waits(self, fleet: Fleet) -> bool:
        store = self.observer.store
        names = store.raw(lambda client: client.hkeys(store.keys.waiting(POOL)))
        told, pids = " ".join(text(name) for name in names), self.of(fleet)
        return len(pids) == self.settings.processes and all(f"-{pid}-" in told for pid in pids)

    # Faults

    def fault(
        self, name: str, tasks: list[str] | None = None, *, reruns: bool, since: float | None = None, **more: Any
    ) -> None:
        """Note one that was injected and is over now; `tasks` were under way when it came, at `since`."""
        now = time.time()
        self.injected += more.get("count", 1)
        line = {"fault": name, "until": now, "in_flight": tasks or [], "reruns": reruns, **more}
        if since is not None:
            line["t"] = since
        self.history.write("fault", **line)

    def kill(self, pid: int, name: str = "process killed", **more: Any) -> None:
        """kill -9, with exactly the tasks noted that it had: it is held still while they are read."""
        os.kill(pid, signal.SIGSTOP)
        held = self.observer.held_by(pid)
        self._killed.add(pid)
        os.kill(pid, signal.SIGKILL)
        self.fault(name, held, reruns=True, pid=pid, **more)

    def let_go(self, pids: list[int], tell: Callable[[], None]) -> list[str]:
        """Tells them while they are held still. Exactly the tasks that they had then."""
        with suppress(ProcessLookupError):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        held = [task for pid in pids for task in self.observer.held_by(pid)]
        tell()
        with suppress(ProcessLookupError):
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        return held

    def flowing(self, patience: float = 30.0) -> None:
        """Tasks get outcomes (again)."""
        before = self.observer.settled_at
        until(lambda: self.observer.settled_at > before, "a task gets its outcome", patience)

    def forget_lost(self) -> None:
        """Tasks that a server lost are not waited for; the checker says whether it was allowed to."""
        self.observer.forget_missing(keep=self.sending or [])

    def until(self, happened: Callable[[], Any], what: str, patience: float = 60.0) -> Any:
        return until(happened, what, patience)

    def pause(self, low: float, high: float | None = None) -> None:
        """The moment of the next fault, by chance."""
        time.sleep(self.rng.uniform(low, high if high is not None else low))

    def complete(self, fleet: Fleet | None = None) -> None:
        """Every process of a fleet runs."""
        fleet = fleet or self.fleets[0]
        until(lambda: len(self.of(fleet)) == self.settings.processes, "the supervisor has started all processes")

    # Producing

    def enqueue(self, wishes: Mapping[str, Any], **options: Any) -> str:
        """One more task, of a scenario's own, with `wishes` for the simulated endpoint. Returns its id."""
        self._own += 1
        task = f"own{self._own}"
        with Broker(self.url) as broker:
            broker.enqueue(POOL, question(task, x_sim=wishes), id=task, **options)
        self.observer.watch([task])
        self.history.write("ack", task=task, word="queued", asked=prompt(task))
        return task

    def stop_producing(self) -> None:
        self._producing.clear()
        if self._producer.is_alive():
            self._producer.join(90)

    def _produce(self) -> None:
        url = self.proxies[-1].url if self.settings.lossy_producer else self.url
        with Broker(url) as broker:
            due = time.monotonic()
            while self._producing.is_set():
                due += self.settings.batch / self.settings.rate if self.settings.rate else 0.0
                time.sleep(max(0.0, due - time.monotonic()))
                if self.idle.is_set() or self.full:
                    time.sleep(0.01)
                    continue
                self._send(broker, [self._item() for _ in range(self.settings.batch)])

    @property
    def full(self) -> bool:
        """As many tasks are outstanding as may be."""
        return self.observer.waiting >= self.settings.outstanding

    def _item(self) -> tuple[Request, TaskOptions]:
        self._number += 1
        priority = self.rng.choice(["high", None, None, "low"]) if self.settings.priorities else None
        options = TaskOptions(id=f"t{self._number:07d}", priority=priority, deadline=self.settings.deadline)  # type: ignore[arg-type]
        return question(f"t{self._number:07d}"), options

    def _send(self, broker: Broker, items: list[tuple[Request, TaskOptions]]) -> None:
        """Until it is acknowledged, by the same ids: what a careful producer does."""
        ids = [options.id for _, options in items if options.id]
        self.sending, sent = ids, time.time()
        self.observer.watch(ids)
        while True:
            try:
                broker.enqueue_many(POOL, items)
                break
            except BrokerError as error:
                self.refused += "memory limit" in str(error) or "full" in str(error)
                time.sleep(0.05)
        for task in ids:
            self.history.write("ack", task=task, word="queued", sent=sent, asked=prompt(task))
        self.sending = None
        with suppress(BrokerError):
            store = self.observer.store
            store.run(store.scripts.watch(POOL, REPLY, ids))

    # The end

    def finish(self) -> None:
        """No more faults, no more tasks: all that was acknowledged is waited for, and everything is read again."""
        self.idle.clear()
        for proxy in self.proxies:
            proxy.spare()
            proxy.blackhole(False)
            proxy.delay = 0.0
        self.stop_producing()
        patience = self.settings.recovery + SCRUB_S + 10
        with suppress(AssertionError):
            until(lambda: not self.observer.unsettled(), "every task has an outcome", patience)
        with suppress(AssertionError):
            until(self._at_rest, "nothing is under way", self.settings.lease * 2 + SWEEP_S * 2)
        for fleet in self.fleets:
            if fleet._process.poll() is None:
                with suppress(AssertionError):
                    until(lambda each=fleet: len(self.of(each)) == self.settings.processes, "all processes", 15)
        self.history.write("processes", moment="end", pids=self.pids)
        self.observer.stop()
        self.observer.finish(REPLY)
        self._hits()  # after the outcomes: what is settled has its hits by then
        self.history.close()

    def _at_rest(self) -> bool:
        try:
            rest = self.observer.rest()
        except BrokerError:
            return False
        return not (rest["slots"] or rest["wip"] or rest["scheduled"] or rest["listed"])

    def _hits(self) -> None:
        import json

        for number in range(len(self.endpoints)):
            file = self.folder / f"hits{number}.jsonl"
            for line in file.read_text().splitlines() if file.exists() else ():
                hit = json.loads(line)
                self.history.write(
                    "hit", task=hit["task"], endpoint=f"e{number}", attempt=hit["attempt"], outcome=hit["outcome"],
                    began=hit["began"], ended=hit["t"],
                )  # fmt: skip

    def _endpoint(self, number: int, seed: int) -> SimulatedEndpoint:
        record = str(self.folder / f"hits{number}.jsonl")
        settings = self.settings
        options = ("--latency", settings.latency, "--jitter", settings.jitter, "--record", record, "--seed", str(seed))
        return self._stack.enter_context(SimulatedEndpoint(*options))

    def close(self) -> None:
        self._producing.clear()
        with suppress(AttributeError):  # it never came so far
            self.observer.stop()
        self._stack.close()
        self.observer.store.close()


def prompt(task: str) -> str:
    """What a task asks; of each one another text."""
    return f"task {task}"


def question(task: str, **more: Any) -> Request:
    """Its answer tells by a digest of the prompt and by X-Request-Id whose it is."""
    body = {"model": "m", "messages": [{"role": "user", "content": prompt(task)}], **more}
    return Request("POST", "/v1/chat/completions", json=body, headers={"X-Request-Id": task})


def _kind() -> Any:
    return "redis" if os.environ.get("HEADRACE_TEST_SERVER") == "redis" else "valkey"


@contextmanager
def world(name: str, settings: Settings, seed: int, folder: Path) -> Iterator[World]:
    """A world that runs; its processes end with the block."""
    made = World(name, settings, seed, folder)
    try:
        made.start()
        yield made
    finally:
        made.close()
