"""The scripts that people and housekeepers call, one typed wrapper each: what a pool is, repairs, dead letters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from broker.script import Builder, Command, as_text, as_words, in_ms

# (id, priority, slots, enabled, capabilities), or with (floor, ceiling) behind it for slots that adapt between the two.
EndpointRow = (
    tuple[str, int, int, bool, tuple[str, ...]] | tuple[str, int, int, bool, tuple[str, ...], int, int]
)


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """`keys` and `lists` go into the next call; both "" when the pass is done."""

    keys: str
    lists: str
    repairs: int

    @property
    def done(self) -> bool:
        return not self.keys and not self.lists


SCRUB_START = Scrubbed("0", "", 0)


@dataclass(frozen=True, slots=True)
class Registered:
    """`word`: done, newer (another worker's newer configuration stands) or revised (the endpoints added at run time are
    others now); for the last two nothing was written. `since`: ms, when the configuration came into force; `differed`:
    fields and members that were not as they are to be; `gone`: endpoints that left; `drained`: those that rest."""

    word: Literal["done", "newer", "revised"]
    since: int = 0
    differed: int = 0
    gone: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """`revision` and `count` of the endpoints added at run time, as they are now; `changed`: what was forgotten."""

    revision: int
    count: int
    changed: tuple[str, ...]


def _registered(reply: Any) -> Registered:
    word, *rest = reply
    if not rest:
        return Registered("newer" if as_text(word) == "newer" else "revised")
    since, differed, gone, drained = rest
    return Registered("done", int(since), int(differed), tuple(as_words(gone)), tuple(as_words(drained)))


class AdminScripts(Builder):
    """Administration."""

    def register(
        self,
        pool: str,
        policies: Mapping[str, int],
        endpoints: Sequence[EndpointRow],
        *,
        digest: str = "",
        since: int = 0,
        revision: int | None = None,
        drained: Collection[str] = (),
    ) -> Command[Registered]:
        """What is configured comes into force, as new, or as what has been in force `since` then.

        digest   of the configuration; "-" for one that has the pool no longer
        revision of the endpoints added at run time among these; None: whatever it is
        drained  of the endpoints, those that rest if Redis has forgotten them
        """
        args: list[str | bytes | int] = [since, digest, "" if revision is None else revision, len(policies)]
        for name, value in policies.items():
            args += (name, value)
        args.append(len(endpoints))
        for row in endpoints:
            endpoint, priority, slots, enabled, capabilities, *span = row
            floor, ceiling = span or (0, 0)
            args += (endpoint, priority, slots, int(enabled), ",".join(capabilities), floor, ceiling)
            args.append(int(endpoint in drained))
        return self._command("register", pool, args, _registered)

    def restore(
        self, pool: str, revision: int, added: Mapping[str, str], removed: Collection[str]
    ) -> Command[Restored]:
        """What was added to the pool at run time (id: JSON) and removed, up to a revision, if Redis knows less."""
        pairs = [text for pair in added.items() for text in pair]
        return self._command(
            "restore",
            pool,
            [revision, len(added), *pairs, *sorted(removed)],
            lambda reply: Restored(int(reply[0]), int(reply[1]), tuple(as_words(reply[2]))),
        )

    def scrub(self, pool: str, at: Scrubbed, *, lease: float, dead_letter_ttl: float) -> Command[Scrubbed]:
        """A piece of a pass, from SCRUB_START until `done`."""
        args: list[str | bytes | int] = [in_ms(lease), in_ms(dead_letter_ttl), at.keys, at.lists]
        return self._command(
            "scrub", pool, args, lambda reply: Scrubbed(as_text(reply[0]), as_text(reply[1]), int(reply[2]))
        )

    def retire(self, pool: str, *, away: float) -> Command[str]:
        """ "retired", "served" (a process was heard of in the last `away` seconds) or "holds" (tasks or results)."""
        return self._command("retire", pool, [in_ms(away)], as_text)

    def redrive(self, pool: str, ids: Sequence[str]) -> Command[list[str]]:
        """A word a task: queued, unsettled, done or unknown."""
        return self._command("redrive", pool, [len(ids), *ids], as_words)

    def purge(self, pool: str, ids: Sequence[str]) -> Command[list[str]]:
        """A word a task: purged, unsettled (it waits or runs; left alone) or unknown."""
        return self._command("purge", pool, [len(ids), *ids], as_words)

    def drain(self, pool: str, endpoint: str, on: bool) -> Command[str]:
        """ "done" or "unknown"."""
        return self._command("drain", pool, [endpoint, int(on)], as_text)

    def reset(self, pool: str, endpoint: str) -> Command[str]:
        """Closes the breaker by hand: "done" or "unknown"."""
        return self._command("reset", pool, [endpoint], as_text)
