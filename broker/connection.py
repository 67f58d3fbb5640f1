"""How a client gets to Redis and stays there: the embedded server, forks, the one check, and repeated tries."""

from __future__ import annotations

import os
import threading
from itertools import count
from pathlib import Path
from typing import Any, Final

from tenacity import retry_if_exception_type, stop_after_delay, wait_random_exponential

from broker.addresses import EMBEDDED, redis_address, redis_url_with
from broker.configmodel import DATA_FOLDER
from broker.embedded import EmbeddedServer
from broker.errors import BrokerUnavailable, BrokerUnsuitable, EmbeddedServerError

PATIENCE: Final = 6.0  # seconds of trying again when Redis is away, for a call that does something
AT_ONCE: Final = 32  # commands of one client at a time; the others wait here, not as connections at the server
LONG_PATIENCE: Final = 120.0  # for a call that waits for results: a restart of Redis must not end a long run


class Turns:
    """For threads: a lock to hold for each of so many commands at a time. The others wait for one.

    An exception out of a signal handler may come between any two steps of Python code. The interpreter's own locks are
    taken and given back by `with` in one step each; threading's semaphores, conditions and events are Python code, and
    what an exception takes out of their hands is taken for ever.
    """

    def __init__(self, most: int = AT_ONCE) -> None:
        self._locks = [threading.Lock() for _ in range(most)]
        self._waits = count()

    def one(self) -> threading.Lock:
        """One that is free, or the next in turn."""
        for lock in self._locks:
            if not lock.locked():
                return lock
        return self._locks[next(self._waits) % len(self._locks)]


def again(patience: float) -> dict[str, Any]:
    """tenacity's terms for one step: connection errors only, full jitter, `patience` seconds in all."""
    return {
        "stop": stop_after_delay(patience),
        "wait": wait_random_exponential(multiplier=0.05, max=2.0),
        "retry": retry_if_exception_type(BrokerUnavailable),
        "reraise": True,
    }


class Address:
    """The Redis that `url` means. For `embedded` it holds a share in the folder's server, from `connect` to `close`."""

    def __init__(self, url: str, folder: str | os.PathLike[str] | None = None) -> None:
        try:
            parsed = redis_address(url)
        except ValueError as error:
            raise BrokerUnsuitable(f"redis.url: {error}") from None
        self.embedded = parsed.url == EMBEDDED
        self._url = redis_url_with(
            parsed.url, parsed.username, parsed.password, parsed.sentinel_username, parsed.sentinel_password
        )
        self._folder = Path(folder) if folder is not None else Path(DATA_FOLDER)
        self._server: EmbeddedServer | None = None

    def connect(self) -> str:
        """The URL to connect to. Starts the embedded server if need be. Raises EmbeddedServerError."""
        if not self.embedded:
            return self._url
        if self._server is None:
            self._server = EmbeddedServer.acquire(self._folder)
        return self._server.url

    def revive(self) -> None:
        """After a lost connection: starts the embedded server again if it died. Raises BrokerUnavailable."""
        if self._server is not None:
            try:
                self._server.ensure()
            except EmbeddedServerError as error:
                raise BrokerUnavailable(str(error)) from error

    def after_fork(self) -> None:
        """In a child: the parent's share is not ours."""
        self._server = None

    def close(self) -> None:
        if self._server is not None:
            self._server.release()
            self._server = None

    def __repr__(self) -> str:
        return EMBEDDED if self.embedded else redis_address(self._url).url
