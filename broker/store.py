"""The connection to Redis, sync and async, and the only place that knows redis-py.

redis-py's own retries are off: it repeats a command whose reply was lost, and so queues twice. What may be repeated is
decided here: scripts whose repeat is harmless by design (ids chosen by the client, fenced settles).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import redis
import redis.asyncio
import redis.exceptions

from broker.addresses import mask_url
from broker.errors import BrokerError, BrokerUnavailable, BrokerUnsuitable, QueueFull
from broker.keys import Keys, default_prefix
from broker.links import AsyncLinks, Links
from broker.redisclient import ELSEWHERE, SOCKET_TIMEOUT, async_client, sync_client
from broker.redislookup import WrongWay
from broker.scripts import Command, Scripts

T = TypeVar("T")

BLOCK_AT_MOST = 10.0  # seconds a blocking pop may wait
MINIMUM_VERSION = (7, 0)
WANTED_SERVER = "use Redis 7.0 or newer, or Valkey"
PASSING = ("BUSY", "NOREPLICAS", "UNKILLABLE")

# What a script may not do, which the server says in words of its own and with the place in the script.
ACL_IN_SCRIPT = re.compile(
    r"(?:ERR )?(?:ACL failure in script: )?(?P<what>(?<=script: ).*?|The user executing the script can't .*?)"
    r"(?: script: .*)?$"
)
IN_CLUSTER = "it is a node of a Redis Cluster; use redis+cluster://host:port and RQ_KEY_PREFIX={headrace}"
UVLOOP_CLOSED = "the handler is closed"  # a RuntimeError of uvloop, for what is written to a connection that was reset

# What a read gives of a key that is not there. A key of another type, which a stranger must have put there, reads the
# same: one mangled key must not fail the page, the pool and the scrape that it is looked at in.
NOTHING: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(("GET", "HGET", "LINDEX", "LPOS", "ZSCORE"), lambda _: None),
    **dict.fromkeys(("HKEYS", "LRANGE", "XREVRANGE", "ZRANGE"), lambda _: []),
    **dict.fromkeys(("LLEN", "ZCARD", "ZCOUNT"), lambda _: 0),
    "HGETALL": lambda _: {},
    "HMGET": lambda command: [None] * (len(command) - 2),
    "SMEMBERS": lambda _: set(),
}

CONNECTION_ERRORS = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)


def masked(url: str) -> str:
    """The URL without its credentials: a password is often given where the user should be."""
    return mask_url(url)


def translate(error: Exception, url: str) -> BrokerError:
    """redis-py's errors in our terms; one line with the remedy."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    in_script = ACL_IN_SCRIPT.match(text)
    if isinstance(error, redis.exceptions.AuthenticationError | redis.exceptions.NoPermissionError) or in_script:
        if text.startswith(("HELLO", "NOAUTH", "Authentication required")):
            return BrokerUnsuitable(f"Redis at {masked(url)} wants a password: give it in redis.url or redis.password")
        text = (in_script["what"] if in_script else text).rstrip(".")
        remedy = "check the user and password in redis.url"
        if isinstance(error, redis.exceptions.NoPermissionError) or in_script:
            remedy = "give its user the rules of its role, as in docs/security.md"
        return BrokerUnsuitable(f"Redis at {masked(url)} refuses us: {text}; {remedy}")
    place = f"Redis at {masked(url)}"
    if isinstance(error, WrongWay):
        return BrokerUnsuitable(f"{place}: {text}")
    if isinstance(error, redis.exceptions.MovedError) or text.startswith("CROSSSLOT"):
        return BrokerUnsuitable(f"{place}: {IN_CLUSTER}")
    if text.startswith("UNBLOCKED"):  # a blocking call, when the server became a replica
        return BrokerUnavailable(f"{place} is a replica now")
    if isinstance(error, CONNECTION_ERRORS):
        return BrokerUnavailable(f"{place} cannot be reached: {text}; is it running, is redis.url right?")
    if text.startswith("MISCONF"):
        reason = text.partition(" ")[2]
        failure = BrokerError(f"{place} cannot write its data ({reason}); free disk space where it keeps it")
        failure.passing = True
        return failure
    if "OOM" in text[:40] or isinstance(error, redis.exceptions.OutOfMemoryError):
        return QueueFull(f"{place} is at its memory limit; nothing was queued; drain tasks or raise maxmemory")
    if re.match("unknown command .HELLO", text):
        return BrokerUnsuitable(f"{place}: the server is too old; {WANTED_SERVER}")
    failure = BrokerError(f"{place}: {text}")
    failure.passing = isinstance(error, ELSEWHERE) or text.startswith(PASSING)
    return failure


def _evalsha(command: Command[Any]) -> tuple[Any, ...]:
    return ("EVALSHA", command.script.sha, 1, command.key, *command.args)


def _eval(command: Command[Any]) -> tuple[Any, ...]:
    """With its source, which the server then keeps: nothing that is flushed in between can make it fail."""
    return ("EVAL", command.script.source, 1, command.key, *command.args)


