"""One run: the server, the folder, the systems under test, and how each of them is put to work."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from bench.endpoints import Endpoint
from bench.headrace import POOL
from bench.peers import PEERS, VARIANTS
from bench.peers.__main__ import FOLDER
from bench.processes import BenchError, cores, environment, family, run, running, until
from bench.servers import Server, server
from bench.system import MISSING
from broker.keys import Keys

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """`tasks` for headrace to drain (others get their share); `repeats` of which the median counts; `aof`: of the run's
    server."""

    tasks: int = 20_000
    repeats: int = 5
    full: bool = False
    small: bool = False
    transport: str = "auto"
    peers: tuple[str, ...] = ()
    aof: bool = False

    @property
    def cores(self) -> int:
        return len(cores()) or os.cpu_count() or 1

    def pick(self, small: T, usual: T, full: T | None = None) -> T:
        """A size for this run."""
        if self.small:
            return small
        return full if self.full and full is not None else usual


@dataclass
class Handle:
    """One system under test, at arm's length."""

    name: str
    lab: Lab
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    setup: str = ""
    share: float = 1.0
    bulk: bool = False
    results: bool = True
    processes: int = 1
    missing: str = ""
    process: subprocess.Popen[bytes] | None = None

    def words(self, verb: str, *more: object) -> list[str]:
        return [self.python, "-m", "bench.system", self.name, verb, *map(str, more)]

    def env(self, urls: Sequence[str] = (), slots: int = 256, processes: int = 1) -> dict[str, str]:
        return {
            "BENCH_REDIS": self.lab.server.url,
            "BENCH_ENDPOINTS": ",".join(urls) or "http://127.0.0.1:9",
            "BENCH_SLOTS": str(slots),
            "BENCH_PROCESSES": str(processes),
            "BENCH_FOLDER": str(self.lab.folder),
            "BENCH_TRANSPORT": self.lab.options.transport,
        }

    def look(self) -> Handle:
        """Finds the interpreter that has its libraries, else says what is `missing`."""
        own = FOLDER / self.name / "bin" / "python"
        self.python = str(own) if own.exists() else sys.executable
        ran = subprocess.run(
            self.words("check"), cwd=self.lab.folder, env=environment(self.env()), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        try:
            answer = json.loads(ran.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            answer = {"missing": (ran.stderr.strip().splitlines() or ["it ended without a word"])[-1]}
        if ran.returncode in (0, MISSING):
            self.missing = answer.get("missing", "")
        else:
            self.missing = answer.get("missing", f"exit code {ran.returncode}")
        self.versions, self.setup = answer.get("versions", {}), answer.get("setup", "")
        self.share, self.bulk = answer.get("share", 1.0), answer.get("bulk", False)
        self.results, self.processes = answer.get("results", True), answer.get("processes", 1)
        return self

    def enqueue(self, count: int, *more: object, role: str = "free") -> dict[str, Any]:
        """See bench.system. `more` are its options."""
        told: dict[str, Any] = json.loads(run(role, self.words("enqueue", "--count", count, *more), self.env()))
        return told

    def stored(self) -> int:
        """Results in Redis; -1 if it keeps none."""
        return int(json.loads(run("free", self.words("stored"), self.env()))["stored"])

    @property
    def alive(self) -> bool:
        """Whether the worker that was started last runs."""
        return self.process is not None and self.process.poll() is None

    @contextmanager
    def serving(
        self, endpoint: Endpoint, *, slots: int = 256, processes: int = 1, role: str = "worker", ready: bool = False
    ) -> Iterator[int]:
        """Its worker runs as long as the block; yields its process id. `ready`: it waits for work (headrace)."""
        log = self.lab.folder / f"{self.name}.log"
        env = self.env(endpoint.urls, slots, processes)
        with running(role, self.words("worker"), log, env) as process:
            self.process = process
            if ready:
                keys = Keys().waiting(POOL)

                def waits() -> bool:
                    if not self.alive:
                        raise BenchError(f"{self.name} ended: {log.read_text()[-300:]}")
                    waiting: Any = self.lab.server.redis.hlen(keys)
                    return int(waiting) >= processes

                until(waits, f"{processes} processes wait for work; see {log}")
            try:
                yield process.pid
            except BenchError as error:
                said = log.read_text(errors="replace").strip().splitlines()
                raise BenchError(f"{error}; its last words: {said[-1][:200] if said else 'none'}") from None

    def worker_pids(self, pid: int) -> list[int]:
        """All processes of a worker that was started."""
        return family(pid)


@dataclass
class Lab:
    """`others` are the peers that are installed; `kind` names the server program."""

    options: Options
    server: Server
    folder: Path
    say: Callable[[str], None]
    kind: str = "bundled"
    headrace: Handle = field(init=False)
    others: list[Handle] = field(init=False)
    skipped: list[Handle] = field(init=False)
    left_out: list[str] = field(default_factory=list)  # what failed, and why

    def __post_init__(self) -> None:
        self.headrace = Handle("headrace", self).look()
        if self.headrace.missing:
            raise BenchError(f"headrace cannot be measured: {self.headrace.missing}")
        found = [Handle(name, self).look() for name in self.options.peers]
        self.others = [handle for handle in found if not handle.missing]
        self.skipped = [handle for handle in found if handle.missing]
        for handle in self.skipped:
            self.say(f"{handle.name}: skipped, {handle.missing} (python -m bench.peers {handle.name})")

    @contextmanager
    def fresh_server(self, aof: bool) -> Iterator[Server]:
        """Another server of the same kind, for the block: what earlier loads left of a heap or a file is not in it."""
        folder = Path(tempfile.mkdtemp(dir=self.folder, prefix="server-"))  # what an earlier one wrote would be read
        usual = self.server
        with server(self.kind, folder, aof) as self.server:
            try:
                yield self.server
            finally:
                self.server = usual

    @contextmanager
    def over(self, transport: str) -> Iterator[None]:
        """headrace and the bare client use this transport, for the block."""
        usual = self.options
        self.options = replace(usual, transport=transport)
        try:
            yield
        finally:
            self.options = usual

    @property
    def rq(self) -> Handle | None:
        return next((handle for handle in self.others if handle.name == "rq"), None)

    @property
    def rivals(self) -> list[Handle]:
        """The peers, each once: without other ways to run the same one."""
        return [handle for handle in self.others if handle.name not in VARIANTS]

    def best(self, found: Mapping[str, float], pick: Callable[..., str], *, variants: bool = True) -> tuple[float, str]:
        """The value that `pick` (min or max) takes of the peers', and whose it is.

        nan unless every peer has one, and which have none: the first of a few is not the first of all.
        """
        names = [name for name in PEERS if variants or name not in VARIANTS]
        without = [name for name in names if math.isnan(found.get(name, math.nan))]
        if without:
            return math.nan, f"not run: {', '.join(without)}"
        first = pick(names, key=lambda name: found[name])
        return found[first], first

    def rounds(self, *measures: Callable[[], Any], repeats: int = 0) -> list[list[Any]]:
        """Each once, then each again, so that a noisy minute hits all alike. The values of each; None is no value.

        One that fails in any round has no values, and is told of in `left_out`: a median of the rounds that went well
        would not be one of what was asked for.
        """
        found: list[list[Any]] = [[] for _ in measures]
        failed: set[int] = set()
        for _ in range(repeats or self.options.repeats):
            for at, measure in enumerate(measures):
                if at in failed:
                    continue
                try:
                    value = measure()
                except (BenchError, OSError, subprocess.TimeoutExpired) as error:
                    failed.add(at)
                    found[at].clear()
                    self.left_out.append(str(error))
                    self.say(f"left out: {error}")
                    continue
                if value is not None:
                    found[at].append(value)
        return found


def median(values: Sequence[float]) -> float:
    """nan of nothing."""
    return statistics.median(values) if values else float("nan")


def quantile(values: Sequence[float], share: float) -> float:
    """nan of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> str:
    """Processor, cores, memory, system, Python."""
    model = ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
        memory = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (OSError, ValueError):
        memory = "?"
    uname = os.uname()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{uname.sysname} {uname.release}, Python {sys.version.split()[0]}"
    return f"{model or uname.machine}, {usable} cores, {memory}, {system}"
