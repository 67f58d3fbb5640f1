"""Whether a task costs the same with a long backlog, many endpoints, many processes: server time, and rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.endpoints import fast_endpoint
from bench.headrace import POOL
from bench.lab import Lab, median
from bench.measures.progress import rate, watch
from bench.report import Goal, Section, number
from broker.keys import Keys

CHUNK = 50_000  # tasks that one producer makes before the next takes over: they are held in memory
SLOTS = 240  # over all endpoints


@dataclass(frozen=True)
class Cost:
    """Microseconds of the server in our scripts, and tasks/s."""

    server_us: float
    rate: float


def cost(lab: Lab, *, backlog: int, tasks: int, endpoints: int, processes: int) -> Cost:
    """Of the first `tasks` of a backlog, the first tenth not counted."""
    lab.server.clear()
    marks: list[tuple[int, int]] = []

    def settled() -> int:
        count = int(lab.server.redis.zcard(Keys().registry("finished", POOL)))
        marks.append((count, lab.server.script_us()))
        return count

    slots = max(1, SLOTS // endpoints)
    with fast_endpoint(lab.folder, hosts=endpoints) as endpoint:
        with lab.headrace.serving(endpoint, slots=slots, ready=True):
            pass  # registers the pool: its depth limit is higher than the default
        for first in range(0, backlog, CHUNK):
            lab.headrace.enqueue(min(CHUNK, backlog - first), "--first", first)
        lab.server.redis.config_resetstat()
        marks.append((0, 0))
        with lab.headrace.serving(endpoint, slots=slots, processes=processes):
            samples = watch(settled, tasks, lab.headrace, pause=0.01)
    start = next(mark for mark in marks if mark[0] >= tasks / 10 or mark is marks[-1])
    end = marks[-1]
    if end[0] == start[0] or end[1] == start[1]:  # over between two looks
        start = marks[0]
    return Cost((end[1] - start[1]) / (end[0] - start[0]), rate(samples))


def measure(lab: Lab) -> Section:
    section = Section("flat", "Cost of a task as things grow", ("what grows", "to", "server us a task", "tasks/s"))
    pick = lab.options.pick
    tasks, usual = pick(100, 5000), pick(150, 10_000)
    series: list[tuple[str, Sequence[int]]] = [
        ("backlog", pick((100, 300), (1000, 10_000, 100_000), (1000, 10_000, 100_000, 1_000_000))),
        ("endpoints", pick((3, 10), (3, 10, 30, 100))),
        ("processes", pick((1, 2), (1, 4, 16))),
    ]
    cases = [(what, size) for what, sizes in series for size in sizes]
    found = lab.rounds(*(lambda w=what, s=size: _case(lab, w, s, tasks, usual) for what, size in cases))
    costs = {case: median([each.server_us for each in rounds]) for case, rounds in zip(cases, found, strict=True)}
    for case, rounds in zip(cases, found, strict=True):
        section.add(case[0], f"{case[1]:,}", number(costs[case]), number(median([each.rate for each in rounds])))
    for what, sizes in series:
        values = [costs[what, size] for size in sizes]
        section.goals.append(
            Goal(f"server time a task, {what} {sizes[0]:,} to {sizes[-1]:,}", max(values) / min(values), 1.3,
                 at_least=False, unit="x", detail="highest against lowest")
        )  # fmt: skip
    section.notes.append(
        "Time of EVALSHA by INFO commandstats: claim, finish, renew and what they call. All worker processes share one "
        "core, so tasks/s with many of them shows the core, not them."
    )
    return section


def _case(lab: Lab, what: str, size: int, tasks: int, usual: int) -> Cost:
    if what == "backlog":
        return cost(lab, backlog=size, tasks=min(size, tasks), endpoints=3, processes=1)
    if what == "endpoints":
        return cost(lab, backlog=usual, tasks=tasks, endpoints=size, processes=1)
    return cost(lab, backlog=usual, tasks=tasks, endpoints=16, processes=size)
