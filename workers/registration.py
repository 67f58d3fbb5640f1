"""What Redis knows of the pools that a worker serves: endpoints, policies, what was added and drained at run time.

Written when a configuration comes into force, and looked after from then on: what Redis forgot, all of it or a part (it
was emptied, came back from a backup, was replaced by a replica that lagged, a key was deleted), is written again by
whoever serves it. The newest configuration stands: each has the moment at which it came into force, the same for all
workers that have the same, and Redis refuses an older one. So workers that a reload has not reached yet change nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from broker.configmodel import Config, Endpoint, Pool
from broker.fields import as_count
from broker.registered import as_kept, registered, with_registered
from broker.scripts import Command, Registered, Restored
from broker.store import Store
from workers.policies import endpoint_rows, policies

CHECK_S: Final = 5.0  # all of a registration is compared so often; that there is none is seen at each look
LEFT: Final = "-"  # the digest of a configuration that has the pool no longer

log = logging.getLogger("headrace.registration")


@dataclass(frozen=True, slots=True)
class Glance:
    """At a pool. `revised`: endpoints came or went at run time; `asked`: the number of the newest wish to reload."""

    revised: bool
    asked: int


@dataclass(slots=True)
class _Own:
    """A pool as this worker has it. `new`: it is another one than was registered last; `due`: to be registered."""

    pool: Pool
    digest: str
    since: int = 0  # ms; 0: never registered
    new: bool = True
    due: bool = False
    checked: float = 0.0
    drained: Collection[str] = ()
    yielded_to: int = 0  # the newer configuration that was told of

    def command(self, store: Store, revision: int | None) -> Command[Registered]:
        return store.scripts.register(
            self.pool.name, policies(self.pool), endpoint_rows(self.pool),
            digest=self.digest, since=self.since, revision=revision, drained=self.drained,
        )  # fmt: skip


@dataclass(slots=True)
class _Added:
    """What was added to a pool at run time, as last read: JSON by id. `removed`: what was there before."""

    revision: int
    rows: Mapping[str, str]
    removed: set[str] = field(default_factory=set)


class Registration:
    """For one worker. Its methods block, and raise BrokerError: what was to be done is done at the next call then."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._own: dict[str, _Own] = {}
        self._added: dict[str, _Added] = {}
        self._digests: dict[str, str] = {}
        self._warned: tuple[str, ...] = ()

    def with_added(self, config: Config) -> Config:
        """The file's configuration and what was added at run time."""
        names = list(config.pools)
        revisions = self._store.pipelined([("HGET", self._store.keys.pool(name), "revision") for name in names])
        added = {name: registered(self._store, name) for name in names}
        whole, warnings = with_registered(config, added)
        for warning in warnings if warnings != self._warned else ():
            log.warning("%s", warning)
        self._warned = warnings
        for name, revision in zip(names, revisions, strict=True):
            self._remember(name, as_count(revision), {each.id: as_kept(each) for each in added[name]})
            self._digests[name] = _digest(config.pools[name], added[name], whole.pools[name])
        return whole

    def serve(self, pools: Iterable[Pool]) -> None:
        """These, as `with_added` gave them, and those that left until that is registered."""
        for pool in pools:
            digest = self._digests.get(pool.name) or _digest(pool)
            own = self._own.get(pool.name)
            if own is None or own.digest != digest:
                self._own[pool.name] = _Own(pool, digest, drained=own.drained if own is not None else ())
            elif own.pool != pool:
                own.pool, own.new = pool, True

    def leave(self, pool: str) -> None:
        """It is served no longer: its endpoints go, unless another worker's newer configuration has them."""
        own = self._own[pool]
        own.pool, own.digest, own.new, own.due = replace(own.pool, endpoints=()), LEFT, True, True

    def forget(self, pool: str) -> None:
        """Nothing is left to be done about it."""
        del self._own[pool]

    def ask(self, pools: Iterable[str]) -> None:
        """To be registered at the next `register`."""
        for name in pools:
            self._own[name].due = True

    def look(self) -> dict[str, Glance]:
        """By pool. What Redis forgot is put back, or is due to be registered."""
        names, keys = list(self._own), self._store.keys
        rows = self._store.pipelined(
            [("HMGET", keys.pool(name), "revision", "reload_asked", "configured") for name in names]
        )
        found: dict[str, Glance] = {}
        for name, (revision, asked, configured) in zip(names, rows, strict=True):
            number = as_count(revision)
            if name in self._added:
                number = self._restored(name, number)
            added = self._added.get(name)
            found[name] = Glance(added is not None and added.revision != number, as_count(asked))
            self._judge(self._own[name], (configured or b"").decode("utf-8", "replace"))
        return found

    def register(self) -> dict[str, Registered]:
        """Writes what is due. Gives what became of each; what was revised meanwhile stays due."""
        due = [own for own in self._own.values() if own.due]
        replies: Sequence[Any] = self._store.run_many(
            [own.command(self._store, self._revision(own.pool.name)) for own in due]
        )
        for own, reply in zip(due, replies, strict=True):
            self._registered(own, reply)
        return {own.pool.name: reply for own, reply in zip(due, replies, strict=True)}

    # Parts

    def _revision(self, pool: str) -> int | None:
        added = self._added.get(pool)
        return None if added is None else added.revision

    def _remember(self, pool: str, revision: int, rows: Mapping[str, str]) -> None:
        earlier = self._added.get(pool)
        removed = set() if earlier is None else {*earlier.removed, *earlier.rows} - set(rows)
        self._added[pool] = _Added(revision, rows, removed)

    def _restored(self, name: str, revision: int) -> int:
        """The revision, once what Redis has forgotten of the endpoints added at run time is back."""
        added, own = self._added[name], self._own[name]
        checks = self._clock() - own.checked >= CHECK_S and bool(added.rows or added.removed)
        if revision > added.revision or (revision == added.revision and not checks):
            return revision
        command = self._store.scripts.restore(name, added.revision, added.rows, added.removed)
        now: Restored = self._store.run(command)
        if now.changed:
            told = f"added or removed at run time: {', '.join(now.changed)}"
            log.warning("pool %s: Redis had forgotten endpoints %s; repaired", name, told)
        if now.revision == added.revision + 1 and now.count == len(added.rows):
            added.revision = now.revision  # all as it was
        return now.revision

    def _judge(self, own: _Own, configured: str) -> None:
        since, _, digest = configured.partition(" ")
        moment = as_count(since)
        if not own.since or own.due:
            return
        if moment > own.since and digest not in (own.digest, LEFT):
            if own.yielded_to != moment:
                own.yielded_to = moment
                told = "another worker has a newer configuration, which is in force; reload this one"
                log.warning("pool %s: %s", own.pool.name, told)
            return
        own.due = (moment, digest) != (own.since, own.digest) or self._clock() - own.checked >= CHECK_S

    def _registered(self, own: _Own, reply: Registered) -> None:
        if reply.word == "revised":
            return
        own.due, own.checked = False, self._clock()
        if reply.word == "newer":
            return
        if reply.differed and not own.new:
            log.warning("pool %s: Redis had forgotten endpoints or policies; registered again", own.pool.name)
        own.since, own.new, own.drained = reply.since, False, reply.drained


def _digest(pool: Pool, added: Sequence[Endpoint] = (), whole: Pool | None = None) -> str:
    """Of what a configuration says. What was added at run time is the same for all, but for what a file rules out."""
    served = {each.id for each in (whole or pool).endpoints}
    left_out = sorted(each.id for each in added if each.id not in served)
    text = json.dumps([policies(pool), sorted(endpoint_rows(pool)), left_out], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
