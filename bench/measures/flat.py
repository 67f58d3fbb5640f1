"""Whether a task costs the same with a long backlog, many endpoints, many processes: the server's CPU, and rate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bench.endpoints import fast_endpoint
from bench.headrace import POOL
from bench.lab import Lab, median
from bench.measures.progress import watch
from bench.processes import BenchError, available_bytes
from bench.report import Goal, Section, number
from broker.keys import Keys

CHUNK = 50_000  # tasks that one producer makes before the next takes over: they are held in memory
SLOTS = 240  # over all endpoints
USUAL_DEPTH = 90_000  # above this the pool has to be registered first, with its own depth limit
TASK_BYTES = 2_000  # more than one queued takes in the server
DEEP = 1_000_000
TURNS = 2  # at each backlog, whose spans are short


@dataclass(frozen=True)
class Load:
    """`backlog` tasks queued, a worker starts, the first `lead` to end do not count, the `span` after them is a value.

    For each of the `turns` the backlog is filled up and a worker starts anew.
    """

    backlog: int
    lead: int
    span: int
    endpoints: int = 3
    processes: int = 1
    turns: int = 1


@dataclass(frozen=True)
class Cost:
    """Microseconds of the server's CPU, and seconds, a task."""

    server_us: float
    seconds: float


def costs(lab: Lab, load: Load) -> list[Cost]:
    """Of each turn. All of the server's work is in it: scripts, connections, what is done in the background."""
    need = load.backlog * TASK_BYTES
    if available_bytes() < need:
        raise BenchError(f"a backlog of {load.backlog:,} needs {need / 1e9:.0f} GB of free memory")
    with lab.fresh_server(lab.options.aof):
        return _turns(lab, load)


def _turns(lab: Lab, load: Load) -> list[Cost]:
    finished, server = Keys().registry("finished", POOL), lab.server
    looks: list[tuple[int, float, float]] = []

    def settled() -> int:
        looks.append((int(server.redis.zcard(finished)), server.cpu_us(), time.perf_counter()))
        return looks[-1][0]

    slots = max(1, SLOTS // load.endpoints)
    with fast_endpoint(lab.folder, hosts=load.endpoints) as endpoint:
        if load.backlog > USUAL_DEPTH:
            with lab.headrace.serving(endpoint, slots=slots, ready=True):
                pass
        found, queued = [], 0
        for _ in range(load.turns):
            done = settled()
            while (missing := load.backlog - (queued - done)) > 0:
                lab.headrace.enqueue(min(CHUNK, missing), "--first", queued)
                queued += min(CHUNK, missing)
            with lab.headrace.serving(endpoint, slots=slots, processes=load.processes):
                watch(settled, done + load.lead, lab.headrace, pause=0.01)
                count_0, cpu_0, start = looks[-1]
                watch(settled, done + load.lead + load.span, lab.headrace, pause=0.01)
                count, cpu, end = looks[-1]
            if count > count_0:  # else both are in one look
                found.append(Cost((cpu - cpu_0) / (count - count_0), (end - start) / (count - count_0)))
    return found


def loads(lab: Lab) -> list[tuple[str, list[int], list[Load]]]:
    """What grows, to which sizes, and the load for each."""
    pick = lab.options.pick
    lead, span = pick(0, 250), pick(60, 1500)
    backlogs = pick([100, 300], [1000, 10_000, 100_000, DEEP])
    usual, first, then = pick(400, 10_000), pick(0, 500), pick(100, 4500)
    many, processes = pick([3, 10], [3, 10, 30, 100]), pick([1, 2], [1, 4, 16])
    # as many wait halfway through the span as the row says
    waiting = [
        Load(size + lead + span // 2 + SLOTS, lead, span, turns=TURNS * (lab.options.repeats if size == DEEP else 1))
        for size in backlogs
    ]
    return [
        ("backlog", backlogs, waiting),
        ("endpoints", many, [Load(usual, first, then, endpoints=size) for size in many]),
        ("processes", processes, [Load(usual, first, then, endpoints=16, processes=size) for size in processes]),
    ]


def measure(lab: Lab) -> Section:
    section = Section("flat", "Cost of a task as things grow", ("what grows", "to", "server us a task", "tasks/s"))
    series = loads(lab)
    cases = [load for _, _, each in series for load in each]
    often = [load for load in cases if load.backlog < DEEP]
    found = dict(zip(often, lab.rounds(*(partial(costs, lab, load) for load in often)), strict=True))
    for load in cases:
        if load not in found:  # takes minutes to queue: once, for all turns
            (found[load],) = lab.rounds(partial(costs, lab, load), repeats=1)
    for what, sizes, each in series:
        values = []
        for size, load in zip(sizes, each, strict=True):
            every = [cost for turns in found[load] for cost in turns]
            values.append(median([cost.server_us for cost in every]))
            section.add(what, f"{size:,}", number(values[-1]), number(1 / median([cost.seconds for cost in every])))
        section.goals.append(
            Goal(f"server CPU a task, {what} {sizes[0]:,} to {sizes[-1]:,}", spread(values), 1.3,
                 at_least=False, unit="x", detail="highest against lowest")
        )  # fmt: skip
    section.notes.append(
        "CPU of the server's process by INFO cpu, all that it does: scripts, connections, and our looks each 10 ms. A "
        "new server for each value: a heap that earlier loads left in pieces costs more. "
        f"Each backlog over {cases[0].span:,} tasks, halfway through which so many wait, and {TURNS} times "
        "a round; a million is queued once for all rounds. All worker processes share one core, so tasks/s "
        "with many of them shows the core, not them."
    )
    return section


def spread(values: Sequence[float]) -> float:
    """nan if one is missing."""
    return max(values) / min(values) if all(value == value for value in values) else float("nan")
