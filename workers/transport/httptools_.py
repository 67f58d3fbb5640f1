"""The transport over asyncio and httptools' parser; no client library, so all that happens is written here.

The parts: `request` (the bytes that go out), `connection` (one connection and its answer), `pool` (which connection).
"""

from __future__ import annotations

import asyncio
import ssl

from workers.errors import AttemptFailed
from workers.transport.answers import check_whole
from workers.transport.connection import Connection
from workers.transport.lean import IDLE_DISCARD_S, Stale, tls_context
from workers.transport.pool import ConnectionPool
from workers.transport.request import Origin, begin, head_of
from workers.transport.types import Answer, Call


class HttptoolsTransport:
    """See Transport; the arguments as in make_transport. Another origin has slots of its own."""

    def __init__(self, slots: int, idle_discard: float = IDLE_DISCARD_S, ca_file: str | None = None) -> None:
        if slots < 1:
            raise ValueError(f"slots {slots}: must be 1 or more")
        self.slots, self.idle_discard, self.ca_file = slots, idle_discard, ca_file
        self._keep = slots
        self._pools: dict[Origin, ConnectionPool] = {}
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    @property
    def keep(self) -> int:
        return self._keep

    @keep.setter
    def keep(self, connections: int) -> None:
        self._keep = connections
        for pool in self._pools.values():
            pool.keep = connections

    async def send(self, call: Call) -> Answer:
        started = asyncio.get_running_loop().time()
        origin, begun = begin(call.method, call.url)
        head = head_of(call, begun)
        pool = self._pools.get(origin) or self._new_pool(origin)
        connection = pool.take(started) or await pool.acquire(call.timeouts, started)
        try:
            answer = await _exchange(pool, connection, call, head, started)
        except Stale as stale:
            if not stale.reused:
                raise AttemptFailed("cut", stale.detail) from stale
            answer = await _resend(pool, call, head, started)
        return check_whole(answer)

    async def aclose(self) -> None:
        self._closed = True
        for pool in self._pools.values():
            await pool.aclose()

    def _new_pool(self, origin: Origin) -> ConnectionPool:
        if self._closed:
            raise AttemptFailed("cut", "the transport was closed")
        if origin.tls and self._tls is None:
            self._tls = tls_context(self.ca_file)
        pool = ConnectionPool(origin, self.slots, self.idle_discard, self._tls if origin.tls else None)
        pool.keep = self._keep
        self._pools[origin] = pool
        return pool


async def _exchange(pool: ConnectionPool, connection: Connection, call: Call, head: bytes, started: float) -> Answer:
    try:
        answer = await connection.send(call, head, started)
    except BaseException:
        connection.close()
        raise
    if connection.usable:
        pool.release(connection)
    return answer


async def _resend(pool: ConnectionPool, call: Call, head: bytes, started: float) -> Answer:
    """Over no connection that lies idle: one was stale, so they may all be."""
    connection = await pool.acquire(call.timeouts, started, fresh=True)
    try:
        return await _exchange(pool, connection, call, head, started)
    except Stale as stale:
        raise AttemptFailed("cut", f"{stale.detail}, and so again on the resend") from stale
