"""1,000 requests in flight on one process: what headrace adds to the endpoint's own time, beside the bare client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from bench.endpoints import Own, own_endpoint
from bench.headrace import POOL
from bench.job import PATH, payload
from bench.lab import Lab, median, quantile
from bench.measures.drain import bare
from bench.measures.progress import watch
from bench.report import Goal, Section, number
from broker import Broker, Request
from broker.keys import Keys

FETCHED = 2000  # results whose times are read


@dataclass(frozen=True)
class Added:
    """Above the endpoint's own time, ms; and tasks/s. `most`: in flight at any time."""

    p50: float
    p99: float
    rate: float
    most: int


def saturated(lab: Lab, endpoint: Own, slots: int, count: int, delay: float) -> Added:
    """From claim to settled, as the results tell, with `slots` full all the time."""
    lab.server.clear()
    finished = Keys().registry("finished", POOL)
    with Broker(lab.server.url) as broker, lab.headrace.serving(endpoint, slots=slots, ready=True):
        tasks = broker.enqueue_many(POOL, [Request("POST", PATH, json=payload(number)) for number in range(count)])

        def settled() -> int:
            return int(lab.server.redis.zcard(finished))

        samples = watch(settled, count, lab.headrace)
        most = endpoint.stats()["most"]
        steady = tasks[count // 5 : count * 9 // 10]
        late = []
        for task in steady[:: max(1, len(steady) // FETCHED)]:
            result = task.result(timeout=10)
            late.append((result.ended_at - result.started_at - delay) * 1000)
    # waves of `slots`: the first look that saw one is a wave after the start
    return Added(quantile(late, 0.5), quantile(late, 0.99), (count - slots) / (samples[-1][0] - samples[1][0]), most)


def unqueued(lab: Lab, endpoint: Own, slots: int, count: int, delay: float) -> Added:
    told = bare(lab, endpoint.urls[0], count, slots)
    return Added((told["p50"] - delay) * 1000, (told["p99"] - delay) * 1000, count / told["seconds"], slots)


def measure(lab: Lab) -> Section:
    slots = lab.options.pick(100, 1000)
    section = Section(
        "inflight", f"{slots} in flight on one process",
        ("endpoint", "system", "tasks/s", "of what is possible", "p50 ms above", "p99 ms above", "most in flight"),
    )  # fmt: skip
    for delay, rounds in ((0.1, lab.options.pick(3, 30)), (1.0, lab.options.pick(2, 5))):
        count = slots * rounds
        with own_endpoint(lab.folder, delay=delay) as endpoint:
            ours, theirs = lab.rounds(
                partial(saturated, lab, endpoint, slots, count, delay),
                partial(unqueued, lab, endpoint, slots, count, delay),
            )
        for name, found in (("headrace", ours), ("no queue, bare client", theirs)):
            per_second = median([each.rate for each in found])
            section.add(
                f"{delay * 1000:.0f} ms", name, number(per_second), number(per_second / (slots / delay), "x"),
                number(median([each.p50 for each in found])), number(median([each.p99 for each in found])),
                str(max((each.most for each in found), default=0)),
            )  # fmt: skip
        if delay == 0.1:
            added = [
                median([getattr(each, at) for each in ours]) - median([getattr(each, at) for each in theirs])
                for at in ("p50", "p99")
            ]
            detail = "above the bare client at the same number in flight"
            for name, value, wanted in (("p50", added[0], 5), ("p99", added[1], 25)):
                what = f"added at {slots} in flight, 100 ms, {name}"
                section.goals.append(Goal(what, value, wanted, at_least=False, unit="ms", detail=detail))
    section.notes.append(
        "From claim to settled, less the endpoint's time, with all slots full: where the process is short of CPU the "
        "time above is the wait for it, for the bare client too. At 1 s CPU is no limit."
    )
    return section
