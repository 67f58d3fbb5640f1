"""How a run ends whose output is no file to go on with, and what later runs clear up: nothing stays for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis
import yaml

from broker import Broker, Request
from broker.embedded import EmbeddedServer
from tests.support.commands import (
    COMMAND,
    environment,
    headrace,
    kill_group,
    one_line,
    rows,
    started,
    until,
    write_batch,
)
from tests.support.endpoints import SimulatedEndpoint

pytestmark = pytest.mark.e2e


def kept_for_ever(url: str) -> list[bytes]:
    """Keys without a TTL."""
    with closing(redis.Redis.from_url(url)) as client:
        return sorted(key for key in client.scan_iter() if client.ttl(key) == -1)


def jobs(url: str) -> list[bytes]:
    with closing(redis.Redis.from_url(url)) as client:
        return sorted(client.scan_iter("rq:job:*"))


def test_a_full_device(tmp_path: Path, redis_url: str) -> None:
    source = write_batch(tmp_path / "in.jsonl", 200)
    with SimulatedEndpoint("--port", "0", "--latency", "10ms") as sample:
        words = ("run", source, "-o", "/dev/full", "--endpoint", sample.url, "--redis", redis_url)
        done = headrace(*words, cwd=tmp_path)
    assert done.returncode == 1
    said = one_line(done)
    assert "/dev/full: the disk is full; what is not written is dropped" in said
    assert "nothing is lost" not in said
    assert (kept_for_ever(redis_url), jobs(redis_url)) == ([], [])


@pytest.mark.parametrize("kind", ["pipe", "fifo"])
def test_a_reader_that_goes(tmp_path: Path, redis_url: str, kind: str) -> None:
    source, fifo = write_batch(tmp_path / "in.jsonl", 500), tmp_path / "fifo"
    os.mkfifo(fifo)
    with SimulatedEndpoint("--port", "0", "--latency", "20ms") as sample:
        output = "-" if kind == "pipe" else fifo
        words = ("run", source, "-o", output, "--endpoint", sample.url, "--redis", redis_url)
        with started(*words, cwd=tmp_path) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            with process.stdout if kind == "pipe" else fifo.open() as reading:
                assert [bool(reading.readline()) for _ in range(2)] == [True, True]
            said = process.stderr.read()
            assert process.wait(20) == 1
            assert sample.stats()["hits"] < 500
    assert "nobody reads it any more; what is not written is dropped" in said
    assert "Traceback" not in said
    assert (kept_for_ever(redis_url), jobs(redis_url)) == ([], [])


def test_an_interrupt_drops_the_rest_and_says_so(tmp_path: Path, redis_url: str) -> None:
    source = write_batch(tmp_path / "in.jsonl", 300)
    with SimulatedEndpoint("--port", "0", "--latency", "30ms") as sample:
        words = ("run", source, "-o", "-", "--endpoint", sample.url, "--redis", redis_url)
        with started(*words, cwd=tmp_path) as process:
            until(lambda: sample.stats()["hits"] >= 30, "some are under way")
            process.send_signal(signal.SIGINT)
            out, told = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "the other tasks are dropped, since /dev/stdout is not a file that could be gone on with" in told
    assert "goes on from here" not in told
    assert 30 <= len(out.splitlines()) < 300
    assert (kept_for_ever(redis_url), jobs(redis_url)) == ([], [])


def test_a_pool_of_others_loses_this_batch_alone(tmp_path: Path, redis_url: str) -> None:
    source, config = write_batch(tmp_path / "in.jsonl", 100), tmp_path / "headrace.yaml"
    with SimulatedEndpoint("--port", "0", "--latency", "10ms") as sample:
        pool = {"endpoints": [{"id": "e", "url": sample.url, "max_concurrent": 2}]}
        config.write_text(yaml.safe_dump({"redis": {"url": redis_url}, "pools": {"llm": pool}}))
        with Broker(redis_url) as broker:
            other = broker.enqueue("llm", Request("POST", "/x", json={}), delay=3600)
            done = headrace("run", source, "-o", "/dev/full", "-c", config, cwd=tmp_path)
            assert done.returncode == 1
            assert other.status() == "scheduled"
    assert jobs(redis_url) == [f"rq:job:{other.id}".encode()]
    assert not [key for key in kept_for_ever(redis_url) if b"reply" in key or b"queue:" in key]


def test_standard_output_may_be_a_file(tmp_path: Path, redis_url: str) -> None:
    """It is one to go on with, under its own name."""
    source = write_batch(tmp_path / "in.jsonl", 100)
    with SimulatedEndpoint("--port", "0", "--latency", "30ms") as sample:
        words = [*COMMAND, "run", str(source), "-o", "-", "--endpoint", sample.url, "--redis", redis_url]

        @contextmanager
        def into_file() -> Iterator[subprocess.Popen[str]]:
            with (
                (tmp_path / "out.jsonl").open("a") as file,
                subprocess.Popen(
                    words, cwd=tmp_path, stdout=file, stderr=subprocess.PIPE, text=True, env=environment()
                ) as process,
            ):
                yield process

        with into_file() as process:
            until(lambda: sample.stats()["hits"] >= 20, "some are under way")
            assert (tmp_path / "out.jsonl.resume").exists()
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert "the same command goes on from here" in process.stderr.read()
        with into_file() as process:
            assert process.wait(20) == 0
        assert sample.stats()["hits"] == 100
    assert len({row["custom_id"] for row in rows(tmp_path / "out.jsonl")}) == 100
    assert not (tmp_path / "out.jsonl.resume").exists()
    assert not Path("/dev/stdout.resume").exists()


def test_what_a_dead_run_left_is_cleared_up_when_nobody_can_go_on_with_it(tmp_path: Path) -> None:
    source, other = write_batch(tmp_path / "in.jsonl", 50), write_batch(tmp_path / "other.jsonl", 3)
    marks = tmp_path / ".headrace" / "runs"
    with (
        SimulatedEndpoint("--port", "0", "--mode", "hang") as hanging,
        SimulatedEndpoint("--port", "0") as sample,
        EmbeddedServer.acquire(tmp_path / ".headrace") as server,
        closing(redis.Redis.from_url(server.url)) as client,
    ):

        def pools() -> set[bytes]:
            return client.smembers("rq:x:pools")  # type: ignore[return-value]  # redis-py's types are of both worlds

        def run_another() -> None:
            done = headrace("run", other, "-o", "-", "--endpoint", sample.url, cwd=tmp_path)
            assert done.returncode == 0, done.stderr

        with started("run", source, "-o", "out.jsonl", "--endpoint", hanging.url, cwd=tmp_path) as dead:
            until(lambda: hanging.stats()["in_flight"] == 8, "it is under way")
            (mark,) = marks.iterdir()
            run_another()
            assert pools() == {b"run-" + mark.name.encode()}  # it lives
            kill_group(dead)
        (pool,) = pools()
        endpoint = next(client.scan_iter(f"rq:x:endpoint:{pool.decode()}:*"))
        client.hset(endpoint, "seen", int((time.time() - 60) * 1000))
        run_another()
        assert pools() == {pool}  # the same command can go on with it
        (tmp_path / "out.jsonl.resume").unlink()
        client.hset(endpoint, "seen", int(time.time() * 1000))
        run_another()
        assert pools() == {pool}  # its workers may be ending yet
        client.hset(endpoint, "seen", int((time.time() - 60) * 1000))
        run_another()
        assert pools() == set()
        assert list(marks.iterdir()) == []
        assert [key for key in client.scan_iter() if client.ttl(key) == -1] == []
        assert not list(client.scan_iter("rq:job:*"))