def _unknown(replies: Sequence[Any]) -> list[int]:
    """Positions of commands whose script the server does not have (any longer)."""
    return [i for i, reply in enumerate(replies) if isinstance(reply, redis.exceptions.NoScriptError)]


def _as_redis_py(client: Any, commands: Sequence[tuple[Any, ...]], replies: Sequence[Any]) -> list[Any]:
    """Replies of plain commands as its methods give them: INFO and HGETALL are dicts, SMEMBERS a set ...

    Raises the first error among them, unless all it says is that there is nothing to read.
    """
    callbacks: Mapping[str, Callable[[Any], Any]] = client.response_callbacks
    found: list[Any] = []
    for command, reply in zip(commands, replies, strict=True):
        if isinstance(reply, Exception):
            if command[0] not in NOTHING or not str(reply).startswith("WRONGTYPE"):
                raise reply
            found.append(NOTHING[command[0]](command))
        else:
            found.append(callbacks[command[0]](reply) if command[0] in callbacks else reply)
    return found


def _reply(client: redis.Redis, *words: Any) -> str:
    """Sends it as it is; "" unless the server refuses it."""
    connection = cast(Any, client).connection
    connection.send_command(*words)
    try:
        connection.read_response()
    except redis.exceptions.ResponseError as error:
        return str(error).splitlines()[0].rstrip(".")
    return ""


def _parsed(commands: Sequence[Command[Any]], replies: Sequence[Any], url: str) -> list[Any]:
    """What the replies say, with a translated error in the place of one."""
    return [
        translate(reply, url) if isinstance(reply, Exception) else command.parse(reply)
        for command, reply in zip(commands, replies, strict=True)
    ]


def _outage_raised(replies: list[Any]) -> list[Any]:
    """The replies, unless one says that Redis is away, loading its data say: all may be asked again then."""
    for reply in replies:
        if isinstance(reply, BrokerUnavailable):
            raise reply
    return replies


def _first_error(replies: Sequence[Any]) -> Exception | None:
    return next((reply for reply in replies if isinstance(reply, Exception)), None)


