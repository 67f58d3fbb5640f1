"""Worker processes that die, Redis that dies, supervisors that take turns: the supervisor's part in losing nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from broker import Broker, Request
from tests.support.commands import headrace, started
from tests.support.endpoints import simulated_endpoints
from tests.support.fleet import ROOT, Fleet, fleet, pool_config, until

CHAT = Request("POST", "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "hi"}]})
QUEUE = {"lease": "3s"}


def test_a_process_that_keeps_dying_is_started_again_ever_more_slowly(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(1) as (endpoint,), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url], queue=QUEUE)}) as running:
            for _ in range(3):
                killed = running.kill_one()
                until(lambda killed=killed: set(running.pids) - {killed}, "another in its place")
            told = running.log.read_text()
            waits = [float(each) for each in re.findall(r"signal 9; starting it again in ([\d.]+) s", told)]
            assert waits == [0.5, 1.0, 2.0], told
            assert broker.enqueue("llm", CHAT).result(timeout=20).ok


def test_no_more_processes_are_started_than_there_are_slots(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(2) as endpoints, Broker(redis_url) as broker:
        pool = {"llm": pool_config([each.url for each in endpoints], slots=1)}
        with fleet(tmp_path, redis_url, pool, 3) as running:
            assert len(running.pids) == 2
            assert "processes 3: there are 2 slots in all, so 2 are started" in running.log.read_text()
            assert all(result.ok for result in broker.map("llm", [CHAT] * 8, timeout=60))


def test_a_process_started_again_serves_by_the_newest_rules(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(2) as (old, new), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([old.url], queue=QUEUE)}) as running:
            text = running.file.read_text()
            running.file.write_text(text.replace(old.url, new.url))
            until(lambda: f"-> {new.url}" in running.log.read_text(), "taken")
            killed = running.kill_one()
            until(lambda: set(running.pids) - {killed}, "another in its place")
            assert broker.enqueue("llm", CHAT).result(timeout=20).ok
        assert old.stats()["hits"] == 0
        assert new.stats()["hits"] == 1


def test_rules_that_change_while_a_process_is_down_reach_it(tmp_path: Path, redis_url: str) -> None:
    """Killed thrice, it is down for two seconds: the change comes in between."""
    with simulated_endpoints(2) as (old, new), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([old.url], queue=QUEUE)}) as running:
            for wait in ("0.5", "1.0", "2.0"):
                until(lambda: running.pids, "it runs")
                running.kill_one()
                until(lambda wait=wait: f"again in {wait} s" in running.log.read_text(), "seen dead")
            running.file.write_text(running.file.read_text().replace(old.url, new.url))
            running.signal(signal.SIGHUP)
            until(lambda: f"-> {new.url}" in running.log.read_text(), "taken")
            assert broker.enqueue("llm", CHAT).result(timeout=20).ok
        assert old.stats()["hits"] == 0


@pytest.mark.slow
def test_a_rolling_restart_loses_nothing_and_sends_nothing_twice(tmp_path: Path, redis_url: str) -> None:
    """Two workers, each drained and started anew in turn while 600 tasks run."""
    with simulated_endpoints(2, "--latency", "100ms") as endpoints, Broker(redis_url) as broker:
        pool = {"llm": pool_config([each.url for each in endpoints], slots=4)}
        folders = [tmp_path / name for name in "ab"]
        for folder in folders:
            folder.mkdir()
        fleets = [Fleet(folder, redis_url, pool, 1) for folder in folders]
        try:
            tasks = broker.enqueue_many("llm", [CHAT] * 600)
            for i, folder in enumerate(folders):
                until(lambda: sum(each.stats()["in_flight"] for each in endpoints) == 8, "all slots are in use")
                fleets[i].signal(signal.SIGTERM)
                assert fleets[i].wait() == 0
                fleets[i].store.close()
                fleets[i] = Fleet(folder, redis_url, pool, 1)
            outcomes = Counter(task.result(timeout=40).outcome for task in tasks)
        finally:
            for each in fleets:
                each.close()
        by_task = Counter[str]()
        for endpoint in endpoints:
            by_task.update(endpoint.stats()["by_task"])
    assert outcomes == {"ok": 600}
    assert len(by_task) == 600
    assert set(by_task.values()) == {1}


def test_a_stop_while_a_process_drains_for_good_lets_it_finish(tmp_path: Path, redis_url: str) -> None:
    """Fewer processes, then SIGTERM: one order to each, not two to the one that is leaving."""
    with simulated_endpoints(2, "--latency", "2s") as endpoints, Broker(redis_url) as broker:
        pool = {"llm": pool_config([each.url for each in endpoints], slots=2)}
        with fleet(tmp_path, redis_url, pool, 2) as running:
            tasks = broker.enqueue_many("llm", [CHAT] * 4)
            until(lambda: sum(each.stats()["in_flight"] for each in endpoints) == 4, "all slots are in use")
            running.file.write_text(running.file.read_text().replace("processes: 2", "processes: 1"))
            running.signal(signal.SIGHUP)
            until(lambda: "drains: it is not needed" in running.log.read_text(), "one leaves")
            running.signal(signal.SIGTERM)
            assert running.wait() == 0
        assert {task.status() for task in tasks} == {"ok"}
        assert sum(each.stats()["hits"] for each in endpoints) == 4


def test_the_embedded_server_is_started_again_and_work_goes_on(tmp_path: Path) -> None:
    with simulated_endpoints(1, "--latency", "50ms") as (endpoint,):
        settings = {"pools": {"llm": pool_config([endpoint.url], slots=4)}, "processes": 1}
        (tmp_path / "headrace.yaml").write_text(yaml.safe_dump(settings))
        with started("worker", "-c", "headrace.yaml", cwd=tmp_path):
            until(lambda: (tmp_path / ".headrace" / "server.sock").exists(), "the server is up")
            words = ("enqueue", "llm", "-c", "headrace.yaml", "--json", json.dumps(CHAT.json), "--wait")
            first = headrace(*words, cwd=tmp_path)
            assert first.returncode == 0, first.stderr
            server = until(lambda: _server_pid(tmp_path), "its process")
            os.kill(server, signal.SIGKILL)
            until(lambda: _server_pid(tmp_path) not in (0, server), "the worker starts another")
            again = headrace(*words, cwd=tmp_path)
            assert again.returncode == 0, again.stderr
        assert endpoint.stats()["hits"] == 2


def _server_pid(folder: Path) -> int:
    """The process that listens at the folder's socket; 0 if there is none."""
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                words = (each / "cmdline").read_bytes()
            except OSError:
                continue
            name = words.split(b"\0")[0]
            if b"server" in name and str(folder).encode() in words:
                return int(each.name)
    return 0


