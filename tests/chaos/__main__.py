"""`python -m tests.chaos --faults N --seed S [--only NAME]`: rounds of scenarios until N faults were injected."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.report import report, write
from tests.chaos.rounds import Round, endless, forget, play
from tests.chaos.scenarios import load
from tests.chaos.verdict import Verdict, table


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    scenarios = load()
    if options.list:
        for each in scenarios.values():
            print(f"{each.name:20} row {each.row:2}  {(each.action.__doc__ or '').splitlines()[0]}")
        return 0
    names = list(options.only or scenarios)
    folder = Path(options.keep or tempfile.mkdtemp(prefix="chaos-"))
    began = time.monotonic()
    verdicts: list[Verdict] = []

    def more(started: int, faults: int) -> bool:
        if time.monotonic() - began > options.minutes * 60:
            return False
        return faults < options.faults or (options.whole and started % len(names) != 0)

    def done(each: Round, verdict: Verdict) -> None:
        verdicts.append(verdict)
        _say(verdict, len(verdicts), sum(every.injected for every in verdicts))
        if not verdict.holds:
            print(f"  history and logs: {each.folder}", flush=True)
        elif not options.keep:
            forget(each)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it reports what it has seen so far, too
    try:
        play(endless(names, random.Random(options.seed), folder), options.jobs, more, done)
    except KeyboardInterrupt:
        print("interrupted; so far:")
    text = report(verdicts, time.monotonic() - began, options.seed)
    print(f"\n{text}")
    if options.write:
        write(text)
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def _say(verdict: Verdict, number: int, faults: int) -> None:
    word = "ok  " if verdict.holds else "FAIL"
    print(
        f"{number:4} {word} {verdict.scenario:20} seed {verdict.seed:6}  faults {verdict.injected:4}"
        f" (all {faults:6})  tasks {verdict.tasks:5}  extra {verdict.extra}/{verdict.extra_bound}",
        flush=True,
    )
    if not verdict.holds:
        print(table(verdict), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Injects faults and checks the promise.")
    add = parser.add_argument
    jobs = min(4, (os.cpu_count() or 1) + 1)  # a round waits more than it works
    add("--faults", type=int, default=500, metavar="N", help="end when so many were injected (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the order, moments and choices (default: %(default)s)")
    add("--only", action="append", metavar="NAME", choices=sorted(load()), help="this scenario alone; may be repeated")
    add("--whole", action="store_true", help="end with a whole pass over the scenarios, each at least once")
    add("--minutes", type=float, default=1e6, help="end after so long in any case")
    add("--jobs", type=int, default=jobs, metavar="N", help="rounds at a time (default: cores + 1, here %(default)s)")
    add("--keep", metavar="FOLDER", help="keep every history and log there")
    add("--write", action="store_true", help="the report into docs/reliability.md, too")
    add("--list", action="store_true", help="name the scenarios")
    return parser


if __name__ == "__main__":
    sys.exit(main())
