"""RQ itself reads what we write, and we read what RQ writes. Run on rq 2.12 and on the newest rq."""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
import rq.job
import rq.registry
import rq.results
import rq.scheduler
import rq.serializers

from broker import Broker, DeadLettered, admin, rqjob
from broker.errors import InvalidTask
from broker.rqjob import Serializer, decode_data, encode_work, is_plain
from broker.scripts import Claimed, NewTask
from broker.store import Store
from broker.task import NpuTask, Request, Work, new_task_id
from tests.pure.test_safepickle import Canary
from tests.support.player import claim, echo, register
from tests.support.upstream import Upstream, upstream_server

pytestmark = pytest.mark.rq

# Their types are partial, and rq's differ from version to version.
Redis: Any = redis.Redis
Job: Any = rq.job.Job
Queue: Any = rq.Queue
Result: Any = rq.results.Result
JSON: Any = rq.serializers.JSONSerializer
SERIALIZERS: dict[Serializer, Any] = {"json": JSON, "pickle": rq.serializers.DefaultSerializer}

LIMIT = 262_144
POOL = "llm"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 64}


@pytest.fixture
def connection(redis_url: str) -> Iterator[Any]:
    with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstream]:
    with upstream_server() as server:
        monkeypatch.setenv("HEADRACE_ENDPOINT", server.url)
        yield server


Put = Callable[..., str]


@pytest.fixture
def put(redis_url: str) -> Iterator[Put]:
    """Queues a task as our producers do; gives its id."""
    with closing(Store(redis_url)) as store:

        def enqueue(work: Work, delay: float = 0.0) -> str:
            task = NewTask(new_task_id(), encode_work(work), "", rqjob.describe(work), delay=delay)
            assert [reply.word for reply in store.run(store.scripts.enqueue(POOL, [task]))] == ["queued"]
            return task.id

        yield enqueue


def run_stock_worker(connection: Any) -> None:
    queue = Queue(POOL, connection=connection, serializer=JSON)
    worker: Any = rq.SimpleWorker
    worker([queue], connection=connection, serializer=JSON).work(burst=True, logging_level="ERROR")


def fetch(connection: Any, task_id: str, serializer: Serializer = "json") -> Any:
    return Job.fetch(task_id, connection=connection, serializer=SERIALIZERS[serializer])


# RQ reads ours


@pytest.mark.parametrize("content", ["short", "long " * 1000])
def test_job_fetch_reads_a_task(connection: Any, put: Put, content: str) -> None:
    before = time.time()
    request = Request("POST", "/v1/chat/completions", json={"content": content}, headers={"X-A": "b"}, timeout=5)
    job = fetch(connection, put(request))
    job.refresh()
    assert (job.func_name, job.instance) == ("workers.jobs.request", None)
    assert list(job.args) == ["POST", "/v1/chat/completions", {"content": content}]
    assert job.kwargs == {"headers": {"x-a": "b"}, "timeout": 5.0}
    assert (job.origin, job.description) == (POOL, "POST /v1/chat/completions")
    assert job.timeout == 360
    assert job.get_status() == "queued"
    for stamp in (job.created_at, job.enqueued_at):
        assert stamp is not None
        assert before - 1e-5 <= stamp.timestamp() <= time.time()


def test_rq_queue_lists_a_task(connection: Any, put: Put) -> None:
    task_id = put(Request("GET", "/"))
    assert [queue.name for queue in rq.Queue.all(connection=connection)] == [POOL]
    queue = Queue(POOL, connection=connection, serializer=JSON)
    assert (queue.count, queue.job_ids) == (1, [task_id])


def test_rq_keeps_our_fields_when_it_saves(connection: Any, put: Put) -> None:
    task_id = put(Request("GET", "/"))
    connection.hset(f"rq:job:{task_id}", "x_token", "7")
    job = fetch(connection, task_id)
    job.meta["note"] = 1
    job.save()
    fields = connection.hgetall(f"rq:job:{task_id}")
    assert fields[b"x_token"] == b"7"
    assert not is_plain(fields)
    assert decode_data(fields[b"data"], LIMIT).work == Request("GET", "/")


