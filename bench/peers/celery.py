"""celery: one process of threads, without gossip, mingle and heartbeat; results in Redis."""

from __future__ import annotations

from typing import Any

from celery import Celery

from bench import job as jobs
from bench import system
from bench.system import Payload

THREADS = 32

app = Celery("bench", broker=jobs.redis_url(), backend=jobs.redis_url())
app.conf.update(worker_prefetch_multiplier=4, task_default_queue="bench", worker_send_task_events=False)


@app.task(name="job")
def job(body: Payload) -> str:
    return jobs.post(body)


class System(system.System):
    needs = ("celery", "kombu", "redis")
    share = 0.1
    setup = f"celery worker --pool threads --concurrency {THREADS}, http.client"

    async def one(self, body: Payload) -> None:
        job.delay(body)

    def worker(self) -> list[str]:
        return [
            system.script("celery"), "-A", "bench.peers.celery", "worker", "--pool", "threads",
            "--concurrency", str(THREADS), "--without-gossip", "--without-mingle", "--without-heartbeat",
            "--loglevel", "ERROR",
        ]  # fmt: skip

    def stored(self, redis: Any) -> int:
        return system.count_keys(redis, "celery-task-meta-*")
