"""`headrace run` as people use it: real processes, real Redis, simulated endpoints."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis
import yaml

from broker.batch_output import OutputFile
from tests.support.commands import (
    chat_line,
    endpoints,
    headrace,
    kill_group,
    one_line,
    read_until,
    rows,
    started,
    until,
    write_batch,
    write_lines,
)
from tests.support.endpoints import SimulatedEndpoint, simulated_endpoints
from tests.support.servers import redis_server
from workers.simulate.answers import answer_text

pytestmark = pytest.mark.e2e

SQUAD = Path(__file__).resolve().parents[3] / "shared" / "data" / "squad_100.jsonl"
DEMO = Path(__file__).resolve().parents[2] / "broker" / "data" / "demo.jsonl"


def config_file(folder: Path, redis: str, samples: list[SimulatedEndpoint], **pool: object) -> Path:
    listed = [{"id": f"e{i}", "url": sample.url, "max_concurrent": 4} for i, sample in enumerate(samples)]
    path = folder / "headrace.yaml"
    path.write_text(yaml.safe_dump({"redis": {"url": redis}, "pools": {"llm": {"endpoints": listed, **pool}}}))
    return path


@contextmanager
def closed_port() -> Iterator[int]:
    """A port of this machine on which nobody listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def answered_once(output: Path, count: int) -> None:
    """Every task has one row, and the answer to its own question."""
    found = rows(output)
    assert Counter(row["custom_id"] for row in found) == Counter(f"task-{i}" for i in range(count))
    for row in found:
        question = f"question {row['custom_id'].removeprefix('task-')}"
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["body"]["choices"][0]["message"]["content"] == answer_text(question)


def test_500_lines_over_3_endpoints(tmp_path: Path, redis_url: str) -> None:
    source, output = write_batch(tmp_path / "in.jsonl", 500), tmp_path / "out.jsonl"
    # two of them alone would take 4 s: a process that starts later than the others still finds something to do
    with simulated_endpoints(3, "--latency", "150ms", "--port", "0") as samples:
        done = headrace("run", source, "-o", output, *endpoints(samples), "--redis", redis_url, cwd=tmp_path)
        hits = [sample.stats()["hits"] for sample in samples]
    assert done.returncode == 0, done.stderr
    answered_once(output, 500)
    assert sum(hits) == 500
    assert min(hits) > 0, "none is left out, though processes do not start at the same moment"
    assert "500 answered, 0 failed" in done.stdout
    served = [int(line.split()[1]) for line in done.stdout.splitlines()[1:4]]
    assert sorted(served) == sorted(hits)
    assert not (tmp_path / "out.jsonl.resume").exists()
    with closing(redis.Redis.from_url(redis_url)) as client:
        assert [key for key in client.scan_iter() if client.ttl(key) == -1] == []  # what has a TTL goes by itself


def test_embedded_needs_nothing_and_leaves_one_folder(tmp_path: Path) -> None:
    source = write_batch(tmp_path / "in.jsonl", 30)
    with SimulatedEndpoint("--port", "0") as sample:
        done = headrace("run", source, "-o", "out.jsonl", "--endpoint", sample.url, "--json", cwd=tmp_path)
        again = headrace("run", source, "-o", "out.jsonl", "--endpoint", sample.url, "--json", cwd=tmp_path)
        assert sample.stats()["hits"] == 30
    assert done.returncode == again.returncode == 0
    told = json.loads(done.stdout)
    assert (told["answered"], told["failed"], told["complete"]) == (30, 0, True)
    assert json.loads(again.stdout)["earlier"] == 30
    answered_once(tmp_path / "out.jsonl", 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".headrace", "in.jsonl", "out.jsonl"]


def test_malformed_lines_become_error_lines(tmp_path: Path, redis_url: str) -> None:
    """S19."""
    broken = ['{"custom_id": "x', "[]", '{"custom_id": "y", "method": "POST", "body": {}}', "\ufffd\ufffd"]
    lines: list[dict[str, object] | str] = [chat_line(f"task-{i}", f"question {i}") for i in range(9963)]
    for i in range(37):
        lines.insert(i * 251, broken[i % 4].replace('"y"', f'"y{i}"'))
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with simulated_endpoints(2, "--port", "0") as samples:
        done = headrace(
            "run", source, "-o", output, *endpoints(samples), "--slots", 64, "--redis", redis_url, cwd=tmp_path
        )
        assert sum(sample.stats()["hits"] for sample in samples) == 9963
    assert done.returncode == 1
    found = rows(output)
    bad = [row for row in found if row["error"]]
    assert len(found) == 10_000
    assert len(bad) == 37
    assert all(row["response"] is None and "line " in row["error"]["message"] for row in bad)
    assert {row["error"]["code"] for row in bad} == {"invalid_json", "not_an_object", "missing_url"}
    assert len({row["custom_id"] for row in found if not row["error"]}) == 9963
    assert "37 bad lines" in done.stdout


