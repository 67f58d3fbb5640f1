"""`python -m tests.chaos.soak --minutes M`: steady load, and nothing may grow."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.checker import GONE_WHEN_EMPTY, PERMANENT
from tests.chaos.observer import text
from tests.chaos.world import Settings, World, world
from tests.support.fleet import until

EVERY_S = 5.0
WARM_UP = 1 / 3  # of the run: caches fill
LONGEST_TTL_S = 75.0  # RQ's picture of what ran goes after 60 s; before that keys only come
ALLOWED = {"RSS of a process, MB": (0.05, 4.0), "descriptors of a process": (0.05, 3.0), "keys": (0.05, 60.0)}
SETTINGS = Settings(
    endpoints=3, outstanding=200, rate=80.0, latency="60ms", jitter="40ms", pool={"queue": {"result_ttl": "10s"}}
)


@dataclass(frozen=True)
class Sample:
    """`rss` in MB and `fds`: the largest of the processes; `strays`: keys without TTL that are not on the list."""

    at: float
    rss: float
    fds: int
    keys: int
    strays: list[str]


def take(made: World) -> Sample:
    """One look at all of it."""
    rss, fds = [0.0], [0]
    for pid in [*made.pids, made.fleets[0]._process.pid]:
        with suppress(FileNotFoundError, ProcessLookupError):
            rss.append(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6)
            fds.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))
    store, strays = made.observer.store, []
    keys = store.raw(lambda client: list(client.scan_iter(count=1000)))
    for key, ttl in zip(keys, store.pipelined([("TTL", key) for key in keys]), strict=True):
        name = text(key)
        if ttl == -1 and not name.startswith("rq:job:") and not _listed(name):
            strays.append(name)
    return Sample(time.monotonic(), max(rss), max(fds), len(keys), strays)


LIVE = ("rq:queue:", "rq:wip:", "rq:scheduled:", "rq:x:lists:", "rq:x:slots:", "rq:x:deadlines:")  # gone when empty


def _listed(name: str) -> bool:
    return bool(PERMANENT.match(name) or GONE_WHEN_EMPTY.match(name)) or name.startswith(LIVE)


def growth(points: Sequence[tuple[float, float]]) -> float:
    """What a straight line through the points gains from the first to the last."""
    slope, _ = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return slope * (points[-1][0] - points[0][0])


def judge(samples: Sequence[Sample]) -> list[tuple[str, float, float, float, bool]]:
    """Name, mean, growth, growth allowed, whether it holds; of what comes after the warm-up."""
    warm = samples[0].at + max(LONGEST_TTL_S, (samples[-1].at - samples[0].at) * WARM_UP)
    kept = [sample for sample in samples if sample.at >= warm]
    series = {
        "RSS of a process, MB": [s.rss for s in kept],
        "descriptors of a process": [float(s.fds) for s in kept],
        "keys": [float(s.keys) for s in kept],
    }
    rows = []
    for name, values in series.items():
        share, least = ALLOWED[name]
        mean = statistics.mean(values)
        grown, allowed = growth([(s.at, v) for s, v in zip(kept, values, strict=True)]), max(least, mean * share)
        rows.append((name, mean, grown, allowed, grown <= allowed))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    options = parser.parse_args(arguments)
    if options.minutes < 3:
        parser.error("--minutes: 3 at least, for keys reach their TTL after more than one")
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder, world("soak", SETTINGS, 1, Path(folder)) as made:
        end = time.monotonic() + options.minutes * 60
        while time.monotonic() < end:
            time.sleep(EVERY_S)
            samples.append(take(made))
        made.stop_producing()
        until(lambda: not made.observer.unsettled(), "every task has an outcome")
        tasks = len(made.observer.every)
    print(f"{tasks} tasks in {options.minutes:g} minutes; of the last two thirds:")
    rows, strays = judge(samples), sorted({name for sample in samples for name in sample.strays})
    for name, mean, grown, allowed, holds in rows:
        word = "ok  " if holds else "FAIL"
        print(f"  {word} {name:26} mean {mean:8.1f}  growth {grown:+7.2f} (allowed {allowed:.2f})")
    print(f"  {'ok  ' if not strays else 'FAIL'} keys without TTL off the list  {', '.join(strays[:5]) or 'none'}")
    return 0 if all(row[-1] for row in rows) and not strays else 1


if __name__ == "__main__":
    sys.exit(main())
