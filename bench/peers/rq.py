"""rq: SimpleWorker, which does not fork."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis import Redis
from rq import Queue

from bench import job as jobs
from bench import system
from bench.system import Payload

NAME = "bench"


def job(body: Payload) -> str:
    return jobs.post(body)


class System(system.System):
    needs = ("rq", "redis", "hiredis")
    setup = "rq worker -w rq.worker.SimpleWorker, http.client"
    share = 0.05
    bulk = True

    async def open(self) -> None:
        self.queue = Queue(NAME, connection=Redis.from_url(jobs.redis_url()))

    async def one(self, body: Payload) -> None:
        self.queue.enqueue(job, body)

    async def many(self, bodies: Sequence[Payload]) -> None:
        self.queue.enqueue_many([Queue.prepare_data(job, (body,)) for body in bodies])

    async def close(self) -> None:
        self.queue.connection.close()

    def worker(self) -> list[str]:
        return [
            system.script("rq"), "worker", "--worker-class", "rq.worker.SimpleWorker", "--quiet",
            "--url", jobs.redis_url(), NAME,
        ]  # fmt: skip

    def stored(self, redis: Any) -> int:
        return int(redis.zcard(f"rq:finished:{NAME}"))
