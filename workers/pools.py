"""What a supervisor reads and writes in Redis about the pools it serves: rules, endpoints added at run time, reloads.

All of it is repeated until it has arrived: Redis may be out of reach at any time, and may come back empty.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from broker import inspect
from broker.configmodel import Config, Pool
from broker.errors import BrokerError
from broker.store import Store
from workers.registration import Registration

log = logging.getLogger("headrace.supervisor")


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a reload. `loaded`: endpoints by pool."""

    success: bool
    message: str
    loaded: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """`asked`: pools whose reload was asked for, and the number of the wish; `revised`: endpoints came or went."""

    asked: Mapping[str, int]
    revised: bool


class Pools:
    """For one supervisor. Its methods block; they may be called from any thread. They raise BrokerError."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._registration = Registration(store)
        self._leaving: set[str] = set()  # pools that left the configuration, until their endpoints are gone
        self._asked: dict[str, int] = {}
        self._going: set[tuple[str, str]] = set()  # pool, endpoint: removed by us, and perhaps still at work
        self._moved: set[tuple[str, str]] = set()  # pool, endpoint: another server now, of which nothing is known
        self._unjudged: set[tuple[str, str]] = set()  # of those, where all processes send to the new server already

    def close(self) -> None:
        self._store.close()

    def check(self) -> None:
        """Raises BrokerUnsuitable for a Redis that would lose tasks."""
        self._store.check()

    def serve(self, pools: Sequence[Pool]) -> None:
        """These are looked at."""
        self._registration.serve(pools)
        self._leaving -= {pool.name for pool in pools}

    def with_added(self, config: Config) -> Config:
        """The file's configuration and what was added at run time."""
        return self._registration.with_added(config)

    def register(self, pools: Iterable[str]) -> None:
        """Of those served: before their processes start."""
        with self._lock:
            self._registration.ask(pools)
            self._register()

    def change(self, old: Sequence[Pool], new: Sequence[Pool]) -> None:
        """The rules for all processes, from the next claim on. What does not arrive now is sent at every `look`."""
        with self._lock:
            before = {pool.name: pool for pool in old}
            self.serve(new)
            for pool in old:
                self._going |= {(pool.name, endpoint.id) for endpoint in pool.endpoints}
            for pool in new:
                self._going -= {(pool.name, endpoint.id) for endpoint in pool.endpoints}
                self._moved |= {(pool.name, each) for each in _moved(before.get(pool.name), pool)}
            left = before.keys() - {pool.name for pool in new}
            for name in left:
                self._registration.leave(name)
            self._leaving |= left
            self._registration.ask(pool.name for pool in new)
            try:
                self._register()
                self._warn_of_waiting(sorted(left))
            except BrokerError as error:
                log.warning("the new rules wait for Redis: %s", error)

    def look(self) -> Seen:
        """What is new since the last look. What Redis forgot is written again."""
        with self._lock:
            found = self._registration.look()
            self._register()
            self._judge_anew()
        asked: dict[str, int] = {}
        for name, glance in found.items():
            if glance.asked > self._asked.setdefault(name, glance.asked):
                asked[name] = glance.asked
            self._asked[name] = glance.asked
        return Seen(asked, any(glance.revised for glance in found.values()))

    def answer(self, asked: Mapping[str, int], reply: Reply) -> None:
        """To those who asked for a reload."""
        told = {"success": reply.success, "message": reply.message, "at": round(time.time(), 3)}
        self._store.pipelined(
            [
                (
                    "HSET",
                    self._store.keys.pool(name),
                    "reload_result",
                    json.dumps({**told, "loaded": reply.loaded.get(name, 0), "asked": number}),
                )
                for name, number in asked.items()
            ]
        )

    def _register(self) -> None:
        """What is due; an endpoint that still works after its removal makes its pool due again."""
        for name, reply in self._registration.register().items():
            if reply.word == "revised":
                continue
            still = {(name, endpoint) for endpoint in reply.gone} & self._going
            self._going -= {each for each in self._going - still if each[0] == name}
            if still:
                self._registration.ask([name])
            elif name in self._leaving:
                self._leaving.discard(name)
                self._registration.forget(name)

    def _warn_of_waiting(self, pools: Iterable[str]) -> None:
        for name in pools:
            found = inspect.status(self._store, name)
            if count := found.backlog + found.delayed:
                tasks = "1 task waits" if count == 1 else f"{count} tasks wait"
                log.warning("%s in pool %s; nobody serves it now, unless another worker does", tasks, name)

    def applied(self) -> None:
        """All processes send to the new addresses from here on: what is known of the old ones is forgotten. Not before:
        an attempt at the old address would count for the new one."""
        with self._lock:
            self._unjudged |= self._moved
            self._moved.clear()
            try:
                self._judge_anew()
            except BrokerError as error:
                log.warning("what is known of an old address stands until Redis is back: %s", error)

    def _judge_anew(self) -> None:
        """Another server at an endpoint's address is checked anew, at once."""
        if not self._unjudged:
            return
        self._store.run_many([self._store.scripts.reset(*moved) for moved in sorted(self._unjudged)])
        tickets = [
            self._store.keys.ticket(pool, f"{duty}.{e}") for pool, e in self._unjudged for duty in ("health", "check")
        ]
        self._store.pipelined([("DEL", ticket) for ticket in tickets])
        self._unjudged.clear()


def _moved(old: Pool | None, new: Pool) -> list[str]:
    if old is None:
        return []
    before = {endpoint.id: endpoint.url for endpoint in old.endpoints}
    return [each.id for each in new.endpoints if before.get(each.id, each.url) != each.url]