def test_a_configuration_without_endpoints_is_refused_at_the_start(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "headrace.yaml").write_text(yaml.safe_dump({"redis": {"url": redis_url}, "pools": {"llm": {}}}))
    done = headrace("worker", "-c", "headrace.yaml", cwd=tmp_path)
    assert done.returncode == 3
    assert "no endpoint to serve" in done.stderr


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGTERM)])
def test_two_signals_at_once_to_a_worker_of_rq_are_one_order(
    tmp_path: Path, redis_url: str, numbers: tuple[signal.Signals, signal.Signals]
) -> None:
    """Ctrl-C goes to the whole group of `rq worker-pool`, which passes it on: what runs must finish all the same."""
    with simulated_endpoints(1, "--latency", "2s") as (endpoint,), Broker(redis_url) as broker:
        command = [sys.executable, "-m", "rq.cli", "worker", "--url", redis_url, "--worker-class"]
        with subprocess.Popen(
            [*command, "workers.rq_worker.EndpointWorker", "llm"],
            cwd=ROOT, env=os.environ | {"HEADRACE_ENDPOINT": endpoint.url, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            try:
                task = broker.enqueue("llm", CHAT)
                until(lambda: endpoint.stats()["in_flight"] == 1, "it runs")
                for number in numbers:
                    process.send_signal(number)
                assert process.wait(20) == 0
            finally:
                process.kill()
        assert task.status() == "ok"
        assert endpoint.stats()["hits"] == 1