def test_real_questions(tmp_path: Path, redis_url: str) -> None:
    source, output = SQUAD if SQUAD.exists() else DEMO, tmp_path / "out.jsonl"
    asked = {row["custom_id"] for row in rows(source)}
    with simulated_endpoints(2, "--port", "0", "--latency", "10ms") as samples:
        done = headrace("run", source, "-o", output, *endpoints(samples), "--redis", redis_url, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {row["custom_id"] for row in rows(output)} == asked
    assert len(rows(output)) == len(asked)


@pytest.mark.parametrize("kind", ["embedded", "own"])
def test_resumes_after_kill_9_of_everything(tmp_path: Path, redis_url: str, kind: str) -> None:
    source, output = write_batch(tmp_path / "in.jsonl", 400), tmp_path / "out.jsonl"
    with simulated_endpoints(2, "--port", "0", "--latency", "30ms") as samples:
        place = "embedded" if kind == "embedded" else redis_url
        config = config_file(tmp_path, place, samples, queue={"lease": "1s"})
        words = ("run", source, "-o", output, "-c", config)

        def hits() -> int:
            return sum(sample.stats()["hits"] for sample in samples)

        with started(*words, cwd=tmp_path) as first:
            until(lambda: hits() >= 120, "a third is under way")
            kill_group(first)
        before = len(rows(output)) if output.read_bytes().endswith(b"\n") else 0
        assert before < 400
        done = headrace(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        answered_once(output, 400)
        assert hits() <= 400 + 8  # what ran on the 8 slots when it was killed
        twice = [task for sample in samples for task, count in sample.stats()["by_task"].items() if count > 1]
        assert len(twice) <= 8
    assert not (tmp_path / "out.jsonl.resume").exists()


def test_kill_9_of_the_command_alone_ends_its_workers(tmp_path: Path, redis_url: str) -> None:
    source, output = write_batch(tmp_path / "in.jsonl", 200), tmp_path / "out.jsonl"
    with SimulatedEndpoint("--port", "0", "--latency", "40ms") as sample:
        words = ("run", source, "-o", output, "--endpoint", sample.url, "--redis", redis_url)
        with started(*words, cwd=tmp_path) as first:
            until(lambda: sample.stats()["hits"] >= 40, "some are under way")
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
            until(lambda: sample.stats()["in_flight"] == 0, "the workers let go")
        done = headrace(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        answered_once(output, 200)
        assert sample.stats()["hits"] <= 200 + 8


def test_an_interrupt_finishes_what_runs_and_the_next_run_goes_on(tmp_path: Path, redis_url: str) -> None:
    source, output = write_batch(tmp_path / "in.jsonl", 300), tmp_path / "out.jsonl"
    with SimulatedEndpoint("--port", "0", "--latency", "30ms") as sample:
        words = ("run", source, "-o", output, "--endpoint", sample.url, "--redis", redis_url)
        with started(*words, cwd=tmp_path) as first:
            until(lambda: sample.stats()["hits"] >= 50, "some are under way")
            first.send_signal(signal.SIGINT)
            told = first.communicate(timeout=20)
        assert first.returncode == 1, told
        assert "the same command goes on from here" in told[1]
        assert "Traceback" not in told[1]
        assert sample.stats()["aborted"] == 0
        assert sample.stats()["hits"] == len(rows(output)) < 300
        done = headrace(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        answered_once(output, 300)
        assert sample.stats()["hits"] == 300


def test_a_second_interrupt_ends_at_once(tmp_path: Path, redis_url: str) -> None:
    source = write_batch(tmp_path / "in.jsonl", 20)
    with SimulatedEndpoint("--port", "0", "--mode", "hang") as sample:
        words = ("run", source, "-o", "out.jsonl", "--endpoint", sample.url, "--redis", redis_url)
        with started(*words, cwd=tmp_path) as process:
            until(lambda: sample.stats()["in_flight"] == 8, "all slots hang")
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert "stopping" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(5) == 130


def test_a_changed_body_is_said_and_the_old_answer_stays(tmp_path: Path, redis_url: str) -> None:
    source, output = write_batch(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    with SimulatedEndpoint("--port", "0") as sample:
        words = ("run", source, "-o", output, "--endpoint", sample.url, "--redis", redis_url)
        assert headrace(*words, cwd=tmp_path).returncode == 0
        write_lines(source, [chat_line("task-0", "another question"), chat_line("task-5", "question 5")])
        done = headrace(*words, cwd=tmp_path)
        assert sample.stats()["hits"] == 6
    assert done.returncode == 1
    assert "line 1: custom_id 'task-0' has an answer to another request" in one_line(done)
    answered_once(output, 6)


def test_a_body_changed_while_queued_is_sent_anew(tmp_path: Path, redis_url: str) -> None:
    source, output = write_batch(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl"
    with SimulatedEndpoint("--port", "0", "--mode", "hang") as sample:
        config = config_file(tmp_path, redis_url, [sample], queue={"lease": "1s"})
        words = ("run", source, "-o", output, "-c", config)
        with started(*words, cwd=tmp_path) as first:
            until(lambda: sample.stats()["hits"] == 1, "it runs")
            kill_group(first)
        sample.control(mode="ok")
        write_lines(source, [chat_line("task-0", "a new question")])
        done = headrace(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "custom_id 'task-0' has a new body" in done.stderr
    (row,) = rows(output)
    assert row["response"]["body"]["choices"][0]["message"]["content"] == answer_text("a new question")


def test_two_runs_on_one_output_are_refused(tmp_path: Path, redis_url: str) -> None:
    source, output = write_batch(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    with OutputFile(output):
        done = headrace("run", source, "-o", output, "--endpoint", "http://a:1", "--redis", redis_url, cwd=tmp_path)
    assert done.returncode == 2
    assert "another run is writing it" in one_line(done)


def test_pipes(tmp_path: Path, redis_url: str) -> None:
    text = (write_batch(tmp_path / "in.jsonl", 20)).read_text()
    with SimulatedEndpoint("--port", "0") as sample:
        words = ("run", "-", "-o", "-", "--endpoint", sample.url, "--redis", redis_url)
        done = headrace(*words, cwd=tmp_path, text=text)
    assert done.returncode == 0, done.stderr
    assert len({json.loads(line)["custom_id"] for line in done.stdout.splitlines()}) == 20
    assert "20 answered" in done.stderr


def test_npu_lines(tmp_path: Path, redis_url: str) -> None:
    lines = [{"custom_id": f"n{i}", "task_type": "text_analysis", "data": {"text": f"text {i}"}} for i in range(10)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    with SimulatedEndpoint("--port", "0") as sample:
        words = ("run", source, "-o", "out.jsonl", "--endpoint", sample.url, "--redis", redis_url)
        done = headrace(*words, cwd=tmp_path)
        assert sample.stats()["by_path"] == {"/inference": 10}
    assert done.returncode == 0, done.stderr


def test_failures_carry_errors_and_the_exit_code(tmp_path: Path, redis_url: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", [chat_line("short", "hi"), chat_line("long", "x" * 500)])
    with SimulatedEndpoint("--port", "0", "--max-prompt", "100") as sample:
        words = ("run", source, "-o", "out.jsonl", "--endpoint", sample.url, "--redis", redis_url)
        done = headrace(*words, cwd=tmp_path)
        assert sample.stats()["hits"] == 2
    assert done.returncode == 1
    found = {row["custom_id"]: row for row in rows(tmp_path / "out.jsonl")}
    assert found["short"]["error"] is None
    assert found["long"]["error"]["code"] == "http_400"
    assert found["long"]["response"]["status_code"] == 400
    assert "1 answered, 1 failed" in done.stdout
    assert "1 dead letter" in done.stdout


def test_a_mistyped_endpoint_is_told_with_its_cause(tmp_path: Path, redis_url: str) -> None:
    source = write_batch(tmp_path / "in.jsonl", 5)
    with closed_port() as port:
        words = ("run", source, "-o", "out.jsonl", "--endpoint", f"http://127.0.0.1:{port}", "--redis", redis_url)
        with started(*words, cwd=tmp_path) as process:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "no outcome" in line)
    assert "5 tasks wait or run" in line
    assert f"127-0-0-1-{port} is unhealthy (connect: " in line


def test_a_restart_of_redis_in_the_middle(tmp_path: Path) -> None:
    source, output = write_batch(tmp_path / "in.jsonl", 300), tmp_path / "out.jsonl"
    settings = {"appendonly": "yes", "appendfsync": "always"}
    with redis_server("valkey", settings) as server, SimulatedEndpoint("--port", "0", "--latency", "30ms") as sample:
        words = ("run", source, "-o", output, "--endpoint", sample.url, "--redis", server.url)
        with started(*words, cwd=tmp_path) as process:
            until(lambda: sample.stats()["hits"] >= 50, "some are under way")
            server.kill()
            server.start()
            told = process.communicate(timeout=50)
        assert process.returncode == 0, told
        answered_once(output, 300)
        assert sample.stats()["hits"] <= 300 + 8


def test_workers_elsewhere(tmp_path: Path, redis_url: str) -> None:
    source, output = write_batch(tmp_path / "in.jsonl", 50), tmp_path / "out.jsonl"
    with simulated_endpoints(2, "--port", "0") as samples:
        config = config_file(tmp_path, redis_url, samples)
        with started("worker", "-c", config, cwd=tmp_path) as serving:
            read_until(serving, "2 endpoints")
            done = headrace("run", source, "-o", output, "-c", config, "--no-workers", cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            answered_once(output, 50)
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(20) == 0
