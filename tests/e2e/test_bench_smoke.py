"""The benchmark harness runs and tells true counts. No time is asserted: that is for people to read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.job import PAYLOAD_BYTES, encode, payload
from bench.measures import NAMES
from bench.measures.progress import rate
from bench.report import BEGIN, END, Goal, Section, number, render, write

ROOT = Path(__file__).resolve().parents[2]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.e2e
def test_a_small_run_prints_goals_and_tables() -> None:
    ran = bench("--small", "--tasks", "40", "--peers", "none", "startup", "enqueue")
    assert ran.returncode == 0, ran.stderr
    assert "headrace --version" in ran.stdout
    assert "single enqueue against rq" in ran.stdout
    assert "left out" not in ran.stderr


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="memory and idle read /proc")
def test_every_measurement_runs() -> None:
    ran = bench("--small", "--peers", "rq")
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert "left out" not in ran.stderr
    assert "not measured" not in ran.stdout
    for name in NAMES:
        assert f"{name}: " in ran.stderr


@pytest.mark.e2e
@pytest.mark.parametrize("words", [("nonsense",), ("--peers", "nobody"), ("--server", os.devnull, "startup")])
def test_words_it_does_not_know_are_one_line(words: tuple[str, ...]) -> None:
    ran = bench(*words)
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1, ran.stderr


def test_payloads_are_equally_long_and_differ() -> None:
    bodies = [encode(payload(each)) for each in (0, 7, 123_456, 999_999_999)]
    assert {len(body) for body in bodies} == {PAYLOAD_BYTES}
    assert len(set(bodies)) == len(bodies)


def test_rate_leaves_out_the_start() -> None:
    idle_then_steady = [(0.0, 0), (10.0, 10), (11.0, 50), (12.0, 100)]
    assert rate(idle_then_steady) == pytest.approx(45.0)
    assert rate([(0.0, 0), (2.0, 100)]) == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [(12345.6, "", "12,346"), (0, "", "0"), (1.25, "x", "1.25x"),
     (0.0123, "ms", "0.0123 ms"), (float("nan"), "x", "-")],
)
def test_numbers_show_three_digits(value: float, unit: str, shown: str) -> None:
    assert number(value, unit) == shown


def test_a_goal_says_reached_missed_or_not_measured() -> None:
    assert Goal("rate", 50.0, 50).word == "yes"
    assert Goal("rate", 49.9, 50).word == "MISSED"
    assert Goal("latency", 1.3, 1.2, at_least=False).word == "MISSED"
    assert Goal("latency", float("nan"), 1.2, at_least=False).word == "not measured"


def test_writing_replaces_the_measured_part_only(tmp_path: Path) -> None:
    file = tmp_path / "docs" / "performance.md"
    section = Section("a", "A", ("what", "much"), rows=[["x", "1"]], goals=[Goal("g", 2, 1)])
    write(file, render([section], ["machine: one"], markdown=True))
    file.write_text(file.read_text().replace(END, f"{END}\n\nWhy it is so."))
    write(file, render([section], ["machine: two"], markdown=True))
    text = file.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert "machine: two" in text
    assert "machine: one" not in text
    assert text.endswith("Why it is so.\n")
    assert text.startswith("# Performance\n")
