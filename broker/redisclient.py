"""How a redis-py client is made: for one server, for the primary that Sentinels name, for the node that owns our slot.

The last two are one thing: an address that somebody else knows and that may change. redis-py's Sentinel pool asks its
manager for it at every new connection; our manager asks Sentinels, or nodes of a cluster. A connection whose server
says that it is no longer the right one is dropped, as a lost connection, so that the next one leads elsewhere; so is an
idle one when another has found the right one.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final, Protocol

import redis
import redis.asyncio
import redis.asyncio.connection
import redis.asyncio.sentinel
import redis.exceptions
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.crc import key_slot
from redis.retry import Retry

from broker.addresses import RedisNodes, redis_nodes

CONNECT_TIMEOUT: Final = 5.0  # seconds
SOCKET_TIMEOUT: Final = 15.0  # seconds; blocking calls stay below it
ASK_TIMEOUT: Final = 1.0  # seconds for a Sentinel or a node that is asked for the way; there are others
LOOK_S: Final = 1.0  # how often Sentinels are asked whether another server is the primary now
LOOK_AGAIN_S: Final = 10.0  # and after one did not answer

ELSEWHERE: Final = (  # what a server says that is not, now, the one to speak to; redis-py cuts the first word off
    redis.exceptions.ReadOnlyError, redis.exceptions.AskError,  # MOVED is one
    redis.exceptions.ClusterDownError, redis.exceptions.TryAgainError,  # MASTERDOWN is one
)  # fmt: skip
ELSEWHERE_WORDS: Final = ("UNBLOCKED", "Script attempted to access a non local key")
AUTH_ERRORS: Final = (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError)

Address = tuple[str, int]
Search = Generator[tuple[Address, tuple[str, ...]], Any, Address]


class WrongWay(redis.exceptions.RedisError):
    """The URL leads nowhere, and waiting will not mend it; one line for people."""


def sync_client(url: str, prefix: str) -> redis.Redis:
    """Raises ValueError, without secrets; WrongWay at the first connection."""
    retry = Retry(NoBackoff(), 0)
    nodes = redis_nodes(url)
    if nodes is None:
        return redis.Redis.from_url(url, retry=retry, **_options(url))
    options, tls = _node_options(nodes)
    kind = _TlsConnection if tls else _Connection
    finder = _Finder(_lookup(nodes, prefix), _asking(nodes, options, tls))
    return redis.Redis.from_pool(_Pool("", finder, connection_class=kind, retry=retry, **options))


def async_client(url: str, prefix: str) -> redis.asyncio.Redis:
    """The same for asyncio, where whoever waits for a reply sets the limit."""
    retry = AsyncRetry(NoBackoff(), 0)
    nodes = redis_nodes(url)
    if nodes is None:
        return redis.asyncio.Redis.from_url(url, retry=retry, **_options(url) | {"socket_timeout": None})
    options, tls = _node_options(nodes)
    kind = _AsyncTlsConnection if tls else _AsyncConnection
    finder = _AsyncFinder(_lookup(nodes, prefix), _asking(nodes, options, tls))
    options |= {"socket_timeout": None}
    return redis.asyncio.Redis.from_pool(_AsyncPool("", finder, connection_class=kind, retry=retry, **options))


def _options(url: str) -> dict[str, Any]:
    timeouts = {"socket_connect_timeout": CONNECT_TIMEOUT, "socket_timeout": SOCKET_TIMEOUT}
    common: dict[str, Any] = {"decode_responses": False, "health_check_interval": 0, **timeouts}
    if not url.startswith("unix:"):
        common["socket_keepalive"] = True
    return common


def _node_options(nodes: RedisNodes) -> tuple[dict[str, Any], bool]:
    """For a connection to whichever node: all but its address. And whether it is TLS."""
    given = parse_url(nodes.one)
    for name in ("host", "port", "connection_class"):
        given.pop(name, None)
    return {**_options(nodes.one), **given}, nodes.one.startswith("rediss:")


def _asking(nodes: RedisNodes, options: dict[str, Any], tls: bool) -> dict[str, Any]:
    """For a connection to who knows the way. Nodes of a cluster have the credentials of all, Sentinels their own."""
    kept = {name: value for name, value in options.items() if name.startswith("ssl_")}
    user, password = (nodes.username, nodes.password) if nodes.service else map(options.get, ("username", "password"))
    timeouts = {"socket_connect_timeout": ASK_TIMEOUT, "socket_timeout": ASK_TIMEOUT}
    return {**kept, "username": user, "password": password, "ssl": tls, "protocol": 2, **timeouts}


# Who knows the way


class _Lookup(Protocol):
    """`search` yields whom to ask what, is sent the reply or the error, and returns the address."""

    changes_unsaid: ClassVar[bool]  # a server that is replaced may not say so itself

    def search(self) -> Search: ...

    def hint(self, error: Exception) -> None:
        """What a server said that is no longer the right one."""


def _lookup(nodes: RedisNodes, prefix: str) -> _Lookup:
    return SentinelLookup(nodes.nodes, nodes.service) if nodes.service else ClusterLookup(nodes.nodes, prefix)


class SentinelLookup:
    """Asks Sentinels in turn, who answered last first. One that has not heard of the last failover is not believed,
    unless all say so: then somebody set the Sentinels up anew.
    """

    changes_unsaid: ClassVar[bool] = True

    def __init__(self, sentinels: Sequence[Address], service: str) -> None:
        self._sentinels, self._service, self._epoch = list(sentinels), service, 0

    def hint(self, error: Exception) -> None:
        """Nothing to learn from."""

    def search(self) -> Search:
        silent: list[tuple[Address, Exception]] = []
        unknown, reason = 0, ""
        earlier: list[tuple[int, Address]] = []
        for sentinel in list(self._sentinels):
            reply = yield sentinel, ("SENTINEL", "MASTER", self._service)
            if isinstance(reply, Exception):
                if "No such master" in str(reply):
                    unknown += 1
                else:
                    silent.append((sentinel, reply))
                continue
            found = _mapping(reply)
            address, epoch, flags = (found["ip"], int(found["port"])), int(found["config-epoch"]), found["flags"]
            if "s_down" in flags or "o_down" in flags:
                reason = f"the primary {_shown(address)} of {self._service!r} is down, and has no successor yet"
            elif epoch < self._epoch:
                earlier.append((epoch, address))
            else:
                self._epoch = epoch
                self._sentinels = _first(sentinel, self._sentinels)
                return address
        if earlier:
            self._epoch, address = max(earlier)
            return address
        if reason:
            raise redis.exceptions.ConnectionError(reason)
        if unknown:
            raise WrongWay(f"its Sentinels know no service {self._service!r}; see `sentinel monitor` in their settings")
        if all(isinstance(error, AUTH_ERRORS) for _, error in silent):
            raise WrongWay(f"its Sentinels refuse us ({_why(silent)}); check redis.sentinel_password")
        raise redis.exceptions.ConnectionError(f"no Sentinel answers ({_why(silent)})")


class ClusterLookup:
    """Asks nodes for the one that owns the slot of our tag; all our keys are in it. Learns of further nodes."""

    changes_unsaid: ClassVar[bool] = False

    def __init__(self, nodes: Sequence[Address], prefix: str) -> None:
        tag = prefix.partition("{")[2].partition("}")
        if not (tag[0] and tag[1]):
            raise ValueError(
                f"a Redis Cluster needs one hash tag in the key prefix, which is {prefix!r}; "
                "set RQ_KEY_PREFIX={headrace} for every process"
            )
        self._nodes, self._slot = list(nodes), key_slot(prefix.encode())

    def hint(self, error: Exception) -> None:
        if isinstance(error, redis.exceptions.MovedError):  # that node knows better than the one we asked
            self._nodes = _first((str(error.host), int(error.port)), self._nodes)

    def search(self) -> Search:
        silent: list[tuple[Address, Exception]] = []
        for node in list(self._nodes):
            reply = yield node, ("CLUSTER", "SLOTS")
            if isinstance(reply, Exception):
                silent.append((node, reply))
                continue
            rows = [(row[0], row[1], [(_text(each[0]) or node[0], int(each[1])) for each in row[2:]]) for row in reply]
            known = dict.fromkeys([node, *self._nodes, *(each for row in rows for each in row[2])])
            for low, high, (owner, *_) in rows:
                if low <= self._slot <= high:
                    self._nodes = list(known)
                    return owner
            silent.append((node, LookupError(f"nobody serves slot {self._slot}")))
        if any("cluster support disabled" in str(error) for _, error in silent):
            raise WrongWay("it is no Redis Cluster; use redis://")
        if all(isinstance(error, AUTH_ERRORS) for _, error in silent):
            raise silent[0][1]
        raise redis.exceptions.ConnectionError(f"no node knows the way ({_why(silent)})")


def _first(one: Address, others: Iterable[Address]) -> list[Address]:
    return list(dict.fromkeys([one, *others]))


def _mapping(reply: Any) -> dict[str, str]:
    flat = iter(reply)
    return {_text(name): _text(value) for name, value in zip(flat, flat, strict=True)}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


def _shown(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why(silent: Sequence[tuple[Address, Exception]]) -> str:
    """The first reason; a Sentinel's own words may hold its address already."""
    address, error = silent[0]
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return reason if _shown(address) in reason else f"{_shown(address)}: {reason}"


