"""A simulated endpoint that listens, in the running event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from workers.simulate.behaviour import Behaviour
from workers.simulate.endpoint import Endpoint
from workers.simulate.stats import Stats
from workers.simulate.wire import Connection

BACKLOG: Final = 4096


@asynccontextmanager
async def simulated(
    behaviour: Behaviour | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    seed: int | None = None,
    record: str | None = None,
) -> AsyncIterator[tuple[int, Endpoint]]:
    """A simulated endpoint in this event loop: its port, and itself. `record` is a file for a JSON line per request."""
    endpoint = Endpoint(behaviour or Behaviour(), Stats(record), seed)
    connections: set[Connection] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(endpoint, connections), host, port, backlog=BACKLOG)
    try:
        yield server.sockets[0].getsockname()[1], endpoint
    finally:
        server.close()
        for connection in list(connections):
            connection.drop()
