"""`python -m tests.chaos.scale lines|crowd`: much of it, and memory stays flat. Cases S17 and S23.

    lines --lines 500000                   a long input through `headrace run`: the memory of its one process
    crowd --in-flight 1500 --seconds 60    so many requests in flight on one process: its memory, and its overhead
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from broker import Broker, Request
from tests.support.endpoints import SimulatedEndpoint
from tests.support.fleet import ROOT, fleet, pool_config
from tests.support.servers import redis_server

EVERY_S = 0.25
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
GROWTH_MB = 12.0  # from a tenth of the way to its end, by the line through what was seen
SHOWN = (0.1, 0.5, 1.0)


@dataclass
class Memory:
    """RSS of a process in MB, seen every `EVERY_S` s, with how far the work was (0 to 1)."""

    pid: int
    progress: Callable[[], float]
    seen: list[tuple[float, float]] = field(default_factory=list)

    def watch(self) -> None:
        """In a thread of its own, until the process ends."""
        with suppress(FileNotFoundError, ProcessLookupError, IndexError, ValueError):
            while True:
                rss = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096 / 1e6
                if not rss:  # it has ended, and nobody has asked how
                    return
                self.seen.append((self.progress(), rss))
                time.sleep(EVERY_S)

    def at(self, share: float) -> float:
        """The most seen in the tenth of the way that ends there."""
        return max((rss for done, rss in self.seen if share - 0.1 <= done <= share), default=0.0)

    @property
    def flat(self) -> bool:
        """The first tenth is warming up: caches, windows and buffers fill."""
        return bool(self.seen) and self.at(1.0) - self.at(0.2) <= GROWTH_MB

    def __str__(self) -> str:
        word = "flat" if self.flat else "NOT FLAT"
        return f"{word}: " + ", ".join(f"{self.at(share):.1f} MB at {share:.0%}" for share in SHOWN)


def lines(count: int, folder: Path, slots: int = 128) -> tuple[int, Memory, float]:
    """Exit code of `headrace run` over so many lines, the memory of its process, and the seconds it took."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    with source.open("w") as file:
        for number in range(count):
            body = {"model": "m", "messages": [{"role": "user", "content": f"line {number}"}]}
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    quick = ("--latency", "1ms")
    with redis_server() as server, SimulatedEndpoint(*quick) as one, SimulatedEndpoint(*quick) as two:
        urls = ["--endpoint", one.url, "--endpoint", two.url, "--slots", str(slots), "--processes", "2"]
        command = [sys.executable, "-m", "broker.cli", "run", str(source), "-o", str(target), *urls]
        began = time.monotonic()
        with (folder / "run.log").open("wb") as log:
            process = subprocess.Popen([*command, "--redis", server.url, "--json"], cwd=ROOT, stdout=log, stderr=log)
        length = 0.0

        def progress() -> float:
            """By the bytes of the output; the length of a line is known once there is one."""
            nonlocal length
            size = target.stat().st_size if target.exists() else 0
            if size > 100_000 and not length:
                with target.open("rb") as file:
                    length = sum(len(next(file)) for _ in range(50)) / 50
            return min(1.0, size / length / count) if length else 0.0

        memory = Memory(process.pid, progress)
        memory.watch()
        code = process.wait()
        took = time.monotonic() - began
    with target.open("rb") as output:
        written = sum(1 for _ in output)
    if written != count:
        raise AssertionError(f"{written} lines came out of {count}")
    return code, memory, took


@dataclass
class Crowd:
    """What `crowd` saw.

    `overheads`: seconds that each task took beyond what its endpoint did, in the order of their start.
    `first`: so many of them began all at once, and waited for their connections, which are opened at a measured pace.
    """

    memory: Memory
    most: int
    overheads: list[float]
    failed: int
    ended: bool  # a process ended
    first: int

    def overhead(self, share: float, *, warm: bool = False) -> float:
        """A quantile; `warm`: without the first ones."""
        seen = sorted(self.overheads[self.first if warm else 0 :])
        return seen[min(len(seen) - 1, int(len(seen) * share))]


def crowd(in_flight: int, seconds: float, folder: Path) -> Crowd:
    """Steadily so many requests in flight on one process."""
    record = folder / "hits.jsonl"
    took: dict[str, tuple[float, float]] = {}
    most, failed, stop = 0, 0, threading.Event()
    options = ("--latency", "2s", "--jitter", "500ms", "--record", str(record))
    with redis_server() as server, SimulatedEndpoint(*options) as endpoint, Broker(server.unix_url) as broker:
        pool = {"llm": pool_config([endpoint.url], slots=in_flight)}
        with fleet(folder, server.url, pool, 1) as running:
            pid, began = running.pids[0], time.monotonic()

            def work() -> Iterator[Request]:
                while time.monotonic() - began < seconds:
                    yield Request("POST", "/v1/chat/completions", json=CHAT)

            def look() -> None:
                nonlocal most
                while not stop.wait(0.5):
                    with suppress(OSError):
                        most = max(most, endpoint.stats()["max_in_flight"])

            memory = Memory(pid, lambda: min(1.0, (time.monotonic() - began) / seconds))
            for each in (memory.watch, look):
                threading.Thread(target=each, daemon=True).start()
            for result in broker.map("llm", work(), window=in_flight * 2):
                failed += not result.ok
                took[result.task_id] = result.started_at, result.ended_at
            stop.set()
            ended = running.pids != [pid]
    overheads = []
    for line in record.read_text().splitlines():
        hit = json.loads(line)
        if hit["task"] in took:
            started, ended_at = took[hit["task"]]
            overheads.append((started, ended_at - started - (hit["t"] - hit["began"])))
    return Crowd(memory, most, [late for _, late in sorted(overheads)], failed, ended, in_flight)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.scale", description=__doc__)
    parser.add_argument("what", choices=("lines", "crowd"))
    parser.add_argument("--lines", type=int, default=500_000)
    parser.add_argument("--in-flight", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "lines":
            code, memory, took = lines(options.lines, Path(folder))
            print(f"{options.lines} lines in {took:.0f} s, exit code {code}; memory of `headrace run` {memory}")
            return int(code != 0 or not memory.flat)
        seen = crowd(options.in_flight, options.seconds, Path(folder))
    print(
        f"{len(seen.overheads)} tasks, {seen.failed} failed, {seen.most} in flight at most; overhead p50 "
        f"{seen.overhead(0.5) * 1000:.0f} ms, p99 {seen.overhead(0.99) * 1000:.0f} ms, without the first "
        f"{seen.first}, which begin at once, {seen.overhead(0.99, warm=True) * 1000:.0f} ms; "
        f"memory of the process {seen.memory}"
    )
    return int(seen.ended or seen.failed > 0 or seen.most < options.in_flight or not seen.memory.flat)


if __name__ == "__main__":
    sys.exit(main())
