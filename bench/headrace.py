"""headrace, through its public doors: `Broker`, and `headrace worker` on a configuration file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from bench import system
from bench.job import PATH, redis_url, slots
from bench.system import Payload
from broker import Broker, Request
from broker.keys import Keys

POOL = "bench"


class System(system.System):
    needs = ("redis", "hiredis", "httptools", "pyreqwest", "aiohttp", "uvloop")
    setup = "headrace worker, all guarantees on"
    share = 1.0
    bulk = True

    async def open(self) -> None:
        self.broker = Broker(redis_url())

    async def one(self, body: Payload) -> None:
        self.broker.enqueue(POOL, Request("POST", PATH, json=body))

    async def many(self, bodies: Sequence[Payload]) -> None:
        self.broker.enqueue_many(POOL, [Request("POST", PATH, json=body) for body in bodies])

    async def close(self) -> None:
        self.broker.close()

    def worker(self) -> list[str]:
        file = Path(os.environ["BENCH_FOLDER"], "headrace.yaml")
        file.write_text(yaml.safe_dump(configuration()))
        return [sys.executable, "-m", "broker.cli", "worker", "-c", str(file)]

    def stored(self, redis: Any) -> int:
        return int(redis.zcard(Keys().registry("finished", POOL)))


def configuration() -> dict[str, Any]:
    """As in headrace.yaml; told by the environment."""
    endpoints = [
        {"id": f"e{number:03d}", "url": url, "max_concurrent": slots()}
        for number, url in enumerate(os.environ["BENCH_ENDPOINTS"].split(","))
    ]
    pool = {
        "endpoints": endpoints,
        "queue": {"max_depth": 5_000_000},
        "connection": {"transport": os.environ.get("BENCH_TRANSPORT", "auto")},
    }
    return {
        "redis": {"url": redis_url()},
        "processes": int(os.environ.get("BENCH_PROCESSES", "1")),
        "pools": {POOL: pool},
    }
