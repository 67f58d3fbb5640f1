"""How long `headrace --version` takes, beside an empty Python."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from bench.lab import Lab, median
from bench.processes import BenchError, environment
from bench.report import Goal, Section, number

RUNS = 5  # in one round


def seconds(words: list[str]) -> float:
    taken = []
    for _ in range(RUNS):
        start = time.perf_counter()
        ran = subprocess.run(words, env=environment(), capture_output=True, check=False)
        taken.append(time.perf_counter() - start)
        if ran.returncode != 0:
            raise BenchError(f"{' '.join(words)} ended with {ran.returncode}: {ran.stderr.decode()[-200:]}")
    return median(taken)


def measure(lab: Lab) -> Section:
    section = Section("startup", "Start of the command", ("command", "ms"))
    script = Path(sys.executable).with_name("headrace")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "broker.cli"]
    ours, empty = lab.rounds(lambda: seconds([*command, "--version"]), lambda: seconds([sys.executable, "-c", "pass"]))
    shown = f"{'headrace' if script.exists() else 'python -m broker.cli'} --version"
    section.add(shown, number(median(ours) * 1000))
    section.add("python -c pass", number(median(empty) * 1000))
    section.goals.append(Goal("headrace --version", median(ours) * 1000, 150, at_least=False, unit="ms"))
    return section
