"""The verbs beside `run`, against real workers: what one enqueues is served, shown, canceled, redriven."""

from __future__ import annotations

import json
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import yaml

from broker.store import Store
from tests.support.commands import Folder, headrace, one_line, read_until, started, until
from tests.support.endpoints import SimulatedEndpoint, simulated_endpoints
from workers.simulate.answers import answer_text

pytestmark = pytest.mark.e2e

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "why?"}]})
LONG = json.dumps({"model": "m", "messages": [{"role": "user", "content": "why? " * 100}]})


@dataclass
class Place(Folder):
    """A folder with a configuration, its endpoints, and workers that serve it."""

    samples: list[SimulatedEndpoint]


@pytest.fixture
def place(tmp_path: Path, redis_url: str) -> Iterator[Place]:
    with simulated_endpoints(2, "--port", "0", "--max-prompt", "100") as samples:
        listed = [{"id": f"e{i}", "url": each.url, "max_concurrent": 2} for i, each in enumerate(samples)]
        config = {"redis": {"url": redis_url}, "processes": 2, "pools": {"llm": {"endpoints": listed}}}
        (tmp_path / "headrace.yaml").write_text(yaml.safe_dump(config))
        yield Place(tmp_path, samples)


@pytest.fixture
def served(place: Place) -> Iterator[Place]:
    with started("worker", "-c", "headrace.yaml", cwd=place.folder) as worker:
        read_until(worker, "2 processes, 2 endpoints, 4 slots")
        yield place
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0


def test_enqueue_and_wait(served: Place) -> None:
    answer = json.loads(served.run("enqueue", "llm", "--json", CHAT, "--wait", "--timeout", "20s"))
    assert answer["choices"][0]["message"]["content"] == answer_text("why?")
    told = json.loads(served.run("enqueue", "llm", "-", "--wait", "--output-json", text=CHAT))
    assert (told["outcome"], told["status_code"], told["attempts"]) == ("ok", 200, 1)
    task = served.json("task", "show", told["id"])
    assert (task["state"], task["pool"], task["endpoint"]) == ("ok", "llm", told["endpoint"])


def test_the_same_key_is_the_same_task(served: Place) -> None:
    first = served.run("enqueue", "llm", "--json", CHAT, "--key", "k1")
    assert served.run("enqueue", "llm", "--json", CHAT, "--key", "k1") == first
    done = headrace("enqueue", "llm", "--json", LONG, "--key", "k1", "-c", "headrace.yaml", cwd=served.folder)
    assert done.returncode == 1
    assert "idempotency key 'k1'" in one_line(done)


def test_dead_letters_are_listed_shown_redriven_and_purged(served: Place) -> None:
    told = json.loads(served.run("enqueue", "llm", "--json", LONG, "--wait", "--output-json", code=1))
    assert (told["outcome"], told["status_code"]) == ("dead", 400)
    (letter,) = served.json("dead", "list")["llm"]
    assert letter["id"] == told["id"]
    assert "400" in letter["reason"]
    assert told["id"] in served.run("dead", "list")
    shown = served.json("dead", "show", told["id"])
    assert [attempt["status_code"] for attempt in shown["history"]] == [400]
    assert shown["payload"]["path"] == "/v1/chat/completions"
    plain = served.run("dead", "show", told["id"])
    assert "\nttl              14 d 0 h\n" in plain
    assert "kept for 14 d 0 h more" in plain
    for sample in served.samples:
        sample.control(max_prompt=0)
    assert "1 queued again" in served.run("dead", "redrive", told["id"])
    until(lambda: served.json("task", "show", told["id"])["state"] == "ok", "it is answered now")
    assert served.run("dead", "list") == "no dead letters\n"
    for sample in served.samples:
        sample.control(max_prompt=100)
    served.run("enqueue", "llm", "--json", LONG, "--wait", code=1)
    assert served.run("dead", "purge", "--all", "--pool", "llm") == "1 deleted\n"
    assert served.json("dead", "list")["llm"] == []


def test_cancel(served: Place) -> None:
    for sample in served.samples:
        sample.control(mode="hang")
    task_id = served.run("enqueue", "llm", "--json", CHAT).strip()
    until(lambda: sum(each.stats()["in_flight"] for each in served.samples) == 1, "it runs")
    assert served.run("task", "cancel", task_id) == f"{task_id} canceled\n"
    until(lambda: sum(each.stats()["in_flight"] for each in served.samples) == 0, "its connection is closed")
    assert served.json("task", "show", task_id)["state"] == "canceled"
    served.run("task", "cancel", task_id)  # the same again is done already
    served.run("task", "cancel", "no-such-task", code=1)
    served.run("task", "show", "no-such-task", code=1)


def test_status_and_endpoints(served: Place) -> None:
    served.run("enqueue", "llm", "--json", CHAT, "--wait")
    (pool,) = served.json("status")["pools"]
    assert (pool["pool"], pool["running"], pool["workers"]) == ("llm", 0, 2)
    assert [each["id"] for each in pool["endpoints"]] == ["e0", "e1"]
    assert sum(each["served"] for each in served.json("endpoint", "list")["llm"]) == 1
    text = served.run("status")
    assert "pool llm: 0 waiting" in text
    assert "ready" in text
    served.run("status", "--pool", "lmm", code=2)


