"""taskiq: one process on a Redis stream, results in Redis."""

from __future__ import annotations

from typing import Any

from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from bench import job as jobs
from bench import system
from bench.system import Payload

broker = RedisStreamBroker(jobs.redis_url(), queue_name="bench", consumer_id="0").with_result_backend(
    RedisAsyncResultBackend(jobs.redis_url(), prefix_str="bench-result")
)


@broker.task(task_name="job")
async def job(body: Payload) -> str:
    return await jobs.apost(body)


class System(system.System):
    needs = ("taskiq", "taskiq-redis", "redis")
    share = 0.1
    setup = f"taskiq worker --workers 1 --max-async-tasks 256, stream, {jobs.async_client()}"

    async def open(self) -> None:
        await broker.startup()

    async def one(self, body: Payload) -> None:
        await job.kiq(body)

    async def close(self) -> None:
        await broker.shutdown()

    def worker(self) -> list[str]:
        return [
            system.script("taskiq"), "worker", "bench.peers.taskiq:broker", "--workers", "1",
            "--max-async-tasks", str(jobs.slots()), "--no-parse", "--log-level", "ERROR",
        ]  # fmt: skip

    def stored(self, redis: Any) -> int:
        return system.count_keys(redis, "bench-result:*")
