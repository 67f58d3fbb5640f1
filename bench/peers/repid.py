"""repid: one asyncio worker on a Redis stream, on uvloop. It has no result store, so its results are dropped."""

from __future__ import annotations

import sys
from typing import Any

from repid import RedisServer, Repid, Router

from bench import job as jobs
from bench import system
from bench.system import Payload

app = Repid(title="bench", version="1")
app.servers.register_server("default", RedisServer(jobs.redis_url(), batch_size=100), is_default=True)
router = Router()


@router.actor(channel="bench")
async def job(body: Payload) -> None:
    await jobs.apost(body)


app.include_router(router)


async def serve() -> None:
    async with app.servers.default.connection():
        await app.run_worker(tasks_limit=jobs.slots())


class System(system.System):
    needs = ("repid", "redis", "uvloop")
    results = False
    setup = f"repid, tasks_limit 256, stream, uvloop, no results, {jobs.async_client()}"

    async def open(self) -> None:
        self.connection = app.servers.default.connection()
        await self.connection.__aenter__()

    async def one(self, body: Payload) -> None:
        await app.send_message_json(channel="bench", payload={"body": body}, headers={"topic": "job"})

    async def close(self) -> None:
        await self.connection.__aexit__(None, None, None)

    def worker(self) -> list[str]:
        return [sys.executable, "-c", "import uvloop; from bench.peers.repid import serve; uvloop.run(serve())"]

    def stored(self, redis: Any) -> int:
        return -1