# redis-py's side


class _Way:
    """What both finders know: the address found last, and when to look whether it is still the right one.

    A primary that was replaced by order takes writes, which will be lost, until its Sentinels get to it: ten seconds.
    """

    def __init__(self, lookup: _Lookup) -> None:
        self.lookup = lookup
        self._found: Address | None = None
        self._look_at = 0.0

    def _is_due(self) -> bool:
        if not self.lookup.changes_unsaid or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_AGAIN_S  # until it has worked
        return True

    def _note(self, address: Address) -> Address:
        self._found, self._look_at = address, time.monotonic() + LOOK_S
        return address

    def _has_left(self, connection: Any) -> bool:
        return self._found is not None and self._found != (connection.host, connection.port)


class _Finder(_Way):
    """Stands in the place of redis-py's Sentinel manager."""

    def __init__(self, lookup: _Lookup, asking: dict[str, Any]) -> None:
        super().__init__(lookup)
        self._asking = asking
        self._clients: dict[Address, redis.Redis] = {}
        self._retry = Retry(NoBackoff(), 0)

    def discover_master(self, service_name: str) -> Address:
        search, reply = self.lookup.search(), None
        while True:
            try:
                node, command = search.send(reply)
            except StopIteration as end:
                return self._note(end.value)
            try:
                reply = self._client(node).execute_command(*command)
            except (redis.exceptions.RedisError, OSError) as error:
                reply = error

    def is_elsewhere(self, connection: Any) -> bool:
        """Whether the connection leads to a server that is not the right one any longer."""
        if self._is_due():
            with suppress(redis.exceptions.RedisError):
                self.discover_master("")
        return self._has_left(connection)

    def _client(self, node: Address) -> redis.Redis:
        if node not in self._clients:
            self._clients[node] = redis.Redis(host=node[0], port=node[1], retry=self._retry, **self._asking)
        return self._clients[node]

    def close(self) -> None:
        for client in list(self._clients.values()):
            client.close()


