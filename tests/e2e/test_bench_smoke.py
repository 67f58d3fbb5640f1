"""The benchmark harness runs and tells true counts. No time is asserted: that is for people to read."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest

from bench import interrupt
from bench.__main__ import main
from bench.endpoints import own_endpoint
from bench.job import PAYLOAD_BYTES, encode, payload
from bench.lab import Lab, Options
from bench.measures import NAMES, startup
from bench.measures.flat import spread
from bench.measures.inflight import whole_ms
from bench.measures.progress import rate
from bench.peers import PEERS, VARIANTS
from bench.processes import BenchError, command_of, cores, here, until
from bench.report import BEGIN, END, Goal, Section, number, render, write
from bench.servers import server

ROOT = Path(__file__).resolve().parents[2]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def headrace(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "broker.cli", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def processes() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


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
    missing = [line for line in ran.stdout.splitlines() if "not measured" in line]
    assert len(missing) == 3, missing  # what needs all peers
    assert all(" peer" in line and "not run: " in line for line in missing), missing
    for name in NAMES:
        assert f"{name}: " in ran.stderr


@pytest.mark.e2e
@pytest.mark.parametrize("words", [
    ("nonsense",), ("--nonsense",), ("--peers", "nobody"), ("--server", os.devnull, "startup"), ("--tasks", "-5"),
    ("--tasks", "0"), ("--repeats", "-1", "--small", "startup"), ("--transport", "nope"),
    ("--write", "--small"), ("--write", "startup"), ("--write", "--peers", "rq"),
])  # fmt: skip
def test_words_it_does_not_know_are_one_line(words: tuple[str, ...]) -> None:
    ran = bench(*words)
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert ran.stderr.startswith("bench: ")


@pytest.mark.e2e
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["bench", "broker.cli"])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, module: str, number: signal.Signals) -> None:
    def left() -> list[int]:
        return [pid for pid in processes() if str(tmp_path) in command_of(pid)]

    words = [*(["bench"] if module == "broker.cli" else []), "--small", "--tasks", "20000", "--peers", "none", "drain"]
    ran = subprocess.Popen(
        [sys.executable, "-m", module, *words], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert ran.stdout is not None
        for line in ran.stdout:
            if line.startswith("drain ..."):
                break
        assert until(left, "its server runs")
        os.killpg(ran.pid, number)
        said, _ = ran.communicate(timeout=60)
        assert ran.returncode == 130, said
        assert said.splitlines() == ["bench: interrupted"]
        assert left() == []
        assert list(tmp_path.iterdir()) == []
    finally:
        ran.kill()
        ran.wait()
        for pid in left():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.e2e
def test_the_command_passes_all_words_on() -> None:
    ran = headrace("bench", "--help")
    assert "python -m bench" in ran.stdout
    assert "--transport" in ran.stdout
    ran = headrace("bench", "--small", "--nonsense")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "bench: unrecognized arguments: --nonsense (see python -m bench --help)\n"


@pytest.mark.e2e
def test_one_that_fails_in_a_later_round_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def seconds(words: list[str]) -> float:
        calls.append(words[-1])
        if words[-1] == "pass" and calls.count("pass") == 2:
            raise BenchError("Python is tired")
        return 0.025

    monkeypatch.setattr(startup, "seconds", seconds)
    monkeypatch.setattr(interrupt, "arm", lambda: None)  # this process is not the run's
    assert main(["--repeats", "3", "--peers", "none", "startup"]) == 1
    assert calls == ["--version", "pass", "--version", "pass", "--version"]
    said = capsys.readouterr().out.splitlines()
    assert "left out: Python is tired" in said
    assert "python -c pass      -" in said
    assert "headrace --version  25" in said


def lab(folder: Path) -> Lab:
    nowhere: Any = SimpleNamespace(url="redis://127.0.0.1:9/0")
    return Lab(Options(), nowhere, folder, print)


@pytest.mark.e2e
def test_the_best_of_a_few_peers_is_not_the_best_peer(tmp_path: Path) -> None:
    found = {name: 100.0 + at for at, name in enumerate(PEERS)}
    assert lab(tmp_path).best(found, max) == (found[PEERS[-1]], PEERS[-1])
    assert lab(tmp_path).best(found, min) == (100.0, PEERS[0])
    del found[VARIANTS[0]]
    assert lab(tmp_path).best(found, min, variants=False) == (100.0, PEERS[0])
    value, why = lab(tmp_path).best({**found, "repid": float("nan")}, max)
    assert math.isnan(value)
    assert why == f"not run: {VARIANTS[0]}, repid"


@pytest.mark.e2e
def test_an_endpoint_counts_from_its_reset(tmp_path: Path) -> None:
    with own_endpoint(tmp_path, delay=0.01, stamps=True) as endpoint, ThreadPoolExecutor(4) as callers:

        def post(number: int) -> None:
            urlopen(endpoint.urls[0], json.dumps({"n": f"{number:09d}"}, separators=(",", ":")).encode()).close()

        def together(number: int) -> None:
            all_at_once.wait()
            post(number)

        all_at_once = Barrier(4)
        for _ in callers.map(together, range(4)):
            pass
        assert endpoint.stats()["most"] > 1
        endpoint.reset()
        post(7)
        assert endpoint.stats() == {"served": 1, "open": 0, "most": 1}
        assert list(endpoint.stamps()) == [7]
        assert len(endpoint.answers()) == 1


@pytest.mark.e2e
def test_the_servers_time_is_its_cpu(tmp_path: Path) -> None:
    with server("bundled", tmp_path, aof=False) as running:
        before = running.cpu_us()
        running.redis.eval("for _ = 1, 3000000 do end", 0)
        worked = running.cpu_us() - before
        before = running.cpu_us()
        running.redis.blpop(["nothing"], timeout=0.3)
        assert running.cpu_us() - before < worked
        assert worked > 1000


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen")
def test_a_place_is_left_again() -> None:
    before = cores()
    with here("worker"):
        assert len(cores()) == 1
    assert cores() == before


def test_a_row_is_not_flat_if_a_point_is_missing() -> None:
    assert spread([2.0, 3.0]) == 1.5
    assert math.isnan(spread([2.0, float("nan"), 3.0]))
    assert math.isnan(spread([float("nan"), 2.0, 3.0]))


def test_milliseconds_of_outcomes_are_whole() -> None:
    assert [whole_ms(value) for value in (8.9999, 13.0001, 10.226)] == [9, 13, 11]
    assert math.isnan(whole_ms(float("nan")))


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
