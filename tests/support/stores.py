"""Stores for tests: on a real server or on fakeredis, with a server clock the test sets, or with edited sources."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import fakeredis

from broker.keys import Keys
from broker.scripts import Command, Script, Scripts
from broker.store import Store

T = TypeVar("T")

CLOCK_KEY = "test:clock"
START = 1_700_000_000_000  # ms


class EditedScripts(Scripts):
    """Scripts whose sources went through `edit`."""

    def __init__(self, keys: Keys, clock_key: str, edit: Callable[[str], str]) -> None:
        super().__init__(keys, clock_key)
        self._edit = edit
        self._edited: dict[str, Script] = {}

    def _command(
        self, verb: str, pool: str, args: Sequence[str | bytes | int], parse: Callable[[Any], T]
    ) -> Command[T]:
        command = super()._command(verb, pool, args, parse)
        if verb not in self._edited:
            source = self._edit(command.script.source)
            sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
            self._edited[verb] = Script(verb, source, sha)
        return replace(command, script=self._edited[verb])


class Clock:
    """The server's clock, as the scripts of one store read it. `now` is in ms."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.set(START)

    def set(self, now: int) -> None:
        self.now = now
        self._store.redis.set(CLOCK_KEY, now)

    def advance(self, ms: int) -> None:
        self.set(self.now + ms)


def open_store(url: str) -> Store:
    """`url` "fake" is fakeredis. The scripts read the time from CLOCK_KEY."""
    if url != "fake":
        return Store(url, prefix="rq", clock_key=CLOCK_KEY)
    store = Store("redis://fake.invalid", prefix="rq", clock_key=CLOCK_KEY)
    store.close()
    store.redis = fakeredis.FakeRedis(server=fakeredis.FakeServer())
    return store


def open_edited_store(url: str, edit: Callable[[str], str]) -> Store:
    """A store whose Lua sources went through `edit`."""
    store = open_store(url)
    store.scripts = EditedScripts(store.keys, CLOCK_KEY, edit)
    return store
