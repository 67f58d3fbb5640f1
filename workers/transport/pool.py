"""The connections to one origin: at most `slots`, the latest used first, idle ones closed by a timer."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Coroutine

from workers.errors import AttemptFailed
from workers.transport.connection import Connection
from workers.transport.limits import LATE_S, SPARE_S, Pace, Watch
from workers.transport.request import Origin
from workers.transport.types import Timeouts


class ConnectionPool:
    """`take` an idle connection or `acquire` one; `release` it if it is usable after its answer, else `close` it.

    A slot is free when its connection is closed, not before. Those who wait are served in order.
    """

    def __init__(self, origin: Origin, slots: int, idle_discard: float, tls: ssl.SSLContext | None) -> None:
        self._origin, self._slots, self._idle_discard, self._tls = origin, slots, idle_discard, tls
        self.keep = slots  # beyond so many, those in use included, a connection is closed after its answer
        self._loop = asyncio.get_running_loop()
        self._pace = Pace()
        self._all: set[Connection] = set()  # those being opened included
        self._idle: deque[Connection] = deque()  # the latest on the right; closed ones are dropped when met
        self._waiting: deque[asyncio.Future[Connection | None]] = deque()
        self._promised = 0  # slots given to those who waited, not yet in `_all`
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self, now: float) -> Connection | None:
        """The connection that was used last, if one is idle and not for too long."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if not connection.closed:
                if now - connection.idle_since < self._idle_discard:
                    return connection
                connection.close()
        return None

    async def acquire(self, timeouts: Timeouts, started: float, fresh: bool = False) -> Connection:
        """A connection that was just released, or a new one. Raises AttemptFailed.

        `started` is when the attempt began. `fresh`: none that lies idle (the slot of the stale one comes free).
        """
        with Watch(timeouts, started):
            while True:
                if self._closed:
                    raise AttemptFailed("cut", "the transport was closed")
                connection = None if fresh else self.take(self._loop.time())
                if connection is not None:
                    return connection
                if not self._waiting and len(self._all) + self._promised < self._slots:
                    return await self._open(timeouts.connect)
                connection = await self._wait()
                if connection is None:
                    return await self._open(timeouts.connect)
                if not connection.closed:
                    return connection

    def release(self, connection: Connection) -> None:
        """It has brought a whole answer and may bring another."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        if len(self._all) > self.keep:
            connection.close()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._timer is None:
            self._timer = self._loop.call_at(connection.idle_since + self._idle_discard, self._discard)

    async def aclose(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        failure = AttemptFailed("cut", "the transport was closed")
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(failure)
        closing = list(self._all)
        for connection in closing:
            connection.fail(failure)
        if made := [connection.lost for connection in closing if connection.made]:
            await asyncio.wait(made)

    async def _wait(self) -> Connection | None:
        """A connection, or None: a slot to open one in."""
        waiter: asyncio.Future[Connection | None] = self._loop.create_future()
        self._waiting.append(waiter)
        try:
            connection = await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._hand_on(waiter.result())
            raise
        if connection is None:
            self._promised -= 1
        return connection

    def _hand_on(self, connection: Connection | None) -> None:
        """What somebody got who no longer wants it."""
        if connection is None:
            self._promised -= 1
            self._promise()
        elif connection.usable:
            self.release(connection)

    def _promise(self) -> None:
        """There is a free slot: the first who waits may have it."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._promised += 1
                waiter.set_result(None)
                return

    def _gone(self, connection: Connection) -> None:
        if connection in self._all:
            self._all.remove(connection)
            self._promise()

    async def _open(self, limit: float) -> Connection:
        connection = Connection(self._loop, self._gone)
        self._all.add(connection)
        try:
            if (wait := self._pace.wait(self._loop.time())) > 0:
                await asyncio.sleep(wait)
            await self._within(limit, self._connect(connection))
        except BaseException as error:
            connection.close()
            self._gone(connection)
            if isinstance(error, (OSError, TimeoutError)):
                raise _translated(error) from error
            raise
        if connection.closed:
            raise AttemptFailed("cut", "closed as soon as it was opened")
        return connection

    async def _within(self, limit: float, connecting: Coroutine[None, None, None]) -> None:
        """Raises TimeoutError. A loop that stood still looks once more before it blames the endpoint."""
        begun, task = self._loop.time(), asyncio.create_task(connecting)
        try:
            done, _ = await asyncio.wait([task], timeout=limit)
            if not done and self._loop.time() - begun > limit + LATE_S:
                done, _ = await asyncio.wait([task], timeout=SPARE_S)
            if not done:
                raise TimeoutError
            task.result()
        finally:
            task.cancel()

    async def _connect(self, connection: Connection) -> None:
        origin = self._origin
        server_hostname = origin.host if self._tls else None
        await self._loop.create_connection(
            lambda: connection, origin.host, origin.port, ssl=self._tls, server_hostname=server_hostname
        )

    def _discard(self) -> None:
        """Close what lay idle for too long; ring again for the next."""
        self._timer = None
        idle, now = self._idle, self._loop.time()
        while idle and (idle[0].closed or now - idle[0].idle_since >= self._idle_discard):
            idle.popleft().close()
        if idle:
            self._timer = self._loop.call_at(idle[0].idle_since + self._idle_discard, self._discard)


def _translated(error: Exception) -> AttemptFailed:
    """TimeoutError is an OSError: the kernel's own too is one of connecting."""
    if isinstance(error, ssl.SSLError):
        return AttemptFailed("tls", str(error))
    if isinstance(error, TimeoutError):
        return AttemptFailed("connect_timeout", "no connection in time")
    return AttemptFailed("connect", str(error) or type(error).__name__)
