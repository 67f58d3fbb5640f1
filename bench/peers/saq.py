"""saq: one asyncio worker, on asyncio's own loop: neither its command nor its documentation knows another."""

from __future__ import annotations

from typing import Any

from saq import Queue

from bench import job as jobs
from bench import system
from bench.system import Payload

queue = Queue.from_url(jobs.redis_url(), name="bench")


async def job(_: Any, *, body: Payload) -> str:
    return await jobs.apost(body)


settings = {"queue": queue, "functions": [("job", job)], "concurrency": jobs.slots()}


class System(system.System):
    needs = ("saq", "redis")
    share = 0.1
    setup = f"saq, concurrency 256, asyncio's loop as its command has it, {jobs.async_client()}"

    async def open(self) -> None:
        await queue.connect()

    async def one(self, body: Payload) -> None:
        await queue.enqueue("job", body=body)

    async def close(self) -> None:
        await queue.disconnect()

    def worker(self) -> list[str]:
        return [system.script("saq"), "bench.peers.saq.settings", "--quiet"]

    def stored(self, redis: Any) -> int:
        """Jobs are kept for ten minutes; those that have ended are neither queued nor active."""
        kept = system.count_keys(redis, "saq:job:bench:*")
        return kept - int(redis.zcard("saq:bench:incomplete"))
