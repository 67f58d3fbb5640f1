"""How fast a counter rises: samples of it until it has reached its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bench.lab import Handle
from bench.processes import BenchError

STALLED_S = 60.0
Sample = tuple[float, int]


def watch(count: Callable[[], int], end: int, handle: Handle, pause: float = 0.005) -> list[Sample]:
    """(seconds, count) whenever it has risen, until it is `end`.

    Raises BenchError if the worker has ended, or the count stands still for a minute.
    """
    samples: list[Sample] = [(time.perf_counter(), count())]
    while samples[-1][1] < end:
        time.sleep(pause)
        now, seen = time.perf_counter(), count()
        if seen > samples[-1][1]:
            samples.append((now, seen))
        elif not handle.alive:
            raise BenchError(f"{handle.name} ended at {seen} of {end}")
        elif now - samples[-1][0] > STALLED_S:
            raise BenchError(f"{handle.name}: stands at {samples[-1][1]} of {end} for {STALLED_S:.0f} s")
    return samples


def rate(samples: Sequence[Sample], first: float = 0.1, last: float = 1.0) -> float:
    """Counts a second between two shares of the whole: the start is the process's, not the queue's.

    Raises BenchError if nothing rose.
    """
    start, end = samples[0][1], samples[-1][1]
    if end <= start:
        raise BenchError("it was over before it was looked at: give it more --tasks")
    low, high = start + first * (end - start), start + last * (end - start)
    a = next(sample for sample in samples if sample[1] >= low and sample[1] > start)
    b = next(sample for sample in samples if sample[1] >= high)
    if b[0] <= a[0]:  # over within one look
        a = samples[0]
    return (b[1] - a[1]) / (b[0] - a[0])
