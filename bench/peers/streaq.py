"""streaq: one asyncio worker on a Redis stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streaq import Worker

from bench import job as jobs
from bench import system
from bench.system import Payload

worker = Worker(redis_url=jobs.redis_url(), queue_name="bench", concurrency=jobs.slots())


@worker.task(name="job")
async def job(body: Payload) -> str:
    return await jobs.apost(body)


class System(system.System):
    needs = ("streaq", "coredis")
    share = 0.1
    setup = f"streaq run, concurrency 256, {jobs.async_client()}"
    bulk = True

    async def open(self) -> None:
        await worker.__aenter__()

    async def one(self, body: Payload) -> None:
        await job.enqueue(body)

    async def many(self, bodies: Sequence[Payload]) -> None:
        await worker.enqueue_many([job.enqueue(body) for body in bodies])

    async def close(self) -> None:
        await worker.__aexit__(None, None, None)

    def worker(self) -> list[str]:
        return [system.script("streaq"), "run", "bench.peers.streaq:worker"]

    def stored(self, redis: Any) -> int:
        return system.count_keys(redis, "streaq:bench:task:results:*")
