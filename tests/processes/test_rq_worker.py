"""workers.rq_worker: RQ's own command starts headrace's worker process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import rq
import rq.job

from broker import rqjob
from broker.config import load_config
from broker.errors import ConfigError
from broker.outcome import FIELDS, read_result
from broker.scripts import NewTask
from broker.store import Store
from broker.task import Request, Result, Work, new_task_id
from tests.support.upstream import Upstream, upstream_server
from workers.rq_worker import config_for, redis_url

pytestmark = pytest.mark.rq

ROOT = Path(__file__).parents[2]
REDIS = "redis://127.0.0.1:6390/0"


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:6379/0",
        "redis://10.0.0.1:6390/3",
        "redis://[::1]:6390/3",
        "redis://:p%40ss%3A%2F@h:1/2",
        "redis://user:pa%20ss@h:1/2",
        "rediss://user@h:6379/0?ssl_ca_certs=%2Fetc%2Fca.pem&ssl_cert_reqs=none",
        "unix:///run/my%20redis.sock?db=4",
        "unix://user:p%2Fq@/run/redis.sock?db=0",
    ],
)
def test_the_url_leads_to_the_redis_that_rq_speaks_to(url: str) -> None:
    given: Any = redis.Redis.from_url(url).connection_pool
    found: Any = redis.Redis.from_url(redis_url(redis.Redis.from_url(url))).connection_pool
    assert found.connection_class is given.connection_class
    names = ("host", "port", "path", "username", "password", "ssl_ca_certs", "ssl_cert_reqs")
    assert [found.connection_kwargs.get(name) for name in names] == [
        given.connection_kwargs.get(name) for name in names
    ]
    assert int(found.connection_kwargs.get("db") or 0) == int(given.connection_kwargs.get("db") or 0)
    load_config(None, {}, {"redis.url": redis_url(redis.Redis.from_url(url))})


def test_the_url_leads_to_the_sentinels_that_rq_asks() -> None:
    sentinel_class: Any = redis.Sentinel
    kwargs = {"username": "watch", "password": "s@"}
    sentinel = sentinel_class([("10.0.0.1", 26379), ("::1", 5)], sentinel_kwargs=kwargs, password="p/w", db=2)
    url = redis_url(sentinel.master_for("main"))
    assert url == (
        "redis+sentinel://:p%2Fw@10.0.0.1:26379,[::1]:5/main/2?sentinel_username=watch&sentinel_password=s%40"
    )
    config = load_config(None, {}, {"redis.url": url})
    assert config.redis.url == "redis+sentinel://10.0.0.1:26379,[::1]:5/main/2"


def test_a_credential_provider_is_refused_with_what_to_do() -> None:
    provider: Any = redis.UsernamePasswordCredentialProvider("u", "p")
    with pytest.raises(ConfigError, match="start `headrace worker` instead"):
        redis_url(redis.Redis(credential_provider=provider))


def test_a_connection_that_decodes_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="decode_responses is set: jobs are bytes; leave it out"):
        redis_url(redis.Redis(decode_responses=True))


def test_one_queue_is_served_by_the_endpoint_of_the_environment() -> None:
    config = config_for(("llm",), REDIS, {"HEADRACE_ENDPOINT": "http://127.0.0.1:8080"})
    assert [endpoint.url for endpoint in config.pools["llm"].endpoints] == ["http://127.0.0.1:8080"]
    assert config.redis.url == REDIS


def test_queues_are_pools_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "headrace.yaml"
    pools = "".join(f"  {name}:\n    endpoints: [{{id: {name}, url: 'http://{name}:1'}}]\n" for name in "abc")
    path.write_text(f"redis: {{url: 'redis://elsewhere:1'}}\npools:\n{pools}")
    environ = {"HEADRACE_CONFIG": str(path)}
    config = config_for(("c", "a"), REDIS, environ)
    assert list(config.pools) == ["c", "a"]
    assert config.redis.url == REDIS
    with pytest.raises(ConfigError, match=r"pools\.d: no enabled endpoint \(pools that have one: a, b, c\)"):
        config_for(("a", "d"), REDIS, environ)


@contextmanager
def rq_worker(redis_url: str, *words: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "rq.cli", "worker", "-u", redis_url, "-w", "workers.rq_worker.EndpointWorker", *words],
        cwd=ROOT, env=inherited | environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("llm",), 3, "pools.llm: no enabled endpoint (pools that have one: none)"),
        (("llm", "--max-jobs", "5"), 2, "--max-jobs, --max-idle-time: EndpointWorker has none"),
    ],
)
def test_rqs_command_ends_with_one_line_and_our_exit_code(
    redis_url: str, words: tuple[str, ...], code: int, line: str
) -> None:
    with rq_worker(redis_url, *words) as process:
        said, _ = process.communicate(timeout=30)
        assert process.returncode == code, said
    assert line in said
    assert "Traceback" not in said


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with upstream_server() as server:
        yield server


@pytest.fixture
def store(redis_url: str) -> Iterator[Store]:
    with closing(Store(redis_url)) as store:
        yield store


def put(store: Store, work: Work) -> str:
    task = NewTask(new_task_id(), rqjob.encode_work(work), "", rqjob.describe(work))
    assert [reply.word for reply in store.run(store.scripts.enqueue("llm", [task]))] == ["queued"]
    return task.id


def result_of(store: Store, task_id: str) -> Result | None:
    return read_result(task_id, store.redis.hmget(f"rq:job:{task_id}", list(FIELDS)))


def test_a_burst_serves_our_tasks_and_those_of_plain_rq(store: Store, redis_url: str, upstream: Upstream) -> None:
    ours = put(store, Request("POST", "/v1/x", json={"a": 1}))
    queues: dict[str, Any] = {
        name: rq.Queue("llm", connection=store.redis, serializer=name) for name in ("pickle", "json")
    }
    plain = [(name, queue.enqueue("workers.jobs.request", "POST", "/v1/y")) for name, queue in queues.items()]
    foreign = queues["pickle"].enqueue(os.system, "true")
    refused = queues["json"].enqueue("workers.jobs.request", "POST", "/404")
    with rq_worker(redis_url, "--burst", "llm", HEADRACE_ENDPOINT=upstream.url) as process:
        said, _ = process.communicate(timeout=30)
        assert process.returncode == 0, said
    result = result_of(store, ours)
    assert result is not None
    assert (result.outcome, result.json(), result.attempts) == ("ok", {"answer": 42}, 1)
    for name, job in plain:
        job = rq.job.Job.fetch(job.id, connection=store.redis, serializer=name)
        value: Any = job.return_value()
        assert job.get_status() == "finished"
        assert (value["status_code"], value["json"], value["attempts"]) == (200, {"answer": 42}, 1)
    for job, reason in ((foreign, "is not headrace's; enqueue 'workers.jobs.request'"), (refused, "status 404")):
        job.refresh()
        assert job.get_status() == "failed"
        latest: Any = job.latest_result()
        assert reason in latest.exc_string
    assert sorted(seen.path for seen in upstream.seen if seen.path != "/health") == ["/404", "/v1/x", "/v1/y", "/v1/y"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_running_task_finish(
    store: Store, redis_url: str, upstream: Upstream, signum: signal.Signals
) -> None:
    task_id = put(store, Request("POST", "/hold"))
    with rq_worker(redis_url, "llm", HEADRACE_ENDPOINT=upstream.url) as process:
        upstream.arrived.get(timeout=20)
        process.send_signal(signum)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        upstream.release.set()
        said, _ = process.communicate(timeout=20)
        assert process.returncode == 0, said
    result = result_of(store, task_id)
    assert result is not None
    assert result.outcome == "ok"


def test_a_second_signal_gives_the_running_task_back(store: Store, redis_url: str, upstream: Upstream) -> None:
    task_id = put(store, Request("POST", "/hold"))
    with rq_worker(redis_url, "llm", HEADRACE_ENDPOINT=upstream.url) as process:
        upstream.arrived.get(timeout=20)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.2)  # one that follows at once would count as the same
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=20)
        assert process.returncode == 0, said
    assert result_of(store, task_id) is None
    assert store.redis.hmget(f"rq:job:{task_id}", ["status", "x_try"]) == [b"queued", None]
    assert store.redis.lrange("rq:queue:llm", 0, -1) == [task_id.encode()]
