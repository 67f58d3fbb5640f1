"""Counts of a batch run, taken from the outcomes themselves. Memory does not grow with the number of tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from broker.task import Result

BUCKETS_PER_FOLD: Final = 50  # a bucket spans a factor of e^(1/50): quantiles are right to 1 %


class Histogram:
    """Durations in seconds, in buckets of 2 %, however many there are."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0

    def add(self, seconds: float) -> None:
        bucket = round(math.log(max(seconds, 1e-4)) * BUCKETS_PER_FOLD)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.total += 1

    def quantile(self, share: float) -> float | None:
        """The duration that `share` (0 to 1) of all do not exceed; None of nothing."""
        rank, seen = share * self.total, 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return math.exp(bucket / BUCKETS_PER_FOLD)
        return None


@dataclass(slots=True)
class EndpointTally:
    """What one endpoint did in this run. `latency`: from the claim to the outcome, of the tasks it answered."""

    served: int = 0
    failures: int = 0
    latency: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class Tally:
    """A run so far.

    answered   outcomes that are a success       failed    outcomes that are none (they stand with `error`)
    bad        input lines that are no tasks      earlier   lines that stood in the output before this run
    changed    lines refused since the output holds an answer to another body under their custom_id
    attempts   of all outcomes                    sent      tasks put on the queue by this run
    earlier_failed  lines of the output that carried `error` before this run; they count for the exit code
    """

    answered: int = 0
    failed: int = 0
    bad: int = 0
    earlier: int = 0
    changed: int = 0
    earlier_failed: int = 0
    attempts: int = 0
    retries: int = 0
    sent: int = 0
    dead: int = 0
    endpoints: dict[str, EndpointTally] = field(default_factory=dict)

    @property
    def written(self) -> int:
        """Lines this run added to the output."""
        return self.answered + self.failed + self.bad

    @property
    def settled(self) -> int:
        """Input lines that need nothing more."""
        return self.written + self.earlier + self.changed

    @property
    def troubled(self) -> bool:
        """Whether some lines of this run are no success."""
        return bool(self.failed or self.bad or self.changed)

    def outcome(self, result: Result) -> None:
        self.attempts += result.attempts
        self.retries += max(0, result.attempts - 1)
        if not _success(result):
            self.failed += 1
            self.dead += result.outcome in ("dead", "poison")
            return
        self.answered += 1
        endpoint = self.endpoint(result.endpoint or "?")
        endpoint.served += 1
        if result.started_at and result.ended_at:
            endpoint.latency.add(result.ended_at - result.started_at)

    def endpoint(self, name: str) -> EndpointTally:
        return self.endpoints.setdefault(name, EndpointTally())

    def add_failures(self, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Failed attempts by endpoint, from Redis' counters when the run began and now."""
        for name, count in after.items():
            self.endpoint(name).failures = max(0, count - before.get(name, 0))

    def rows(self) -> list[tuple[str, int, float, int, float | None, float | None]]:
        """Per endpoint: id, served, its share (0 to 1), failed attempts, p50 and p95 in seconds."""
        total = sum(each.served for each in self.endpoints.values())
        return [
            (
                name,
                each.served,
                each.served / total if total else 0.0,
                each.failures,
                each.latency.quantile(0.5),
                each.latency.quantile(0.95),
            )
            for name, each in sorted(self.endpoints.items())
        ]

    def to_dict(self) -> dict[str, Any]:
        """For `--json`. Latencies in seconds."""
        names = ("endpoint", "served", "share", "failures", "p50", "p95")
        rows = [dict(zip(names, _rounded(row), strict=True)) for row in self.rows()]
        return {
            "answered": self.answered,
            "failed": self.failed,
            "bad_lines": self.bad,
            "changed": self.changed,
            "earlier": self.earlier,
            "earlier_failed": self.earlier_failed,
            "retries": self.retries,
            "dead_letters": self.dead,
            "endpoints": rows,
        }


def _rounded(row: tuple[Any, ...]) -> list[Any]:
    return [round(value, 4) if isinstance(value, float) else value for value in row]


def _success(result: Result) -> bool:
    return result.ok and result.status_code is not None and 200 <= result.status_code < 300
