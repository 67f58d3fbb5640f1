"""Which process hosts workers for which endpoints. Shares of traffic never depend on it: any process may claim for an
endpoint, and slots are counted in Redis. It only decides where the work of sending is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

AUTO_SLOTS: Final = 8  # what `max_concurrent: auto` counts as here
SLOTS_PER_PROCESS: Final = 64  # `processes: auto` starts another process for an endpoint of more slots than this


class EndpointShare(NamedTuple):
    """What the plan needs to know of an enabled endpoint; a plain tuple (id, slots, priority) does as well."""

    id: str
    slots: int | Literal["auto"]
    priority: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes to start.

    processes  per process the ids of its endpoints, at least one each
    endpoints  in the order in which they are preferred: by priority, 10 first, then by id
    warnings   one line each, for the log and the screen
    """

    processes: tuple[tuple[str, ...], ...]
    endpoints: tuple[EndpointShare, ...]
    warnings: tuple[str, ...] = ()

    def serving(self, endpoint: str) -> tuple[int, ...]:
        """The processes (from 0) that host a worker of the endpoint."""
        return tuple(i for i, hosted in enumerate(self.processes) if endpoint in hosted)

    def table(self) -> str:
        """The plan for people: a row for each endpoint, in order of preference, with its processes (from 1)."""
        rows = [("endpoint", "priority", "slots", "processes")]
        for endpoint in self.endpoints:
            processes = _ranges([i + 1 for i in self.serving(endpoint.id)]) or "none"
            rows.append((endpoint.id, str(endpoint.priority), str(endpoint.slots), processes))
        first, second, third = (max(len(row[column]) for row in rows) for column in range(3))
        lines = [f"{a:<{first}}  {b:>{second}}  {c:>{third}}  {d}" for a, b, c, d in rows]
        lines.append(f"{_count(len(self.processes), 'process', 'processes')}, {_slots_text(self.endpoints)}")
        return "\n".join(lines)


def plan(
    processes: int | Literal["auto"],
    endpoints: Sequence[EndpointShare | tuple[str, int | Literal["auto"], int]],
    cpus: int,
) -> Plan:
    """Attaches workers to processes. `endpoints` are the enabled ones, ids unique; `cpus` matters for 'auto' only.

    Every endpoint with a slot gets at least one worker. With fewer processes than endpoints each endpoint has one
    process, and the processes host equally many (give or take one); with more, each process hosts one endpoint, and an
    endpoint has processes in proportion to its slots, never more than slots.
    Raises ValueError for `processes` below 1.
    """
    if processes != "auto" and processes < 1:
        raise ValueError(f"processes {processes}: must be 'auto' or a whole number from 1")
    shares = tuple(sorted((EndpointShare(*each) for each in endpoints), key=lambda share: (-share.priority, share.id)))
    usable = [share for share in shares if _weight(share) > 0]
    warnings = [
        f"endpoint {share.id}: {share.slots} slots, so it will serve nothing; set max_concurrent to 1 or more"
        for share in shares
        if _weight(share) <= 0
    ]
    if not usable:
        warnings.append("no enabled endpoint: nothing will be served; add one, or enable one")
        return Plan((), shares, tuple(warnings))
    count = _automatic(usable, cpus) if processes == "auto" else processes
    total = sum(map(_weight, usable))
    if count > total and all(share.slots != "auto" for share in usable):
        warnings.append(f"processes {count}: there are {total} slots in all, so {total} are started")
        count = total
    hosted = _spread(usable, count) if count <= len(usable) else _multiply(usable, count)
    return Plan(tuple(hosted), shares, tuple(warnings))


def _automatic(endpoints: Sequence[EndpointShare], cpus: int) -> int:
    """One for each endpoint, more for endpoints of many slots, but no more than CPUs."""
    useful = sum(math.ceil(_weight(endpoint) / SLOTS_PER_PROCESS) for endpoint in endpoints)
    return max(1, min(cpus, useful))


def _spread(endpoints: Sequence[EndpointShare], count: int) -> list[tuple[str, ...]]:
    """Each endpoint to the process with the fewest endpoints, then the fewest slots; the largest endpoints first."""
    hosted: list[list[str]] = [[] for _ in range(count)]
    slots = [0] * count
    for endpoint in sorted(endpoints, key=lambda each: -_weight(each)):
        i = min(range(count), key=lambda process: (len(hosted[process]), slots[process]))
        hosted[i].append(endpoint.id)
        slots[i] += _weight(endpoint)
    return [tuple(ids) for ids in hosted]


def _multiply(endpoints: Sequence[EndpointShare], count: int) -> list[tuple[str, ...]]:
    """One process each, then the next one to where it has the most slots to look after (D'Hondt)."""
    counts = dict.fromkeys((endpoint.id for endpoint in endpoints), 1)
    for _ in range(count - len(endpoints)):
        roomy = [each for each in endpoints if each.slots == "auto" or counts[each.id] < each.slots]
        neediest = max(roomy, key=lambda each: _weight(each) / (counts[each.id] + 1))
        counts[neediest.id] += 1
    return [(endpoint.id,) for endpoint in endpoints for _ in range(counts[endpoint.id])]


def _weight(endpoint: EndpointShare) -> int:
    return AUTO_SLOTS if endpoint.slots == "auto" else endpoint.slots


def _slots_text(endpoints: Sequence[EndpointShare]) -> str:
    fixed = sum(endpoint.slots for endpoint in endpoints if endpoint.slots != "auto" and endpoint.slots > 0)
    automatic = sum(endpoint.slots == "auto" for endpoint in endpoints)
    text = f"{_count(len(endpoints), 'endpoint', 'endpoints')}, {_count(fixed, 'slot', 'slots')}"
    return f"{text} and {automatic} x auto" if automatic else text


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _ranges(numbers: Sequence[int]) -> str:
    """1,2,3,7 as '1-3, 7'."""
    parts: list[str] = []
    start = 0
    for i, number in enumerate(numbers):
        if i + 1 == len(numbers) or numbers[i + 1] != number + 1:
            first = numbers[start]
            parts.append(str(first) if first == number else f"{first}-{number}")
            start = i + 1
    return ", ".join(parts)