def test_a_stock_worker_runs_a_task(connection: Any, put: Put, upstream: Upstream) -> None:
    task_id = put(Request("POST", "/v1/chat/completions", json=CHAT, headers={"X-A": "b"}))
    run_stock_worker(connection)
    job = fetch(connection, task_id)
    assert job.get_status() == "finished", job.exc_info
    result = job.return_value()
    assert result["status_code"] == 200
    assert result["json"] == {"answer": 42}
    assert result["headers"]["content-type"] == "application/json"
    assert result["attempts"] == 1
    [(method, path, body, headers)] = upstream.seen
    assert (method, path, json.loads(body)) == ("POST", "/v1/chat/completions", CHAT)
    assert headers["content-type"] == "application/json"
    assert headers["x-a"] == "b"
    assert headers["idempotency-key"] == task_id
    assert headers["x-task-attempt"] == "1"


def test_what_a_stock_worker_runs_is_not_canceled(
    connection: Any, redis_url: str, put: Put, upstream: Upstream
) -> None:
    task_id = put(Request("POST", "/hold"))
    canceled: list[bool] = []

    def cancel() -> None:
        upstream.arrived.get(timeout=30)
        with Broker(redis_url) as broker:
            canceled.append(broker.task(POOL, task_id).cancel())
        upstream.release.set()

    canceling = threading.Thread(target=cancel)
    canceling.start()
    run_stock_worker(connection)
    canceling.join()
    assert canceled == [False]
    assert fetch(connection, task_id).get_status() == "finished"
    with Broker(redis_url) as broker:
        assert broker.task(POOL, task_id).result(timeout=10).ok
    assert not connection.exists(f"rq:canceled:{POOL}")


def test_a_stock_worker_runs_an_npu_task(connection: Any, put: Put, upstream: Upstream) -> None:
    task_id = put(NpuTask("text_analysis", {"input_text": "hello", "model_id": "m"}))
    run_stock_worker(connection)
    job = fetch(connection, task_id)
    assert job.get_status() == "finished", job.exc_info
    assert job.return_value()["json"] == {"answer": 42}
    assert upstream.seen[0][1] == "/inference"


@pytest.mark.parametrize(
    ("path", "reason"), [("/404", "http_4xx: status 404"), ("/503", "http_5xx: status 503"), ("/302", "redirect")]
)
def test_a_failed_request_fails_the_job_with_its_reason(
    connection: Any, put: Put, upstream: Upstream, path: str, reason: str
) -> None:
    task_id = put(Request("GET", path))
    run_stock_worker(connection)
    job = fetch(connection, task_id)
    assert job.get_status() == "failed"
    result = job.latest_result()
    assert reason in str(result.exc_string).splitlines()[-1]
    assert len(upstream.seen) == 1
    registry: Any = rq.registry.FailedJobRegistry(POOL, connection=connection, serializer=JSON)
    assert registry.get_job_ids() == [task_id]
    registry.requeue(task_id)
    run_stock_worker(connection)
    assert len(upstream.seen) == 2