class _AsyncFinder(_Way):
    """The same for asyncio."""

    def __init__(self, lookup: _Lookup, asking: dict[str, Any]) -> None:
        super().__init__(lookup)
        self._asking = asking
        self._clients: dict[Address, redis.asyncio.Redis] = {}
        self._retry = AsyncRetry(NoBackoff(), 0)

    async def discover_master(self, service_name: str) -> Address:
        search, reply = self.lookup.search(), None
        while True:
            try:
                node, command = search.send(reply)
            except StopIteration as end:
                return self._note(end.value)
            try:
                reply = await self._client(node).execute_command(*command)
            except (redis.exceptions.RedisError, OSError) as error:
                reply = error

    async def is_elsewhere(self, connection: Any) -> bool:
        if self._is_due():
            with suppress(redis.exceptions.RedisError):
                await self.discover_master("")
        return self._has_left(connection)

    def _client(self, node: Address) -> redis.asyncio.Redis:
        if node not in self._clients:
            self._clients[node] = redis.asyncio.Redis(host=node[0], port=node[1], retry=self._retry, **self._asking)
        return self._clients[node]

    async def close(self) -> None:
        for client in list(self._clients.values()):
            await client.aclose()


class _Pool(redis.sentinel.SentinelConnectionPool):
    def disconnect(self, inuse_connections: bool = True) -> None:
        super().disconnect(inuse_connections)
        if inuse_connections:
            self.sentinel_manager.close()


class _AsyncPool(redis.asyncio.sentinel.SentinelConnectionPool):
    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.close()


def _elsewhere(error: Exception) -> str:
    """Why the server is not the one to speak to; "" if it is."""
    text = str(error)
    return f"it does not serve this now ({text})" if isinstance(error, ELSEWHERE) or _said(text) else ""


def _said(text: str) -> bool:
    return any(words in text[:80] for words in ELSEWHERE_WORDS)


class _Connection(redis.sentinel.SentinelManagedConnection):
    def can_read(self, *args: Any, **options: Any) -> bool:
        """Asked of each idle connection before it is used again: the moment to lead it to where the right server is."""
        if self.connection_pool.sentinel_manager.is_elsewhere(self):
            self.disconnect()
            self.connect()
        return bool(super().can_read(*args, **options))

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            # past redis-py's own, which does this for READONLY alone
            return super(redis.sentinel.SentinelManagedConnection, self).read_response(*args, **options)
        except redis.exceptions.ResponseError as error:
            reason = _elsewhere(error)
            if not reason:
                raise
            self.connection_pool.sentinel_manager.lookup.hint(error)
            self.disconnect()
            raise redis.exceptions.ConnectionError(reason) from error


class _TlsConnection(_Connection, redis.sentinel.SentinelManagedSSLConnection):
    pass


class _AsyncConnection(redis.asyncio.sentinel.SentinelManagedConnection):
    async def can_read(self, *args: Any, **options: Any) -> bool:
        if await self.connection_pool.sentinel_manager.is_elsewhere(self):
            await self.disconnect()
            await self.connect()
        old: Any = super()  # redis-py before 7 has another name for it
        return bool(await (old.can_read if hasattr(old, "can_read") else old.can_read_destructive)(*args, **options))

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super(redis.asyncio.sentinel.SentinelManagedConnection, self).read_response(*args, **options)
        except redis.exceptions.ResponseError as error:
            reason = _elsewhere(error)
            if not reason:
                raise
            self.connection_pool.sentinel_manager.lookup.hint(error)
            await self.disconnect()
            raise redis.exceptions.ConnectionError(reason) from error


class _AsyncTlsConnection(_AsyncConnection, redis.asyncio.sentinel.SentinelManagedSSLConnection):
    pass
