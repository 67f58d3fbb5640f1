"""Connections to Redis without redis-py's pipelines: packed commands out, replies in, nothing repeated.

redis-py makes, opens and checks each connection (addresses, TLS, credentials, Sentinel); its pipelines and pools cost
several times what a round trip does, so what is kept idle is kept here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import hiredis
import redis
import redis.exceptions

Words = Sequence[str | bytes | int | float]

_IN_DOUBT: Final = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)


def packed(commands: Sequence[Words]) -> bytes:
    """As they go over the wire. Numbers are made text here: hiredis 3.5 does not survive a signal handler that raises
    while it does that."""
    texts = [[word if isinstance(word, (str, bytes)) else str(word) for word in command] for command in commands]
    return b"".join([hiredis.pack_command(cast(Any, tuple(words))) for words in texts])


class Links:
    """Round trips from any thread. `pool` tells the redis-py pool whose kind of connection is opened."""

    def __init__(self, pool: Callable[[], Any]) -> None:
        self._pool = pool
        self._idle: list[Any] = []
        self._pid = os.getpid()

    def exchange(self, commands: Sequence[Words]) -> list[Any]:
        """The replies, errors of the server among them. Raises redis-py's connection errors."""
        return self._talk([packed(commands)], len(commands))

    def stream(self, commands: Iterable[Words], count: int) -> list[Any]:
        """The same for `count` commands that are made while those before them are on their way."""
        return self._talk((packed([command]) for command in commands), count)

    def _talk(self, pieces: Iterable[bytes], replies_due: int) -> list[Any]:
        if self._pid != os.getpid():  # a fork: the parent talks on these
            self._idle, self._pid = [], os.getpid()
        link = self._take()
        try:
            for piece in pieces:
                link.send_packed_command([piece], check_health=False)
            replies = [_reply(link) for _ in range(replies_due)]
        except BaseException:  # replies may be under way that the next caller must not see
            with suppress(Exception):
                link.disconnect()
            raise
        self._idle.append(link)
        return replies

    def close(self) -> None:
        """Those that lie idle."""
        while self._idle:
            with suppress(Exception):
                self._idle.pop().disconnect()

    def _take(self) -> Any:
        try:
            link = self._idle.pop()
        except IndexError:
            pool = self._pool()
            link = pool.connection_class(**pool.connection_kwargs)
            link.connect()
            return link
        try:
            stale = link.can_read(timeout=0)  # nothing was asked: the server has closed it
        except _IN_DOUBT:
            stale = True
        if stale:
            link.disconnect()
            link.connect()
        return link


def _reply(link: Any) -> Any:
    try:
        return link.read_response()
    except redis.exceptions.ResponseError as error:
        return error


class AsyncLinks:
    """The same on an event loop. `limit` in seconds is for a whole round trip; a canceled one drops its connection."""

    def __init__(self, pool: Callable[[], Any], limit: float) -> None:
        self._pool = pool
        self._limit = limit
        self._idle: list[Any] = []

    async def exchange(self, commands: Sequence[Words]) -> list[Any]:
        """The replies, errors of the server among them. Raises redis-py's connection errors."""
        return await self._talk([packed(commands)], len(commands))

    async def stream(self, commands: Iterable[Words], count: int) -> list[Any]:
        """As `Links.stream`."""
        return await self._talk((packed([command]) for command in commands), count)

    async def _talk(self, pieces: Iterable[bytes], replies_due: int) -> list[Any]:
        link = self._idle.pop() if self._idle else self._pool().make_connection()
        try:
            async with asyncio.timeout(self._limit):
                if await _is_stale(link):
                    await link.disconnect()
                await link.connect()
                for piece in pieces:
                    await link.send_packed_command([piece], check_health=False)
                replies = [await _async_reply(link) for _ in range(replies_due)]
        except BaseException as error:
            with suppress(Exception):
                await link.disconnect(nowait=True)
            if isinstance(error, TimeoutError):
                raise redis.exceptions.TimeoutError("no reply in time") from error
            raise
        self._idle.append(link)
        return replies

    async def close(self) -> None:
        """Those that lie idle."""
        while self._idle:
            with suppress(Exception):
                await self._idle.pop().disconnect()


async def _is_stale(link: Any) -> bool:
    """Open, and something to read though nothing was asked: the server has closed it."""
    if not link.is_connected:
        return False
    try:
        return bool(await (link.can_read() if hasattr(link, "can_read") else link.can_read_destructive()))
    except _IN_DOUBT:
        return True


async def _async_reply(link: Any) -> Any:
    try:
        return await link.read_response()
    except redis.exceptions.ResponseError as error:
        return error
