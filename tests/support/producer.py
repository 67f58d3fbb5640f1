"""The producer of tests that have no worker: what it asks for, and of which pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from broker import AsyncBroker, Request, Result
from broker.store import Store

POOL = "llm"


def waiting(store: Store, pool: str = POOL) -> list[str]:
    """Ids in the pool's list, in order."""
    found: list[bytes] = store.pipelined([("LRANGE", store.keys.queue(pool), 0, -1)])[0]
    return [task_id.decode() for task_id in found]


def ask(n: object = 1) -> Request:
    return Request("POST", "/v1/chat/completions", json={"n": n})


def numbers(results: Iterable[Result]) -> list[int]:
    """Of an `echo` each: the `n` that was asked."""
    return [result.json()["n"] for result in results]


def run_async(url: str, use: Callable[[AsyncBroker], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with AsyncBroker(url) as broker:
            return await use(broker)

    return asyncio.run(main())
