"""Who knows which server is the right one: Sentinels, or the nodes of a cluster.

A search asks with what it is given, so that it is the same for threads and for asyncio. It speaks to nobody itself.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Protocol

import redis.exceptions
from redis.crc import key_slot

AUTH_ERRORS: Final = (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError)

Address = tuple[str, int]
Ask = Callable[[Address, tuple[str, ...]], Awaitable[Any]]  # whom, what; gives the reply, or the error as a value


class WrongWay(redis.exceptions.RedisError):
    """The URL leads nowhere, and waiting will not mend it; one line for people."""


class Lookup(Protocol):
    """`found` is the right server as far as is known; `search` asks, and returns it. Used from several threads."""

    changes_unsaid: ClassVar[bool]  # a server that is replaced may not say so itself
    found: Address | None

    async def search(self, ask: Ask) -> Address: ...

    def hint(self, error: Exception) -> None:
        """What a server said that is no longer the right one."""


class _Naming(NamedTuple):
    """What one Sentinel says. Each failover has an epoch of its own, higher than those before."""

    epoch: int
    address: Address
    down: bool


class SentinelLookup:
    """Asks Sentinels in turn, who agreed last first, until most of them name the same primary; else the one of the
    highest epoch. An epoch lower than one seen before is not believed, unless all say so: then somebody set the
    Sentinels up anew.
    """

    changes_unsaid: ClassVar[bool] = True

    def __init__(self, sentinels: Sequence[Address], service: str) -> None:
        self.found: Address | None = None
        self._sentinels, self._service, self._epoch = list(sentinels), service, 0
        self._lock = threading.Lock()

    def hint(self, error: Exception) -> None:
        """Nothing to learn from."""

    async def search(self, ask: Ask) -> Address:
        known, everybody = self._epoch, list(self._sentinels)
        namings: dict[Address, _Naming] = {}
        silent: list[tuple[Address, Exception]] = []
        for sentinel in everybody:
            answer = await self._naming(sentinel, ask)
            if isinstance(answer, Exception):
                silent.append((sentinel, answer))
                continue
            namings[sentinel] = answer
            if answer.epoch >= known and _agreeing(namings, answer) * 2 > len(everybody):
                break
        if not namings:
            raise self._nobody(silent)
        latest = max(naming.epoch for naming in namings.values())
        said = Counter(naming.address for naming in namings.values() if naming.epoch == latest)
        address = said.most_common(1)[0][0]
        if latest < known and len(namings) < len(everybody):
            raise redis.exceptions.ConnectionError(f"who answers has not heard of the last failover ({_why(silent)})")
        of_it = {each: naming for each, naming in namings.items() if naming[:2] == (latest, address)}
        if sum(naming.down for naming in of_it.values()) * 2 > len(of_it):
            reason = f"the primary {_shown(address)} of {self._service!r} is down, and has no successor yet"
            raise redis.exceptions.ConnectionError(reason)
        return self._settle(known, latest, address, list(of_it))

    async def _naming(self, sentinel: Address, ask: Ask) -> _Naming | Exception:
        reply = await ask(sentinel, ("SENTINEL", "MASTER", self._service))
        if isinstance(reply, Exception):
            return reply
        naming, flags = _naming(reply)
        if "failover_in_progress" not in flags:
            return naming
        # who leads a failover shows the old primary here, with the new epoch, until all replicas follow the new one
        successor = await ask(sentinel, ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service))
        if isinstance(successor, Exception) or not successor:
            return naming
        address = (_text(successor[0]), int(successor[1]))
        if address == naming.address:
            return naming
        reply = await ask(sentinel, ("SENTINEL", "MASTER", self._service))  # the epoch that goes with it
        return reply if isinstance(reply, Exception) else _Naming(_naming(reply)[0].epoch, address, False)

    def _nobody(self, silent: Sequence[tuple[Address, Exception]]) -> Exception:
        if any("No such master" in str(error) for _, error in silent):
            remedy = "see `sentinel monitor` in their settings"
            return WrongWay(f"its Sentinels know no service {self._service!r}; {remedy}")
        if all(isinstance(error, AUTH_ERRORS) for _, error in silent):
            return WrongWay(f"its Sentinels refuse us ({_why(silent)}); check redis.sentinel_password")
        return redis.exceptions.ConnectionError(f"no Sentinel answers ({_why(silent)})")

    def _settle(self, known: int, epoch: int, address: Address, sentinels: list[Address]) -> Address:
        """Who began to search before a failover does not have the last word."""
        with self._lock:
            anew = epoch < known == self._epoch
            if self.found is None or epoch >= self._epoch or anew:
                self._epoch, self.found = epoch, address
                self._sentinels = _first(sentinels, self._sentinels)
            return self.found


def _agreeing(namings: dict[Address, _Naming], one: _Naming) -> int:
    return 0 if one.down else sum(naming == one for naming in namings.values())


def _naming(reply: Any) -> tuple[_Naming, str]:
    """Of SENTINEL MASTER; and its flags."""
    fields = mapping(reply)
    flags = fields["flags"]
    address = (fields["ip"], int(fields["port"]))
    return _Naming(int(fields["config-epoch"]), address, "s_down" in flags or "o_down" in flags), flags


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
        self.found: Address | None = None
        self._nodes, self._slot = list(nodes), key_slot(prefix.encode())

    def hint(self, error: Exception) -> None:
        if isinstance(error, redis.exceptions.MovedError):  # that node knows better than the one we asked
            self._nodes = _first([(str(error.host), int(error.port))], self._nodes)

    async def search(self, ask: Ask) -> Address:
        silent: list[tuple[Address, Exception]] = []
        for node in list(self._nodes):
            reply = await ask(node, ("CLUSTER", "SLOTS"))
            if isinstance(reply, Exception):
                silent.append((node, reply))
                continue
            rows = [(row[0], row[1], [(_text(each[0]) or node[0], int(each[1])) for each in row[2:]]) for row in reply]
            known = dict.fromkeys([node, *self._nodes, *(each for row in rows for each in row[2])])
            for low, high, (owner, *_) in rows:
                if low <= self._slot <= high:
                    self._nodes, self.found = list(known), owner
                    return owner
            silent.append((node, LookupError(f"nobody serves slot {self._slot}")))
        if any("cluster support disabled" in str(error) for _, error in silent):
            raise WrongWay("it is no Redis Cluster; use redis://")
        if all(isinstance(error, AUTH_ERRORS) for _, error in silent):
            raise silent[0][1]
        raise redis.exceptions.ConnectionError(f"no node knows the way ({_why(silent)})")


def mapping(reply: Any) -> dict[str, str]:
    """A reply of names and values, in either protocol."""
    if isinstance(reply, dict):
        return {_text(name): _text(value) for name, value in reply.items()}
    flat = iter(reply)
    return {_text(name): _text(value) for name, value in zip(flat, flat, strict=True)}


def _first(some: Iterable[Address], others: Iterable[Address]) -> list[Address]:
    return list(dict.fromkeys([*some, *others]))


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
