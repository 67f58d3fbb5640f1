"""Rounds: one world, one scenario, one verdict each; several at a time, each in a process of its own."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.chaos.checker import check, read
from tests.chaos.scenarios import Scenario, load
from tests.chaos.verdict import Verdict
from tests.chaos.world import world
from tests.support.fleet import ROOT

ROUND_S = 300  # no round takes so long; one that hangs is ended and counts as broken
END_S = 60.0  # for its servers and processes to end, then


@dataclass(frozen=True)
class Round:
    """What is played, where."""

    number: int
    scenario: str
    seed: int
    folder: Path


def run_round(scenario: Scenario, seed: int, folder: Path, budget: int | None = None) -> Verdict:
    """One world, one scenario, its history checked. What a scenario itself found counts as a violation."""
    folder.mkdir(parents=True, exist_ok=True)
    complaint = ""
    with world(scenario.name, scenario.settings, seed, folder) as made:
        try:
            scenario.action(made, min(budget or scenario.most, scenario.most))
        except AssertionError as error:
            complaint = str(error) or traceback.format_exc(limit=-2)
        except Exception:
            complaint = traceback.format_exc(limit=-3)
        made.finish()
    verdict = check(read(made.path))
    if complaint:
        verdict.against("F", f"the scenario says: {complaint}")
    return verdict


def endless(names: Sequence[str], rng: random.Random, folder: Path) -> Iterator[Round]:
    """Pass after pass over the scenarios, each once a pass, in another order each time."""
    number = 0
    while True:
        order = list(names)
        rng.shuffle(order)
        for name in order:
            number += 1
            yield Round(number, name, rng.randrange(10**6), folder / f"{number:04d}-{name}")


def play(
    rounds: Iterator[Round], jobs: int, more: Callable[[int, int], bool], done: Callable[[Round, Verdict], None]
) -> None:
    """`jobs` at a time, for as long as `more(started, faults)` says; `done` hears of each. None stops the others."""
    running: dict[subprocess.Popen[bytes], tuple[Round, float]] = {}
    started = faults = 0
    try:
        while running or more(started, faults):
            while len(running) < jobs and more(started, faults):
                each = next(rounds)
                running[_start(each)] = (each, time.monotonic())
                started += 1
            for process, (each, since) in list(running.items()):
                if process.poll() is None and time.monotonic() - since < ROUND_S + END_S:
                    continue
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it left, too
                process.wait()
                del running[process]
                verdict = _verdict(each)
                faults += verdict.injected
                done(each, verdict)
            time.sleep(0.05)
    finally:
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait()


def _start(each: Round) -> subprocess.Popen[bytes]:
    each.folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.chaos.rounds", each.scenario, str(each.seed), str(each.folder)]
    with (each.folder / "round.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def _verdict(each: Round) -> Verdict:
    try:
        told = json.loads((each.folder / "verdict.json").read_text())
    except (OSError, ValueError):
        verdict = Verdict(each.scenario, each.seed)
        said = (each.folder / "round.log").read_text(errors="replace").strip().splitlines()
        verdict.against("F", f"the round itself failed: {said[-1] if said else 'it said nothing'}")
        return verdict
    counts = {name: Counter(told[name]) for name in ("outcomes", "faults")}
    violations = [(letter, what) for letter, what in told["violations"]]
    return Verdict(**{**told, **counts, "violations": violations})


def forget(each: Round) -> None:
    """Its history and logs: nothing was wrong."""
    shutil.rmtree(each.folder, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """One round: SCENARIO SEED FOLDER. Its verdict goes to `verdict.json` there."""
    name, seed, folder = arguments

    def give_up(number: int, frame: FrameType | None) -> None:
        raise SystemExit(f"ended by {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, give_up)
    signal.alarm(ROUND_S)
    verdict = run_round(load()[name], int(seed), Path(folder))
    signal.alarm(0)
    (Path(folder) / "verdict.json").write_text(json.dumps(vars(verdict)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