def test_an_added_endpoint_that_the_file_has_too_can_be_removed(place: Place) -> None:
    """And a pool that only Redis knows does not make the file's only one ambiguous."""
    file = place.folder / "headrace.yaml"
    config = yaml.safe_load(file.read_text())
    store = Store(config["redis"]["url"])
    store.run(store.scripts.register("zz", {}, [("old", 5, 1, True, ())]))
    store.close()
    assert place.run("endpoint", "add", "http://127.0.0.1:9", "--id", "late") == "late of pool llm: added\n"
    config["pools"]["llm"]["endpoints"].append({"id": "late", "url": "http://127.0.0.1:10"})
    file.write_text(yaml.safe_dump(config))
    told = place.run("endpoint", "remove", "late")
    assert told.startswith("late of pool llm: the added one is removed; that of headrace.yaml:")
    assert told.endswith(" stays\n")
    refused = headrace("endpoint", "remove", "late", "-c", "headrace.yaml", cwd=place.folder)
    assert (refused.returncode, "remove it there, or drain it" in one_line(refused)) == (2, True)
    config["pools"]["llm"]["endpoints"].pop()
    file.write_text(yaml.safe_dump(config))
    assert [each["id"] for each in place.json("endpoint", "list", "--pool", "llm")["llm"]] == ["e0", "e1"]


def test_tasks_wait_for_workers(place: Place) -> None:
    task_id = place.run("enqueue", "llm", "--json", CHAT, "--priority", "high").strip()
    assert place.json("task", "show", task_id)["state"] == "queued"
    done = headrace("worker", "--burst", "-c", "headrace.yaml", cwd=place.folder)
    assert done.returncode == 0, done.stderr
    assert place.json("task", "show", task_id)["state"] == "ok"


def test_worker_on_a_url_without_a_file(tmp_path: Path, redis_url: str) -> None:
    with SimulatedEndpoint("--port", "0") as sample:
        words = ("--redis", redis_url)
        headrace("enqueue", "default", "--json", CHAT, *words, cwd=tmp_path)
        done = headrace("worker", "--endpoint", sample.url, "--burst", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert sample.stats()["hits"] == 1


def test_config_check_and_show(place: Place) -> None:
    assert "pool llm (http), preferred first:" in place.run("config", "check")
    assert place.json("config", "check")["pools"] == {"llm": ["e0", "e1"]}
    assert place.json("config", "show")["pools"]["llm"]["retry"]["max_attempts"] == 3
    assert yaml.safe_load(place.run("config", "show"))["processes"] == 2
    assert "headrace.yaml" in place.run("config", "show", "--origins")


def test_doctor(place: Place) -> None:
    place.samples[1].stop()
    found = {each["what"]: each for each in place.json("doctor")}
    assert found["Redis"]["result"] == "ok"
    assert found["persistence"]["result"] == "warning"
    assert found["endpoint e0"]["result"] == "ok"
    assert found["endpoint e1"]["result"] == "warning"
    assert found["ports"]["result"] == "ok"


def test_doctor_tells_the_worst(tmp_path: Path) -> None:
    done = headrace("doctor", "--redis", "redis://127.0.0.1:1/0", cwd=tmp_path)
    assert done.returncode == 4
    assert "failed   Redis" in done.stdout
    (tmp_path / "bad.yaml").write_text("pols: {}\n")
    assert headrace("doctor", "-c", "bad.yaml", cwd=tmp_path).returncode == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "bad.yaml"]


@pytest.mark.slow
def test_demo_tells_the_truth_and_leaves_nothing(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="hr-") as scratch:  # short: a socket's path has 100 characters
        done = headrace("demo", "--json", cwd=tmp_path, env={"TMPDIR": scratch})
        assert list(Path(scratch).iterdir()) == []
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["answered"], told["failed"], told["true"]) == (150, 0, True)
    assert told["retries"] > 0
    assert sum(told["hits"].values()) == 150 + told["retries"]
    assert told["wall_seconds"] < 30
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["kill -9", "two interrupts"])
def test_a_demo_that_is_cut_short_leaves_nothing(tmp_path: Path, end: str) -> None:
    with tempfile.TemporaryDirectory(prefix="hr-") as scratch:
        with started("demo", cwd=tmp_path, env={"TMPDIR": scratch}) as process:
            assert process.stdout is not None
            ports = [int(line.split()[1].rpartition(":")[2]) for line in islice(process.stdout, 1, 4)]
            until(lambda: [1 for each in Path(scratch).glob("*/answers.jsonl") if each.stat().st_size], "answers come")
            if end == "kill -9":
                process.kill()
            else:
                process.send_signal(signal.SIGINT)
                assert process.stderr is not None
                next(line for line in process.stderr if "once more" in line)
                process.send_signal(signal.SIGINT)
            process.wait(20)
            until(lambda: not any(map(listens, ports)), "the sample endpoints end")
            until(lambda: not list(Path(scratch).iterdir()), "the folder is removed")
    assert list(tmp_path.iterdir()) == []


def listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0