class Store:
    """Runs commands on one Redis, from any thread. `url` is redis://, rediss://, unix://, or has Sentinels or cluster
    nodes that know where it is. In a cluster the prefix holds one {tag}.

    Raises BrokerUnavailable, BrokerUnsuitable, QueueFull, BrokerError.
    """

    def __init__(self, url: str, *, prefix: str | None = None, clock_key: str = "") -> None:
        self.url = url
        self.keys = Keys(prefix or default_prefix())
        self.scripts = Scripts(self.keys, clock_key)
        try:
            self.redis: redis.Redis = sync_client(url, self.keys.prefix)
        except ValueError as error:
            raise BrokerUnsuitable(f"redis.url {masked(url)!r}: {error}") from None
        self._links = Links(lambda: self.redis.connection_pool)

    def run(self, command: Command[T]) -> T:
        return cast(T, self.run_many([command])[0])

    def run_many(self, commands: Sequence[Command[Any]]) -> list[Any]:
        """One round trip. The replies in order; the first error is raised after all have run."""
        replies = self._replies(commands, lambda: self._links.exchange([_evalsha(command) for command in commands]))
        if failed := _first_error(replies):
            raise translate(failed, self.url) from failed
        return [command.parse(reply) for command, reply in zip(commands, replies, strict=True)]

    def stream(self, commands: Sequence[Command[Any]]) -> list[Any]:
        """One round trip, each command on its way while the next is made. The replies in order, with a translated error
        in the place of one that failed."""
        replies = self._replies(commands, lambda: self._links.stream(map(_evalsha, commands), len(commands)))
        return _outage_raised(_parsed(commands, replies, self.url))

    def _replies(self, commands: Sequence[Command[Any]], send: Callable[[], list[Any]]) -> list[Any]:
        try:
            replies = send()
            if missing := _unknown(replies):
                again = self._links.exchange([_eval(commands[i]) for i in missing])
                for i, reply in zip(missing, again, strict=True):
                    replies[i] = reply
        except (redis.exceptions.RedisError, OSError) as error:
            raise translate(error, self.url) from error
        return replies

    def raw(self, use: Callable[[redis.Redis], T]) -> T:
        """Runs `use` on the client; its errors are translated."""
        try:
            return use(self.redis)
        except (redis.exceptions.RedisError, OSError) as error:
            raise translate(error, self.url) from error

    def pipelined(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Plain commands in one round trip. A key of another type than a command reads is as one that is not there."""
        if not commands:
            return []
        try:
            return _as_redis_py(self.redis, commands, self._links.exchange(commands))
        except (redis.exceptions.RedisError, OSError) as error:
            raise translate(error, self.url) from error

    def blocking(self, *command: Any) -> Any:
        """One command that may block on the server, on a connection that no one else gets meanwhile."""
        return self.pipelined([command])[0]

    def rehearse(self, commands: Sequence[tuple[Any, ...]]) -> list[str] | None:
        """For each command, why the server would not let this user run it; "" if it would. None runs.

        They are queued in a transaction that is discarded: rights are checked when a command is queued. None if the
        user may not have transactions.
        """

        def ask(client: redis.Redis) -> list[str] | None:
            with cast(Any, client).client() as one:
                try:
                    if _reply(one, "MULTI"):
                        return None
                    return [_reply(one, *command) for command in commands]
                finally:  # whatever was queued is gone with its connection
                    if one.connection is not None:
                        one.connection.disconnect()

        return self.raw(ask)

    def check(self) -> None:
        """Refuses a Redis that is too old or that evicts: it would lose tasks in silence."""
        info = self.raw(lambda client: client.info())
        complaint = unsuitable(info, self.url)
        if complaint:
            raise BrokerUnsuitable(f"Redis at {masked(self.url)}: {complaint}")

    def close(self) -> None:
        self._links.close()
        with suppress(Exception):
            self.redis.close()


def unsuitable(info: dict[str, Any], url: str = "") -> str:
    """What is wrong with a server that `url` led to, from its INFO; "" if nothing."""
    version = str(info.get("valkey_version") or info.get("redis_version") or "0")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < MINIMUM_VERSION:
        return f"version {version} is too old; {WANTED_SERVER}"
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        return f"maxmemory-policy is {policy}: it would drop tasks; set it to noeviction"
    if str(info.get("role", "master")) != "master":
        return "it is a replica; give the address of the primary"
    if info.get("cluster_enabled") and "+cluster:" not in url:
        return IN_CLUSTER
    return ""


class AsyncStore:
    """The same for asyncio. One connection carries the commands of one caller at a time.

    A call that is canceled finishes in the background: abandoned half-way, its reply would go to the next caller.
    """

    def __init__(self, url: str, *, prefix: str | None = None, clock_key: str = "") -> None:
        self.url = url
        self.keys = Keys(prefix or default_prefix())
        self.scripts = Scripts(self.keys, clock_key)
        try:
            self.redis: redis.asyncio.Redis = async_client(url, self.keys.prefix)
        except ValueError as error:
            raise BrokerUnsuitable(f"redis.url {masked(url)!r}: {error}") from None
        self._links = AsyncLinks(lambda: self.redis.connection_pool, SOCKET_TIMEOUT)
        self._background: set[asyncio.Future[Any]] = set()

    async def run(self, command: Command[T]) -> T:
        return cast(T, (await self.run_many([command]))[0])

    async def run_many(self, commands: Sequence[Command[Any]]) -> list[Any]:
        """One round trip. The replies in order; the first error is raised after all have run."""
        replies = _parsed(commands, await self._guarded(self._attempt(commands)), self.url)
        if error := _first_error(replies):
            raise error
        return replies

    async def stream(self, commands: Sequence[Command[Any]]) -> list[Any]:
        """As `Store.stream`."""
        return _outage_raised(_parsed(commands, await self._guarded(self._attempt(commands, streamed=True)), self.url))

    async def try_many(self, commands: Sequence[Command[Any]]) -> list[Any]:
        """As `run_many`, with a translated error standing in the place of a reply that failed. For commands that may be
        repeated: canceled, it drops its connection instead of waiting in the background."""
        return _parsed(commands, await self._translated(self._attempt(commands)), self.url)

    async def _attempt(self, commands: Sequence[Command[Any]], *, streamed: bool = False) -> list[Any]:
        if streamed:
            replies = await self._links.stream(map(_evalsha, commands), len(commands))
        else:
            replies = await self._links.exchange([_evalsha(command) for command in commands])
        if missing := _unknown(replies):
            again = await self._links.exchange([_eval(commands[i]) for i in missing])
            for i, reply in zip(missing, again, strict=True):
                replies[i] = reply
        return replies

    async def _guarded(self, work: Awaitable[T]) -> T:
        future = asyncio.ensure_future(work)
        self._background.add(future)
        future.add_done_callback(self._forget)
        return await self._translated(asyncio.shield(future))

    async def _translated(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except (redis.exceptions.RedisError, OSError) as error:
            raise translate(error, self.url) from error
        except RuntimeError as error:
            if UVLOOP_CLOSED not in str(error):
                raise
            raise translate(ConnectionResetError("the connection was reset"), self.url) from error

    def _forget(self, future: asyncio.Future[Any]) -> None:
        self._background.discard(future)
        if not future.cancelled():
            future.exception()  # seen, so that asyncio does not report an abandoned call

    async def pipelined(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `Store.pipelined`."""
        if not commands:
            return []
        replies = await self._guarded(self._links.exchange(commands))
        try:
            return _as_redis_py(self.redis, commands, replies)
        except redis.exceptions.RedisError as error:
            raise translate(error, self.url) from error

    async def blocking(self, *command: Any) -> Any:
        """One command that blocks on the server, on a connection of its own that is dropped when this is canceled."""
        replies = await self._translated(self._links.exchange([command]))
        try:
            return _as_redis_py(self.redis, [command], replies)[0]
        except redis.exceptions.RedisError as error:
            raise translate(error, self.url) from error

    async def settle(self) -> None:
        """Waits for what canceled calls still have under way, a second at most."""
        if self._background:
            await asyncio.wait(list(self._background), timeout=1.0)

    async def close(self) -> None:
        await self.settle()
        await self._links.close()
        with suppress(Exception):
            await self.redis.aclose()
