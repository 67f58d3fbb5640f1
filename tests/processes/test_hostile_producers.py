"""Producers that write into Redis past every check: their tasks are dead letters, nothing runs, nothing goes astray."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import redis

from broker import Broker, Request
from broker.config import Config
from broker.store import Store
from tests.support.api import api_server, good
from tests.support.commands import headrace
from tests.support.fleet import fleet, pool_config, until
from tests.support.hostile import EVIL, HEADERS, OWN_PATHS, PATHS, Canary, call, pickles, write_job
from tests.support.upstream import upstream_server

KEY = "planted-key"


def outcome(client: Any, task_id: str) -> str:
    return (client.hget(f"rq:job:{task_id}", "x_out") or b"").decode()


def memory_mib(pid: int) -> int:
    """The most a process ever used."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) >> 10


def test_every_hostile_task_is_a_dead_letter_and_harms_nobody(tmp_path: Path, redis_url: str) -> None:
    client: Any = redis.Redis.from_url(redis_url)
    canary = tmp_path / "ran"
    wrong: dict[str, str] = {}  # task id: part of its reason
    for at, path in enumerate(PATHS):
        wrong[write_job(client, "llm", f"path-{at}", call(path))] = "path"
    for at, headers in enumerate(HEADERS):
        wrong[write_job(client, "llm", f"header-{at}", call(headers=headers))] = "header"
    for name, data in pickles(canary).items():
        wrong[write_job(client, "llm", f"pickle-{name}", data)] = "task data"
    wrong[write_job(client, "llm", "too-large", call(json="x" * 300_000))] = "more than 262144"
    foreign = json.dumps(["os.system", None, ["true"], {}]).encode()
    wrong[write_job(client, "llm", "function", foreign)] = "not headrace's"
    wrong[write_job(client, "llm", "noise", os.urandom(500))] = "task data"
    with upstream_server() as upstream:
        pool = pool_config([upstream.url], health={"enabled": False}, each={"api_key": KEY})
        with fleet(tmp_path, redis_url, {"llm": pool}) as running, Broker(redis_url) as broker:
            for task_id in wrong:
                until(lambda task_id=task_id: outcome(client, task_id) == "dead", f"{task_id} is a dead letter")
            assert upstream.seen == []
            own = [write_job(client, "llm", f"own-{at}", call(path)) for at, path in enumerate(OWN_PATHS)]
            good_one = broker.enqueue("llm", Request("POST", "/inference", json={}))
            assert good_one.result(timeout=30).ok
            for task_id in own:
                until(lambda task_id=task_id: outcome(client, task_id) == "ok", f"{task_id} is ok")
            assert memory_mib(running.pids[0]) < 200
    for task_id, part in wrong.items():
        reason = client.hget(f"rq:job:{task_id}", "x_why").decode()
        assert part in reason, (task_id, reason)
        assert reason.isprintable()
    assert {seen.path for seen in upstream.seen} == {*OWN_PATHS, "/inference"}
    assert {seen.headers["host"] for seen in upstream.seen} == {upstream.url.removeprefix("http://")}
    assert {seen.headers["authorization"] for seen in upstream.seen} == {f"Bearer {KEY}"}
    assert not canary.exists()


def test_nothing_else_in_a_job_is_run_or_read_as_a_pickle(tmp_path: Path, redis_url: str) -> None:
    """Callbacks, meta, dependencies, RQ's result stream: on the worker, the commands and the API."""
    import pickle
    from base64 import b64encode

    client: Any = redis.Redis.from_url(redis_url)
    canary = tmp_path / "ran"
    raw = pickle.dumps(Canary(canary), 4)
    touch = pickle.dumps(("os.open", None, (str(canary), os.O_CREAT | os.O_WRONLY), {}), 4)
    fields: dict[str, Any] = {
        "success_callback_name": "os.abort", "failure_callback_name": "os.abort", "stopped_callback_name": "os.abort",
        "meta": raw, "result": raw, "exc_info": raw, "dependency_ids": raw, "worker_name": raw, "group_id": raw,
        "description": "\x1b[2J<script>alert(1)</script>\nforged line", "timeout": "os.abort", "x_hist": raw,
    }  # fmt: skip
    data = {"fine": call(), "whole": raw, "touch": touch}
    with upstream_server() as upstream:
        with fleet(tmp_path, redis_url, {"llm": pool_config([upstream.url], health={"enabled": False})}):
            ids = [write_job(client, "llm", name, content, **fields) for name, content in data.items()]
            for task_id in ids:
                until(lambda task_id=task_id: outcome(client, task_id), f"{task_id} has an outcome")
    assert [outcome(client, task_id) for task_id in ids] == ["ok", "dead", "dead"]
    for task_id in ids:
        client.xadd(f"rq:results:{task_id}", {"type": 1, "return_value": b64encode(raw), "worker_name": "w"})
    stock = write_job(client, "llm", "stock", touch, **fields)
    client.hset(f"rq:job:{stock}", "status", "finished")  # as a stock worker leaves it
    client.xadd(f"rq:results:{stock}", {"type": 1, "return_value": b64encode(raw), "worker_name": "w"})
    store = Store(redis_url)
    with api_server(store, Config()) as api, Broker(redis_url) as broker:
        assert broker.task("llm", stock).result(timeout=5).ok
        for task_id in (*ids, stock):
            good(api.get(f"/api/tasks/{task_id}?payload=true"))
            for words in ("task show", "task explain"):
                done = headrace(*words.split(), task_id, "--redis", redis_url, cwd=tmp_path)
                assert done.returncode == 0, done.stderr
                assert "\x1b" not in done.stdout
                assert "\nforged line" not in done.stdout
        for letter in ids[1:]:
            good(api.get(f"/api/pools/llm/dead/{letter}"))
        good(api.get("/api/pools/llm/dead"))
        assert headrace("dead", "list", "--pool", "llm", "--redis", redis_url, cwd=tmp_path).returncode == 0
    store.close()
    assert not canary.exists()
    os.close(pickle.loads(raw))
    assert canary.exists()  # it would have
    assert EVIL not in str(upstream.seen)


def test_attempts_written_into_the_hash_are_held_to_a_hundred(tmp_path: Path, redis_url: str) -> None:
    client: Any = redis.Redis.from_url(redis_url)
    greedy = write_job(client, "llm", "greedy", call("/500"), x_try="99", x_max="1000000000")
    negative = write_job(client, "llm", "negative", call("/500"), x_try="2", x_max="-7")
    with upstream_server() as upstream:
        pool = pool_config([upstream.url], health={"enabled": False}, retry={"max_attempts": 3})
        with fleet(tmp_path, redis_url, {"llm": pool}):
            for task_id in (greedy, negative):
                until(lambda task_id=task_id: outcome(client, task_id) == "dead", f"{task_id} is a dead letter")
        assert len(upstream.seen) == 2
    reasons = [client.hget(f"rq:job:{task_id}", "x_why").decode() for task_id in (greedy, negative)]
    assert "attempt 100 of 100" in reasons[0]
    assert "attempt 3 of 3" in reasons[1]