def test_a_stock_worker_without_an_endpoint_says_what_is_missing(
    connection: Any, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_ENDPOINT", raising=False)
    task_id = put(Request("GET", "/"))
    run_stock_worker(connection)
    result = fetch(connection, task_id).latest_result()
    assert "HEADRACE_ENDPOINT" in str(result.exc_string).splitlines()[-1]


def test_why_and_when_a_stock_worker_failed_a_task_is_seen_everywhere(
    connection: Any, put: Put, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RQ keeps it in a stream beside the task's hash."""
    monkeypatch.delenv("HEADRACE_ENDPOINT", raising=False)
    task_id, mangled = put(Request("GET", "/")), put(Request("GET", "/"))
    before = time.time()
    run_stock_worker(connection)
    why = str(fetch(connection, task_id).latest_result().exc_string).strip().splitlines()[-1]
    bomb = b64encode(zlib.compress(b"x" * (8 << 20)))
    connection.xadd(f"rq:results:{mangled}", {"type": 2, "exc_string": bomb})
    with closing(Store(redis_url)) as store, Broker(redis_url) as broker:
        letters = {each.id: each for each in admin.dead_list(store, POOL).letters}
        assert letters[task_id].reason == why
        assert before - 5 < (letters[task_id].ended_at or 0.0) < time.time() + 5
        assert letters[mangled].reason == ""
        matching = admin.dead_list(store, POOL, match=admin.Filter("HEADRACE_ENDP")).letters
        assert [each.id for each in matching] == [task_id]
        assert (admin.task_show(store, task_id).reason, admin.task_show(store, mangled).reason) == (why, "")
        assert admin.task_show(store, task_id).ended_at == letters[task_id].ended_at
        assert why in admin.task_explain(store, task_id).summary
        with pytest.raises(DeadLettered, match="HEADRACE_ENDPOINT"):
            broker.task(POOL, task_id).result(timeout=5)


def test_what_is_ok_and_put_back_by_rq_runs_under_a_new_lease(connection: Any, redis_url: str, put: Put) -> None:
    """`Queue.enqueue_job()` of a job that has its outcome. What settled it before settles it no more."""
    with closing(Store(redis_url)) as store:
        register(store, POOL)

        def finish(claimed: Claimed) -> Any:
            return store.run(store.scripts.finish(POOL, [echo(claimed)], result_ttl=60))

        task_id = put(Request("POST", "/", json={}))
        (first,) = claim(store, POOL)
        assert (finish(first), finish(first)) == (["done"], ["already"])
        job = fetch(connection, task_id)
        assert job.get_status() == "finished"
        Queue(POOL, connection=connection, serializer=JSON).enqueue_job(job)
        (second,) = claim(store, POOL)
        assert (second.lease.id, finish(first)) == (task_id, ["already"])
        assert fetch(connection, task_id).get_status() == "started"
        assert second.lease.token.startswith("2.")
        assert finish(second) == ["done"]


def test_what_is_ok_stays_so_when_rq_saves_an_old_copy(connection: Any, redis_url: str, put: Put) -> None:
    """RQ's registries do that to jobs that they take for abandoned. Its own fields alone are older then."""
    with closing(Store(redis_url)) as store, Broker(redis_url) as broker:
        register(store, POOL)
        task_id = put(Request("POST", "/", json={"n": 1}))
        copy = fetch(connection, task_id)
        (claimed,) = claim(store, POOL)
        finish = store.scripts.finish(POOL, [echo(claimed)], result_ttl=60)
        assert store.run(finish) == ["done"]
        copy.save()
        assert store.run(finish) == ["already"]
        result = broker.task(POOL, task_id).result(timeout=1)
        assert (result.ok, result.json(), result.attempts) == (True, {"n": 1}, 1)


def test_a_stock_worker_survives_a_second_entry_of_what_is_ok(
    connection: Any, redis_url: str, put: Put, upstream: Upstream
) -> None:
    with closing(Store(redis_url)) as store:
        register(store, POOL)
        task_id = put(Request("POST", "/", json={}))
        (claimed,) = claim(store, POOL)
        assert store.run(store.scripts.finish(POOL, [echo(claimed)], result_ttl=60)) == ["done"]
    assert fetch(connection, task_id).timeout == 360  # what it waits for at most; without, it fails in watching the job
    connection.rpush(f"rq:queue:{POOL}", task_id)
    run_stock_worker(connection)
    assert len(upstream.seen) == 1


def test_rqs_scheduler_queues_a_delayed_task(connection: Any, put: Put, upstream: Upstream) -> None:
    task_id = put(Request("GET", "/"), delay=3600)
    queue = Queue(POOL, connection=connection, serializer=JSON)
    scheduled: Any = rq.registry.ScheduledJobRegistry
    assert scheduled(queue=queue).get_job_ids() == [task_id]
    assert fetch(connection, task_id).get_status() == "scheduled"
    rq_scheduler: Any = rq.scheduler.RQScheduler
    scheduler = rq_scheduler([queue], connection=connection, serializer=JSON)
    connection.zadd(f"rq:scheduled:{POOL}", {task_id: time.time() - 1})
    scheduler.acquire_locks()
    scheduler.enqueue_scheduled_jobs()
    scheduler.release_locks()
    run_stock_worker(connection)
    assert fetch(connection, task_id).get_status() == "finished"
    assert len(upstream.seen) == 1


# We read RQ's


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_plain_enqueue_is_read(connection: Any, serializer: Serializer) -> None:
    from workers import jobs

    queue = Queue(POOL, connection=connection, serializer=SERIALIZERS[serializer])
    request = Request("POST", "/v1/x", json=CHAT, timeout=5)
    for job in (
        queue.enqueue("workers.jobs.request", method="POST", path="/v1/x", json=CHAT, timeout=5),
        queue.enqueue("workers.jobs.request", "POST", "/v1/x", CHAT, timeout=5, job_timeout=60, result_ttl=10),
        queue.enqueue(jobs.request, "POST", "/v1/x", json=CHAT, timeout=5),
    ):
        fields = connection.hgetall(f"rq:job:{job.id}")
        assert is_plain(fields)
        assert decode_data(fields[b"data"], LIMIT) == (request, serializer)
    npu = queue.enqueue(jobs.npu, "embedding_batch", {"texts": ["a"]})
    data = connection.hget(f"rq:job:{npu.id}", "data")
    assert decode_data(data, LIMIT) == (NpuTask("embedding_batch", {"texts": ["a"]}), serializer)


class Caller:
    """Something a producer may enqueue by mistake."""

    def __call__(self) -> None:
        pass

    def method(self) -> None:
        pass


def test_what_a_plain_enqueue_must_not_send_is_refused(connection: Any, tmp_path: Path) -> None:
    queue = Queue(POOL, connection=connection)
    canary = Canary(tmp_path / "ran")
    for function, args, what in (
        (os.system, ("true",), "function 'posix.system' is not headrace's"),
        ("some.module.f", (), "function 'some.module.f' is not headrace's"),
        (Caller(), (), "names the Python object"),
        (Caller().method, (), "names the Python object"),
        ("workers.jobs.request", ("POST", "/", {"x": canary}), "names the Python object"),
    ):
        job = queue.enqueue(function, *args)
        data = connection.hget(f"rq:job:{job.id}", "data")
        with pytest.raises(InvalidTask, match=what):
            decode_data(data, LIMIT)
    assert not canary.path.exists()
    os.close(fetch(connection, job.id, "pickle").args[2]["x"])
    assert canary.path.exists()  # RQ's own reader runs it


# RQ reads our results


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_rq_reads_a_result(connection: Any, serializer: Serializer) -> None:
    job = Queue(POOL, connection=connection, serializer=SERIALIZERS[serializer]).enqueue("workers.jobs.request")
    result = rqjob.plain_result(200, {"content-type": "application/json"}, b'{"a": [1, "\xc3\xa9"]}', "vm1", 2)
    connection.execute_command("XADD", Result.get_key(job.id), "*", *rqjob.rq_success(serializer, result, "w1"))
    job = fetch(connection, job.id, serializer)
    assert job.return_value() == {
        "status_code": 200,
        "headers": {"content-type": "application/json"},
        "json": {"a": [1, "é"]},
        "endpoint": "vm1",
        "attempts": 2,
    }
    latest = job.latest_result()
    assert (latest.type, latest.worker_name) == (Result.Type.SUCCESSFUL, "w1")


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_rq_reads_a_failure(connection: Any, serializer: Serializer) -> None:
    job = Queue(POOL, connection=connection, serializer=SERIALIZERS[serializer]).enqueue("workers.jobs.request")
    connection.execute_command("XADD", Result.get_key(job.id), "*", *rqjob.rq_failure("status 400: too long ✓", "w1"))
    job = fetch(connection, job.id, serializer)
    latest = job.latest_result()
    assert (latest.type, latest.exc_string) == (Result.Type.FAILED, "status 400: too long ✓")
    assert job.return_value() is None
