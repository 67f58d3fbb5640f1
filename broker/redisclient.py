"""How a redis-py client is made: for one server, for the primary that Sentinels name, for the node that owns our slot.

The last two are one thing: an address that somebody else knows and that may change. redis-py's Sentinel pool asks its
manager for it at every new connection; our manager asks Sentinels, or nodes of a cluster (`broker/redislookup.py`). A
connection whose server says that it is no longer the right one is dropped, as a lost connection, so that the next one
leads elsewhere; so is an idle one when another has found the right one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, cast

import redis
import redis.asyncio
import redis.asyncio.connection
import redis.asyncio.sentinel
import redis.exceptions
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from broker.addresses import RedisNodes, redis_nodes
from broker.redislookup import Address, ClusterLookup, Lookup, SentinelLookup, mapping

CONNECT_TIMEOUT: Final = 5.0  # seconds
SOCKET_TIMEOUT: Final = 15.0  # seconds; blocking calls stay below it
ASK_TIMEOUT: Final = 1.0  # seconds for a Sentinel or a node that is asked for the way; there are others
LOOK_S: Final = 1.0  # how often Sentinels are asked whether another server is the primary now
LOOK_RESTS: Final = 3.0  # and no sooner than so many times what a look took: some do not answer

ELSEWHERE: Final = (  # what a server says that is not, now, the one to speak to; redis-py cuts the first word off
    redis.exceptions.ReadOnlyError, redis.exceptions.AskError,  # MOVED is one
    redis.exceptions.ClusterDownError, redis.exceptions.TryAgainError,  # MASTERDOWN is one
)  # fmt: skip
PRIMARY: Final = ("master", "primary")  # as HELLO says it
ELSEWHERE_WORDS: Final = ("UNBLOCKED", "Script attempted to access a non local key")


def sync_client(url: str, prefix: str) -> redis.Redis:
    """Raises ValueError, without secrets; WrongWay at the first connection."""
    retry = Retry(NoBackoff(), 0)
    nodes = redis_nodes(url)
    if nodes is None:
        return redis.Redis.from_url(url, retry=retry, **_options(url))
    options, tls = _node_options(nodes)
    kind = _TlsConnection if tls else _Connection
    asking = _asking(nodes, options, tls)
    finder = _Finder(
        _lookup(nodes, prefix), lambda node: redis.Redis(host=node[0], port=node[1], retry=retry, **asking)
    )
    return redis.Redis.from_pool(_Pool("", finder, connection_class=kind, retry=retry, **options))


def async_client(url: str, prefix: str) -> redis.asyncio.Redis:
    """The same for asyncio, where whoever waits for a reply sets the limit."""
    retry = AsyncRetry(NoBackoff(), 0)
    nodes = redis_nodes(url)
    if nodes is None:
        return redis.asyncio.Redis.from_url(url, retry=retry, **_options(url) | {"socket_timeout": None})
    options, tls = _node_options(nodes)
    kind = _AsyncTlsConnection if tls else _AsyncConnection
    asking = _asking(nodes, options, tls)
    finder = _AsyncFinder(
        _lookup(nodes, prefix), lambda node: redis.asyncio.Redis(host=node[0], port=node[1], retry=retry, **asking)
    )
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


def _lookup(nodes: RedisNodes, prefix: str) -> Lookup:
    return SentinelLookup(nodes.nodes, nodes.service) if nodes.service else ClusterLookup(nodes.nodes, prefix)


class _Way:
    """What both finders know: when to look whether the address found last is still the right one, and whom to ask.

    A primary that was replaced by order takes writes, which will be lost, until its Sentinels get to it: ten seconds.
    """

    def __init__(self, lookup: Lookup, connect: Callable[[Address], Any]) -> None:
        self.lookup = lookup
        self._connect = connect
        self._clients: dict[Address, Any] = {}
        self._look_at = 0.0

    def _is_due(self) -> bool:
        return self.lookup.changes_unsaid and time.monotonic() >= self._look_at

    def _begin(self) -> float:
        """One looks, the others go on with what is known."""
        now = time.monotonic()
        self._look_at = now + LOOK_S * LOOK_RESTS
        return now

    def _end(self, began: float) -> None:
        """Whatever was said: that the primary is down and has no successor yet is no reason to wait longer."""
        now = time.monotonic()
        self._look_at = now + max(LOOK_S, (now - began) * LOOK_RESTS)

    def _has_left(self, connection: Any) -> bool:
        return self.lookup.found not in (None, (connection.host, connection.port))

    def _client(self, node: Address) -> Any:
        if node not in self._clients:
            self._clients[node] = self._connect(node)
        return self._clients[node]


def _result(search: Coroutine[Any, Any, Address]) -> Address:
    """Of a search that never waits: what it asks with does not."""
    try:
        search.send(None)
    except StopIteration as end:
        return cast(Address, end.value)
    raise AssertionError("it waits")


class _Finder(_Way):
    """Stands in the place of redis-py's Sentinel manager."""

    def discover_master(self, service_name: str) -> Address:
        began = self._begin()
        try:
            return _result(self.lookup.search(self._ask))
        finally:
            self._end(began)

    async def _ask(self, node: Address, command: tuple[str, ...]) -> Any:
        try:
            return self._client(node).execute_command(*command)
        except (redis.exceptions.RedisError, OSError) as error:
            return error

    def is_elsewhere(self, connection: Any) -> bool:
        """Whether the connection leads to a server that is not the right one any longer."""
        if self._is_due():
            with suppress(redis.exceptions.RedisError):
                self.discover_master("")
        return self._has_left(connection)

    def close(self) -> None:
        for client in list(self._clients.values()):
            client.close()


class _AsyncFinder(_Way):
    """The same for asyncio."""

    async def discover_master(self, service_name: str) -> Address:
        began = self._begin()
        try:
            return await self.lookup.search(self._ask)
        finally:
            self._end(began)

    async def _ask(self, node: Address, command: tuple[str, ...]) -> Any:
        try:
            return await self._client(node).execute_command(*command)
        except (redis.exceptions.RedisError, OSError) as error:
            return error

    async def is_elsewhere(self, connection: Any) -> bool:
        if self._is_due():
            with suppress(redis.exceptions.RedisError):
                await self.discover_master("")
        return self._has_left(connection)

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


def _check_role(reply: Any) -> None:
    """Of HELLO, which everybody may say: Sentinels may not have heard yet that it is a replica now."""
    if mapping(reply).get("role") not in PRIMARY:
        raise redis.exceptions.ConnectionError("the server that was named as the primary is a replica")


class _Connection(redis.sentinel.SentinelManagedConnection):
    def connect_to(self, address: Address) -> None:
        super().connect_to(address)
        if not self.connection_pool.sentinel_manager.lookup.changes_unsaid:
            return
        try:
            self.send_command("HELLO", check_health=False)
            _check_role(self.read_response())
        except BaseException:
            self.disconnect()
            raise

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
    async def connect_to(self, address: Address) -> None:
        await super().connect_to(address)
        if not self.connection_pool.sentinel_manager.lookup.changes_unsaid:
            return
        try:
            await self.send_command("HELLO", check_health=False)
            _check_role(await self.read_response())
        except BaseException:
            await self.disconnect(nowait=True)
            raise

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
