"""huey: one consumer of threads that wait blocking; results in Redis."""

from __future__ import annotations

from typing import Any

from huey import RedisHuey

from bench import job as jobs
from bench import system
from bench.system import Payload

THREADS = 32

queue = RedisHuey("bench", url=jobs.redis_url(), blocking=True)


@queue.task(name="job")
def job(body: Payload) -> str:
    return jobs.post(body)


class System(system.System):
    needs = ("huey", "redis")
    setup = f"huey_consumer -k thread -w {THREADS}, http.client"

    async def one(self, body: Payload) -> None:
        job(body)

    def worker(self) -> list[str]:
        return [
            system.script("huey_consumer"), "bench.peers.huey.queue", "-k", "thread", "-w", str(THREADS), "--quiet",
        ]  # fmt: skip

    def stored(self, redis: Any) -> int:
        return int(redis.hlen("huey.results.bench"))
