"""RQ's own producers and tools beside our workers: plain jobs in, answers out, true pictures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Queue
from rq.job import Job
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer

from tests.support.endpoints import simulated_endpoints
from tests.support.fleet import fleet, pool_config, until
from tests.support.upstream import upstream_server

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CALL = {"method": "POST", "path": "/v1/chat/completions", "json": BODY}


def rq_command(url: str, *words: str) -> str:
    """Output of RQ's own command."""
    done = subprocess.run(
        [sys.executable, "-m", "rq.cli", *words, "--url", url],
        capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("serializer", [None, JSONSerializer], ids=["pickle", "json"])
def test_a_plain_rq_job_is_finished_by_our_worker(tmp_path: Path, redis_url: str, serializer: Any) -> None:
    connection = redis.Redis.from_url(redis_url)
    queue = Queue("llm", connection=connection, serializer=serializer)
    with simulated_endpoints(2) as endpoints:
        with fleet(tmp_path, redis_url, {"llm": pool_config([e.url for e in endpoints])}, 2):
            job = queue.enqueue("workers.jobs.request", **CALL)
            until(lambda: job.get_status(refresh=True) == "finished", "the job is finished")
            answer = job.latest_result()
            assert answer is not None
            value: Any = answer.return_value
        assert sum(endpoint.stats()["hits"] for endpoint in endpoints) == 1
    assert value["status_code"] == 200
    assert value["endpoint"] in ("e0", "e1")
    assert value["json"]["choices"]
    assert job.id in FinishedJobRegistry(queue=queue).get_job_ids()
    assert len(queue) == 0


@pytest.mark.parametrize("serializer", [None, JSONSerializer], ids=["pickle", "json"])
@pytest.mark.parametrize("depth", [101, 970])
def test_an_answer_that_nests_too_deep_is_given_as_text(
    tmp_path: Path, redis_url: str, serializer: Any, depth: int
) -> None:
    queue = Queue("llm", connection=redis.Redis.from_url(redis_url), serializer=serializer)
    with upstream_server() as upstream:
        upstream.raw = b"[" * depth + b"]" * depth
        with fleet(tmp_path, redis_url, {"llm": pool_config([upstream.url], health={"enabled": False})}, 1):
            job = queue.enqueue("workers.jobs.request", method="POST", path="/raw", json={})
            until(lambda: job.get_status(refresh=True) == "finished", "the job is finished")
    answer = job.latest_result()
    assert answer is not None
    value: Any = answer.return_value
    assert value["body"] == upstream.raw.decode()
    assert len(upstream.seen) == 1


def test_a_jobs_ttl_ends_with_its_wait(tmp_path: Path, redis_url: str) -> None:
    """RQ's `ttl` is for the wait in the queue; its own worker takes it off a job that starts, too."""
    connection = redis.Redis.from_url(redis_url)
    queue = Queue("llm", connection=connection, serializer=JSONSerializer)
    with upstream_server() as upstream:
        with fleet(tmp_path, redis_url, {"llm": pool_config([upstream.url], health={"enabled": False})}, 1):
            job = queue.enqueue("workers.jobs.request", method="POST", path="/hold", json=BODY, ttl=60, result_ttl=500)
            upstream.arrived.get(timeout=30)
            assert connection.ttl(job.key) == -1
            upstream.release.set()
            until(lambda: job.get_status(refresh=True) == "finished", "the job is finished")
    assert 60 < connection.ttl(job.key) <= 500


def test_what_is_not_ours_becomes_a_dead_letter_with_a_reason_and_stops_nobody(tmp_path: Path, redis_url: str) -> None:
    queue = Queue("llm", connection=redis.Redis.from_url(redis_url))
    with simulated_endpoints(1) as endpoints:
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoints[0].url])}, 1):
            foreign = queue.enqueue("os.getcwd")
            ours = queue.enqueue("workers.jobs.request", **CALL)
            until(lambda: ours.get_status(refresh=True) == "finished", "ours is finished")
            until(lambda: foreign.get_status(refresh=True) == "failed", "the foreign one is failed")
    answer = foreign.latest_result()
    assert answer is not None
    assert "os.getcwd" in (answer.exc_string or "")
    assert foreign.id in FailedJobRegistry(queue=queue).get_job_ids()


def test_rq_requeue_is_a_redrive(tmp_path: Path, redis_url: str) -> None:
    connection = redis.Redis.from_url(redis_url)
    queue = Queue("llm", connection=connection, serializer=JSONSerializer)
    with simulated_endpoints(1) as (endpoint,):
        endpoint.control(mode="status", status=400)
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url])}, 1):
            job = queue.enqueue("workers.jobs.request", **CALL)
            until(lambda: job.get_status(refresh=True) == "failed", "it is a dead letter")
            endpoint.control(mode="ok")
            rq_command(redis_url, "requeue", "--queue", "llm", "--serializer", "rq.serializers.JSONSerializer", job.id)
            until(lambda: job.get_status(refresh=True) == "finished", "it is finished")
    assert job.id not in FailedJobRegistry(queue=queue).get_job_ids()


