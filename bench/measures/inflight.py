"""1,000 requests in flight on one process: what headrace adds to the endpoint's own time, beside the bare client."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from bench.endpoints import Own, own_endpoint
from bench.headrace import POOL
from bench.job import PATH, payload
from bench.lab import Lab, median, quantile
from bench.measures.drain import bare
from bench.measures.progress import watch
from bench.processes import BenchError
from bench.report import Goal, Section, number
from broker import Broker, Request
from broker.keys import Keys

FETCHED = 2000  # results whose times are read


@dataclass(frozen=True)
class Added:
    """Above the endpoint's own time, ms; answers/s, and the most in flight at any time, both as the endpoint saw it."""

    p50: float
    p99: float
    rate: float
    most: int


def added(endpoint: Own, slots: int, count: int, p50: float, p99: float) -> Added:
    """With what the endpoint saw. The first `slots` requests, which connect, are left out of the rate and of the times.

    A client that keeps all slots full has them answered in waves: from the end of the first to the end of the last.
    """
    answers = endpoint.answers()
    if len(answers) < count:
        raise BenchError(f"{len(answers)} answers of {count}")
    seconds = (answers[count - 1] - answers[slots - 1]) / 1e9
    return Added(p50, p99, (count - slots) / seconds, endpoint.stats()["most"])


def saturated(lab: Lab, endpoint: Own, slots: int, count: int, delay: float) -> Added:
    """From claim to settled, as the results tell, with `slots` full all the time."""
    lab.server.clear()
    finished = Keys().registry("finished", POOL)
    with Broker(lab.server.url) as broker:
        tasks = broker.enqueue_many(POOL, [Request("POST", PATH, json=payload(number)) for number in range(count)])
        endpoint.reset()
        with lab.headrace.serving(endpoint, slots=slots):
            watch(lambda: int(lab.server.redis.zcard(finished)), count, lab.headrace)
        steady = tasks[slots:]
        results = [task.result(timeout=10) for task in steady[:: max(1, len(steady) // FETCHED)]]
    late = [(result.ended_at - result.started_at - delay) * 1000 for result in results]
    return added(endpoint, slots, count, quantile(late, 0.5), quantile(late, 0.99))


def unqueued(lab: Lab, endpoint: Own, slots: int, count: int, delay: float) -> Added:
    """The same by the bare client: each request from its start to its answer."""
    endpoint.reset()
    told = bare(lab, endpoint.urls[0], count, slots, skip=slots)
    return added(endpoint, slots, count, (told["p50"] - delay) * 1000, (told["p99"] - delay) * 1000)


def measure(lab: Lab) -> Section:
    slots = lab.options.pick(100, 1000)
    section = Section(
        "inflight", f"{slots} in flight on one process",
        ("endpoint", "system", "tasks/s", "of what is possible", "p50 ms above", "p99 ms above", "most in flight"),
    )  # fmt: skip
    for delay, waves in ((0.1, lab.options.pick(3, 30)), (1.0, lab.options.pick(2, 6))):
        count = slots * waves
        with own_endpoint(lab.folder, delay=delay, stamps=True) as endpoint:
            ours, theirs = lab.rounds(
                partial(saturated, lab, endpoint, slots, count, delay),
                partial(unqueued, lab, endpoint, slots, count, delay),
            )
        for name, found in (("headrace", ours), ("no queue, bare client", theirs)):
            per_second = median([each.rate for each in found])
            p50, p99 = (median([getattr(each, at) for each in found]) for at in ("p50", "p99"))
            section.add(
                f"{delay * 1000:.0f} ms", name, number(per_second), number(per_second / (slots / delay), "x"),
                number(whole_ms(p50) if found is ours else p50), number(whole_ms(p99) if found is ours else p99),
                number(median([each.most for each in found])),
            )  # fmt: skip
        if delay == 0.1:
            for at, wanted in (("p50", 5), ("p99", 25)):
                mine = median([getattr(each, at) for each in ours])
                section.goals.append(
                    Goal(f"added at {slots} in flight, 100 ms, {at}", whole_ms(mine), wanted, at_least=False, unit="ms",
                         detail=f"{at} from claim to settled, less 100 ms")
                )  # fmt: skip
    section.notes.append(
        f"From claim to settled, less the endpoint's time, with all slots full; the first {slots} requests, which "
        "connect, do not count, for the bare client too. Outcomes have whole milliseconds, and what is less is rounded "
        "up. Rate and most in flight are the endpoint's own count."
    )
    return section


def whole_ms(ms: float) -> float:
    """Up, but for what floats add to a whole number."""
    return ms if math.isnan(ms) else float(math.ceil(ms - 0.01))
