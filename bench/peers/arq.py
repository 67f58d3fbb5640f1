"""arq: one asyncio worker on uvloop. It polls each 0.5 s: its documentation names no other `poll_delay`."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from arq import create_pool
from arq.connections import RedisSettings

from bench import job as jobs
from bench import system
from bench.system import Payload

SETTINGS = RedisSettings.from_dsn(jobs.redis_url())


async def job(_: Any, body: Payload) -> str:
    return await jobs.apost(body)


class WorkerSettings:
    """For the command `arq`."""

    functions: ClassVar = [job]
    redis_settings = SETTINGS
    max_jobs = jobs.slots()


class System(system.System):
    needs = ("arq", "redis", "uvloop")
    share = 0.1
    setup = f"arq, max_jobs 256, poll_delay 0.5 s (its default), uvloop, {jobs.async_client()}"

    async def open(self) -> None:
        self.pool = await create_pool(SETTINGS)

    async def one(self, body: Payload) -> None:
        await self.pool.enqueue_job("job", body)

    async def close(self) -> None:
        await self.pool.aclose()

    def worker(self) -> list[str]:
        start = (
            "import asyncio, uvloop; asyncio.set_event_loop_policy(uvloop.EventLoopPolicy());"
            "asyncio.set_event_loop(asyncio.new_event_loop());"
            "from arq import run_worker; from bench.peers.arq import WorkerSettings; run_worker(WorkerSettings)"
        )
        return [sys.executable, "-c", start]

    def stored(self, redis: Any) -> int:
        return system.count_keys(redis, "arq:result:*")
