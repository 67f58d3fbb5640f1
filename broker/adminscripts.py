"""The scripts that people and housekeepers call, one typed wrapper each: what a pool is, repairs, dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


class AdminScripts(Builder):
    """Administration."""

    def register(
        self, pool: str, policies: dict[str, int], endpoints: Sequence[EndpointRow]
    ) -> Command[list[str]]:
        """Returns ids gone from the configuration."""
        args: list[str | bytes | int] = [len(policies)]
        for name, value in policies.items():
            args += (name, value)
        args.append(len(endpoints))
        for row in endpoints:
            endpoint, priority, slots, enabled, capabilities, *span = row
            floor, ceiling = span or (0, 0)
            args += (endpoint, priority, slots, int(enabled), ",".join(capabilities), floor, ceiling)
        return self._command("register", pool, args, as_words)

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
