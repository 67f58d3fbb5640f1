"""dramatiq: one process of threads; results in Redis; no middleware but what it comes with."""

from __future__ import annotations

from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from bench import job as jobs
from bench import system
from bench.system import Payload

THREADS = 32

broker = RedisBroker(url=jobs.redis_url())
broker.add_middleware(Results(backend=RedisBackend(url=jobs.redis_url())))
dramatiq.set_broker(broker)


@dramatiq.actor(actor_name="job", queue_name="bench", store_results=True)
def job(body: Payload) -> str:
    return jobs.post(body)


class System(system.System):
    needs = ("dramatiq", "redis")
    setup = f"dramatiq --processes 1 --threads {THREADS}, http.client"

    async def one(self, body: Payload) -> None:
        job.send(body)

    def worker(self) -> list[str]:
        return [
            system.script("dramatiq"), "bench.peers.dramatiq:broker", "--processes", "1", "--threads", str(THREADS),
        ]  # fmt: skip

    def stored(self, redis: Any) -> int:
        return system.count_keys(redis, "[0-9a-f]" * 32)  # a result's key is a bare MD5
