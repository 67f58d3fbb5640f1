"""`headrace serve`, `endpoint ...`, `task explain` and `status --watch`, against real workers and endpoints."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.commands import COMMAND, Folder, environment, headrace, one_line, read_until, started, until
from tests.support.endpoints import SimulatedEndpoint, simulated_endpoints

pytestmark = pytest.mark.e2e

TOKEN = "t0ken"
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "why?"}]})


@dataclass
class Place(Folder):
    """A folder with a configuration and its endpoints."""

    samples: list[SimulatedEndpoint]
    config: dict[str, Any]

    @property
    def file(self) -> Path:
        return self.folder / "headrace.yaml"

    def write(self) -> None:
        self.file.write_text(yaml.safe_dump(self.config))


@pytest.fixture
def place(tmp_path: Path, redis_url: str) -> Iterator[Place]:
    with simulated_endpoints(3, "--port", "0") as samples:
        listed = [{"id": f"e{i}", "url": each.url, "max_concurrent": 2} for i, each in enumerate(samples[:2])]
        config = {"redis": {"url": redis_url}, "processes": 1, "pools": {"npu": {"endpoints": listed}}}
        place = Place(tmp_path, samples, config)
        place.write()
        yield place


@contextmanager
def working(place: Place) -> Iterator[subprocess.Popen[str]]:
    with started("worker", "-c", "headrace.yaml", cwd=place.folder) as worker:
        read_until(worker, "1 process, 2 endpoints, 4 slots")
        until(lambda: len(place.json("endpoint", "list").get("npu", [])) == 2, "the pool is registered")
        yield worker
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0


@contextmanager
def serving(place: Place, *words: object, **env: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    with started("serve", "-c", "headrace.yaml", "--port", 0, *words, cwd=place.folder, env=env) as server:
        url = _address(server)
        headers = {"authorization": f"Bearer {TOKEN}", "x-requested-with": "tests"}
        with httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as client:
            yield server, client


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"listening on http://\S+?:(\d+)", line):
            return f"http://127.0.0.1:{found[1]}"
    assert server.stderr is not None
    raise AssertionError(f"it ended: {server.stderr.read()}")


def test_operators_work_through_the_api_and_the_commands(place: Place) -> None:
    with working(place), serving(place, HEADRACE_API_TOKEN=TOKEN) as (server, api):
        assert httpx.get(f"{api.base_url}/api/pools", trust_env=False).status_code == 401
        for _ in range(4):
            place.run("enqueue", "npu", "--json", CHAT, "--wait", "--timeout", "20s")
        stats = api.get("/api/npu/pool/stats").json()
        assert (stats["total_workers"], stats["total_tasks_processed"], stats["success_rate"]) == (2, 4, 1.0)
        assert stats["avg_task_duration_ms"] > 0
        workers = api.get("/api/npu/pool/workers").json()["workers"]
        assert [each["id"] for each in workers] == ["e0", "e1"]
        assert [each["url"] for each in workers] == [each.url for each in place.samples[:2]]
        assert sum(each["total_requests"] for each in workers) == 4

        assert "drained" in place.run("endpoint", "drain", "e0")
        assert api.post("/api/pools/npu/endpoints/e1/drain").json()["state"] == "draining"
        task = place.run("enqueue", "npu", "--json", CHAT).strip()
        told = place.json("task", "explain", task)
        assert told["summary"].startswith("place 1 of 1 in list 'normal'; no endpoint may take it: ")
        assert "e0 is draining" in told["summary"]
        assert "is draining" in place.run("task", "explain", task)
        assert api.get(f"/api/tasks/{task}/explain").json()["place"] == 1
        assert "in use again" in place.run("endpoint", "undrain", "e0")
        until(lambda: api.get(f"/api/tasks/{task}").json()["state"] == "ok", "it is answered now")
        assert api.get(f"/api/tasks/{task}").json()["endpoint"] == "e0"

        assert "headrace_tasks_settled_total" in api.get("/metrics").text
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0


def test_an_endpoint_added_through_the_api_serves_and_goes_again(place: Place) -> None:
    with working(place), serving(place) as (_, api):
        for name in ("e0", "e1"):
            place.run("endpoint", "drain", name)
        new = {"id": "e2", "url": place.samples[2].url, "max_concurrent": 1}
        added = api.post("/api/pools/npu/endpoints", json=new)
        assert added.status_code == 201
        task = place.run("enqueue", "npu", "--json", CHAT).strip()
        until(lambda: api.get(f"/api/tasks/{task}").json()["state"] == "ok", "the new endpoint answers")
        assert api.get(f"/api/tasks/{task}").json()["endpoint"] == "e2"
        assert [row["id"] for row in place.json("endpoint", "list")["npu"]] == ["e0", "e1", "e2"]
        assert api.delete("/api/pools/npu/endpoints/e2").json()["removed"]
        until(lambda: len(api.get("/api/pools/npu/endpoints").json()["endpoints"]) == 2, "it is gone")
        words = ("--id", "e3", "--priority", "7", "--label", "a=b")
        assert "added" in place.run("endpoint", "add", place.samples[2].url, *words)
        (row,) = [row for row in place.json("endpoint", "list")["npu"] if row["id"] == "e3"]
        assert (row["priority"], row["labels"], row["source"]) == (7, {"a": "b"}, "added")
        assert "removed" in place.run("endpoint", "remove", "e3")
        done = headrace("endpoint", "remove", "e0", "-c", "headrace.yaml", cwd=place.folder)
        assert done.returncode == 2
        assert re.search(r"headrace\.yaml:\d+: remove it there, or drain it", one_line(done))


def test_reload_is_all_or_nothing(place: Place) -> None:
    with working(place), serving(place) as (_, api):
        assert api.post("/api/npu/pool/reload").json()["success"] is True
        good = place.file.read_text()
        place.file.write_text(good.replace("http://", "ftp://"))
        legacy = api.post("/api/npu/pool/reload").json()
        assert legacy["success"] is False
        assert "headrace.yaml:" in legacy["message"]
        assert legacy["workers_loaded"] == 2
        assert api.post("/api/reload").status_code == 409
        assert len(api.get("/api/npu/pool/workers").json()["workers"]) == 2
        place.config["pools"]["npu"]["endpoints"][0]["priority"] = 9
        place.write()
        assert api.post("/api/reload").json()["success"] is True
        assert [each["priority"] for each in api.get("/api/npu/pool/workers").json()["workers"]] == [9, 5]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1.nip.io"])
def test_it_stays_on_this_machine_without_a_token(place: Place, host: str) -> None:
    done = headrace("serve", "-c", "headrace.yaml", "--host", host, cwd=place.folder)
    assert done.returncode == 3
    assert "HEADRACE_API_TOKEN" in one_line(done)


def test_with_a_token_it_may_listen_anywhere(place: Place) -> None:
    with serving(place, "--host", "0.0.0.0", HEADRACE_API_TOKEN=TOKEN) as (_, api):
        assert api.get("/api/pools", headers={"host": "headrace.example"}).status_code == 200


def test_a_port_in_use_is_one_line(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = headrace("serve", "-c", "headrace.yaml", "--port", port, cwd=place.folder)
    assert done.returncode == 2
    assert f"port {port}" in one_line(done)


def test_it_starts_while_redis_is_away(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "headrace.yaml").write_text(yaml.safe_dump({"redis": {"url": f"redis://127.0.0.1:{port}/0"}}))
    with serving(Place(tmp_path, [], {})) as (_, api):
        assert api.get("/livez").status_code == 200
        assert api.get("/readyz").status_code == 503


def test_it_serves_the_embedded_queue(tmp_path: Path) -> None:
    (tmp_path / "headrace.yaml").write_text("processes: 1\n")
    with serving(Place(tmp_path, [], {})) as (server, api):
        assert api.get("/readyz").json() == {"ready": True}
        assert api.get("/api/pools").json() == {"pools": []}
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0


def test_words_of_endpoint_verbs(place: Place) -> None:
    with working(place):
        for words, part in (
            (("drain", "e9"), "no pool has it; there is e0, e1"),
            (("reset", "e0", "--pool", "other"), "pool 'other'"),
            (("add", "ftp://x"), "url: must start with http:// or https://"),
            (("add", "http://127.0.0.1:1", "--priority", "11"), "priority"),
            (("add", "http://127.0.0.1:1", "--label", "x"), "NAME=VALUE"),
            (("add", place.samples[0].url), "the same server as endpoint 'e0'"),
        ):
            done = headrace("endpoint", *words, "-c", "headrace.yaml", cwd=place.folder)
            assert done.returncode in (2, 3), done.stderr
            assert part in one_line(done)
        assert "breaker closed" in place.run("endpoint", "reset", "e0")
        listed = place.run("endpoint", "list")
        assert re.search(r"e0 +ready +5 +0/2", listed)
        assert place.samples[0].url in listed


def test_status_watch_prints_again_until_it_is_stopped(place: Place) -> None:
    with working(place), started("status", "--watch", "--json", "-c", "headrace.yaml", cwd=place.folder) as watch:
        assert watch.stdout is not None
        pictures = [json.loads(watch.stdout.readline()) for _ in range(2)]
        assert [each["pools"][0]["pool"] for each in pictures] == ["npu", "npu"]
        watch.send_signal(signal.SIGINT)
        assert watch.wait(20) == 0


def test_status_watch_on_a_terminal(place: Place) -> None:
    with working(place):
        parent, child = pty.openpty()
        words = ("status", "--watch", "-c", "headrace.yaml")
        watch = subprocess.Popen(
            [*COMMAND, *words], cwd=place.folder, stdin=child, stdout=child, stderr=child, start_new_session=True,
            env=environment(TERM="xterm-256color", COLUMNS="120", LINES="40"),
        )  # fmt: skip
        os.close(child)
        seen = ""
        end = time.monotonic() + 30
        while "per second" not in seen or "0/2" not in seen:
            assert time.monotonic() < end, seen
            seen += os.read(parent, 65536).decode("utf-8", "replace")
        watch.send_signal(signal.SIGINT)
        while watch.poll() is None:
            try:
                os.read(parent, 65536)
            except OSError:
                break
        assert watch.wait(20) == 0
        os.close(parent)
    assert "pool npu: 0 waiting" in seen