def test_rq_info_lists_queues_and_workers_truly_and_harms_nothing(tmp_path: Path, redis_url: str) -> None:
    connection = redis.Redis.from_url(redis_url)
    queue = Queue("llm", connection=connection, serializer=JSONSerializer)
    with simulated_endpoints(2, "--latency", "600s") as endpoints:
        with fleet(tmp_path, redis_url, {"llm": pool_config([e.url for e in endpoints], slots=2)}, 2):
            jobs = [queue.enqueue("workers.jobs.request", **CALL) for _ in range(10)]
            until(lambda: sum(e.stats()["in_flight"] for e in endpoints) == 4, "four run")
            shown = rq_command(redis_url, "info")
            running = StartedJobRegistry(queue=queue).get_job_ids()
            after = rq_command(redis_url, "info")
    assert all(words in shown for words in ("llm", "6", "2 workers")), shown
    assert len(running) == 4
    assert set(running) <= {job.id for job in jobs}
    assert "2 workers" in after
    # The drain released nothing to RQ's failed registry.
    assert not FailedJobRegistry(queue=queue).get_job_ids(cleanup=False)


def test_a_scheduled_rq_job_needs_no_scheduler(tmp_path: Path, redis_url: str) -> None:
    from datetime import timedelta

    queue = Queue("llm", connection=redis.Redis.from_url(redis_url), serializer=JSONSerializer)
    with simulated_endpoints(1) as (endpoint,), fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url])}, 1):
        job = queue.enqueue_in(timedelta(seconds=1), "workers.jobs.request", **CALL)
        until(lambda: job.get_status(refresh=True) == "finished", "it is finished")


def test_job_fetch_reads_our_tasks(tmp_path: Path, redis_url: str) -> None:
    from broker import Broker, Request

    connection = redis.Redis.from_url(redis_url)
    with simulated_endpoints(1) as (endpoint,), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url])}, 1):
            task = broker.enqueue("llm", Request("POST", "/v1/chat/completions", json=BODY))
            task.result(timeout=30)
    job = Job.fetch(task.id, connection=connection, serializer=JSONSerializer)
    assert job.get_status() == "finished"
    assert job.func_name == "workers.jobs.request"
    assert list(job.args) == ["POST", "/v1/chat/completions", BODY]
    times = [job.created_at, job.enqueued_at, job.started_at, job.ended_at]
    assert times == sorted(time for time in times if time is not None)


def test_a_stock_worker_runs_our_tasks_of_every_priority(redis_url: str) -> None:
    """As README has it, in the order of the lists."""
    from broker import Broker, Request

    with simulated_endpoints(1) as (endpoint,), Broker(redis_url) as broker:
        call = Request("POST", "/v1/chat/completions", json=BODY)
        tasks = [broker.enqueue("llm", call, priority=each) for each in ("low", "normal", "high")]
        done = subprocess.run(
            [
                sys.executable, "-m", "rq.cli", "worker", "-S", "json", "--burst", "--url", redis_url,
                "llm:high", "llm", "llm:low",
            ],
            capture_output=True, text=True, timeout=60, env=os.environ | {"HEADRACE_ENDPOINT": endpoint.url},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        results = [task.result(timeout=10) for task in tasks]
    assert [result.status_code for result in results] == [200] * 3
    said = done.stdout + done.stderr
    order = [said.index(task.id) for task in tasks]
    assert order == sorted(order, reverse=True)


def test_a_dependent_waits_until_its_producer_releases_it(tmp_path: Path, redis_url: str) -> None:
    queue = Queue("llm", connection=redis.Redis.from_url(redis_url), serializer=JSONSerializer)
    first = queue.enqueue("workers.jobs.request", **CALL)
    second = queue.enqueue("workers.jobs.request", **CALL, depends_on=first)
    with simulated_endpoints(1) as (endpoint,):
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url])}, 1):
            until(lambda: first.get_status(refresh=True) == "finished", "the first is finished")
            assert second.get_status(refresh=True) == "deferred"
            queue.enqueue_dependents(first)
            until(lambda: second.get_status(refresh=True) == "finished", "the second is finished")


def waiting_in(connection: Any, command: str) -> int:
    return sum(client["cmd"] == command for client in connection.client_list())


@pytest.mark.parametrize("queue", ["llm", "llm:high", "llm:low"])
def test_an_idle_worker_hears_a_plain_job_on_each_of_a_pools_queues(tmp_path: Path, redis_url: str, queue: str) -> None:
    """Its processes never look by themselves: what they claim they have heard of."""
    connection = redis.Redis.from_url(redis_url)
    with simulated_endpoints(1) as (endpoint,):
        pools = {"llm": pool_config([endpoint.url], health={"enabled": False})}
        with fleet(tmp_path, redis_url, pools, 2, module="tests.support.deaf"):
            for _ in range(2):
                until(lambda: waiting_in(connection, "blmove") == 3, "one process waits at three lists")
                job = Queue(queue, connection=connection).enqueue("workers.jobs.request", **CALL)
                until(lambda job=job: job.get_status(refresh=True) == "finished", "it is finished")
        assert endpoint.stats()["hits"] == 2


def test_ten_idle_processes_ask_little(tmp_path: Path, redis_url: str) -> None:
    """Counted by the server, over ten seconds of its own clock."""
    connection: Any = redis.Redis.from_url(redis_url)

    def asked() -> tuple[float, int]:
        stats = connection.info("commandstats")
        seconds, micros = connection.time()
        words = ("evalsha", "blmove", "blpop")
        return seconds + micros / 1e6, sum(int(stats.get(f"cmdstat_{word}", {}).get("calls", 0)) for word in words)

    with simulated_endpoints(2) as endpoints:
        pools = {"llm": pool_config([each.url for each in endpoints], health={"enabled": False})}
        with fleet(tmp_path, redis_url, pools, 10):
            until(lambda: waiting_in(connection, "blmove") == 3, "one process waits at three lists")
            began, before = asked()
            until(lambda: connection.time()[0] - began >= 10, "ten seconds have gone by, by the server's clock")
            ended, after = asked()
    assert (after - before) / (ended - began) < 50
