"""`python -m tests.chaos --faults N --seed S [--only NAME]`: rounds of scenarios until N faults were injected."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.checker import Verdict, check, read, table
from tests.chaos.report import report
from tests.chaos.scenarios import Scenario, load
from tests.chaos.world import world


def run_round(scenario: Scenario, seed: int, folder: Path, budget: int | None = None) -> Verdict:
    """One world, one scenario, its history checked. What a scenario itself found counts as a violation."""
    folder.mkdir(parents=True, exist_ok=True)
    complaint = ""
    with world(scenario.name, scenario.settings, seed, folder) as made:
        try:
            scenario.action(made, min(budget or scenario.most, scenario.most))
        except AssertionError as error:
            complaint = str(error)
        except Exception:
            complaint = traceback.format_exc(limit=-3)
        made.finish()
    verdict = check(read(made.path))
    if complaint:
        verdict.against("F", f"the scenario says: {complaint}")
    return verdict


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    scenarios = load()
    if options.list:
        for each in scenarios.values():
            print(f"{each.name:20} row {each.row:2}  {(each.action.__doc__ or '').splitlines()[0]}")
        return 0
    chosen = [scenarios[name] for name in options.only or scenarios]
    folder = Path(options.keep or tempfile.mkdtemp(prefix="chaos-"))
    rng, began = random.Random(options.seed), time.monotonic()
    verdicts: list[Verdict] = []
    faults = 0
    end = began + options.minutes * 60
    while faults < options.faults and time.monotonic() < end:
        rng.shuffle(chosen)
        for scenario in chosen:
            seed = rng.randrange(10**6)
            place = folder / f"{len(verdicts):04d}-{scenario.name}"
            verdict = run_round(scenario, seed, place)
            verdicts.append(verdict)
            faults += verdict.injected
            _say(verdict, len(verdicts), faults)
            if verdict.holds and not options.keep:
                shutil.rmtree(place)
            elif not verdict.holds:
                print(f"  history and logs: {place}", flush=True)
            if time.monotonic() > end or (faults >= options.faults and not options.whole):
                break
    print()
    print(report(verdicts, time.monotonic() - began, options.seed))
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
    add("--faults", type=int, default=500, metavar="N", help="end when so many were injected (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the order, moments and choices (default: %(default)s)")
    add("--only", action="append", metavar="NAME", help="this scenario alone; may be repeated")
    add("--whole", action="store_true", help="end with a whole pass over the scenarios, each at least once")
    add("--minutes", type=float, default=1e6, help="end after so long in any case")
    add("--keep", metavar="FOLDER", help="keep every history and log there")
    add("--list", action="store_true", help="name the scenarios")
    return parser


if __name__ == "__main__":
    sys.exit(main())
