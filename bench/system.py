"""One queue under test, in a process of its own: `python -m bench.system NAME check|enqueue|stored|worker`.

A system is a module with `System`, a subclass of the one here: bench.headrace, or bench.peers.NAME. It runs under the
interpreter that has its libraries, told by the environment where Redis and the endpoints are. It answers in one line of
JSON.
"""

from __future__ import annotations

import abc
import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Any, ClassVar

from bench.job import payload

Payload = dict[str, Any]

MISSING = 3  # exit code of `check`: its libraries are not installed here


class System(abc.ABC):
    """How one queue is used, in its documented fast set-up."""

    needs: ClassVar[tuple[str, ...]]  # distributions
    setup: ClassVar[str]  # for the report: how its worker runs, on which client
    share: ClassVar[float] = 0.2  # of the tasks that headrace is given to drain; slow ones get fewer
    bulk: ClassVar[bool] = False  # has a call that enqueues many
    results: ClassVar[bool] = True  # keeps them in Redis
    processes: ClassVar[int] = 1  # that its worker runs; more than one are not pinned to a core

    async def open(self) -> None:  # noqa: B027  # not every producer connects
        """Connect the producer."""

    @abc.abstractmethod
    async def one(self, body: Payload) -> None:
        """Enqueue one task."""

    async def many(self, bodies: Sequence[Payload]) -> None:
        """Enqueue all, in its best way."""
        for body in bodies:
            await self.one(body)

    async def close(self) -> None:  # noqa: B027
        """Disconnect the producer."""

    @abc.abstractmethod
    def worker(self) -> list[str]:
        """The command that serves the queue with one process."""

    def stored(self, redis: Any) -> int:
        """Results in Redis now. `redis` is a redis-py client."""
        raise NotImplementedError


def count_keys(redis: Any, pattern: str) -> int:
    return sum(1 for _ in redis.scan_iter(pattern, count=1000))


def load(name: str) -> System:
    """Raises ImportError if its libraries are not installed."""
    module = import_module("bench.headrace" if name == "headrace" else f"bench.peers.{name.replace('-', '_')}")
    found: System = module.System()
    return found


def script(name: str) -> str:
    """A command that was installed beside this interpreter."""
    return os.path.join(os.path.dirname(sys.executable), name)


async def enqueue(system: System, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds that the calls took, and with a rate also when each began, in ns of the monotonic clock, by number."""
    bodies = [payload(number) for number in range(options.first, options.first + options.count)]
    begun: dict[int, int] = {}
    await system.open()
    if options.warm:
        await system.one(payload(999_999_999))
    start = time.perf_counter()
    if options.rate:
        await _paced(system, bodies, options, begun)
    elif options.single:
        for body in bodies:
            await system.one(body)
    else:
        for at in range(0, len(bodies), options.batch):
            await system.many(bodies[at : at + options.batch])
    seconds = time.perf_counter() - start
    await system.close()
    return {"seconds": seconds, "begun": begun}


async def _paced(system: System, bodies: list[Payload], options: argparse.Namespace, begun: dict[int, int]) -> None:
    start = time.monotonic()
    for at, body in enumerate(bodies):
        await asyncio.sleep(max(0.0, start + at / options.rate - time.monotonic()))
        begun[options.first + at] = time.monotonic_ns()
        await system.one(body)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.system")
    parser.add_argument("name")
    parser.add_argument("verb", choices=["check", "enqueue", "stored", "worker"])
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first task")
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--single", action="store_true", help="one call a task")
    parser.add_argument("--rate", type=float, default=0.0, help="single calls, so many a second")
    parser.add_argument("--warm", action="store_true", help="one task more, first and outside the time")
    return parser


def main() -> int:
    options = _parser().parse_args()
    try:
        system = load(options.name)
        versions = {name: metadata.version(name) for name in system.needs}
    except (ImportError, metadata.PackageNotFoundError) as error:
        print(json.dumps({"missing": str(error)}))
        return MISSING
    if options.verb == "worker":
        words = system.worker()
        os.execvp(words[0], words)
    told = {name: getattr(system, name) for name in ("setup", "share", "bulk", "results", "processes")}
    answer: dict[str, Any] = {"versions": versions, **told}
    if options.verb == "enqueue":
        answer = asyncio.run(enqueue(system, options))
    elif options.verb == "stored":
        import redis

        answer = {"stored": system.stored(redis.Redis.from_url(os.environ["BENCH_REDIS"]))}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
