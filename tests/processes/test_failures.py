"""Sick endpoints, bad tasks, deadlines and cancels, with real processes and real HTTP."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from broker import Broker, QueueFull, Request
from tests.support.api import api_server
from tests.support.endpoints import simulated_endpoints
from tests.support.fleet import as_text, fleet, history, in_flight, pool_config, until
from tests.support.servers import redis_server
from tests.support.upstream import upstream_server

QUICK = {"max_attempts": 3, "backoff": {"initial": "20ms", "max": "200ms"}}


def chat(text: str = "hi", **more: Any) -> Request:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    return Request("POST", "/v1/chat/completions", json=body)


def test_an_endpoint_that_fails_at_once_is_no_black_hole(tmp_path: Path, redis_url: str) -> None:
    """S22: 3,000 tasks, one of three endpoints fails every request in 5 ms."""
    with simulated_endpoints(3, "--latency", "20ms") as endpoints, Broker(redis_url) as broker:
        endpoints[0].control(mode="status", status=503, latency_ms=5)
        urls = [endpoint.url for endpoint in endpoints]
        with fleet(tmp_path, redis_url, {"llm": pool_config(urls, slots=16, retry=QUICK)}, 2):
            results = list(broker.map("llm", (chat() for _ in range(3000)), window=3000, timeout=60))
            wasted = endpoints[0].stats()["hits"]
    assert Counter(result.outcome for result in results) == {"ok": 3000}
    assert 5 <= wasted < 30


def test_attempts_keep_to_the_backoff_and_do_not_hold_up_fresh_tasks(tmp_path: Path, redis_url: str) -> None:
    """S2: tasks that are answered 503 four times, and fresh ones beside them, on one slot."""
    retry = {"max_attempts": 5, "backoff": {"initial": "300ms", "max": "2s"}}
    with simulated_endpoints(1, "--latency", "5ms") as (endpoint,), Broker(redis_url) as broker:
        pool = pool_config([endpoint.url], slots=1, retry=retry, breaker={"failures": 1000, "failure_percent": 0})
        with fleet(tmp_path, redis_url, {"llm": pool}, 1) as running:
            failing = broker.enqueue_many("llm", [chat(str(i), x_sim={"fail_first": 4}) for i in range(5)])
            until(lambda: any(task.status() == "scheduled" for task in failing), "one waits for its second attempt")
            fresh = list(broker.map("llm", [chat("fresh") for _ in range(20)], timeout=30))
            results = [task.result(timeout=30) for task in failing]
            attempts = [history(running.store, task.id) for task in failing]
    assert all(result.ok for result in fresh)
    assert {result.attempts for result in results} == {5}
    for result, lines in zip(results, attempts, strict=True):
        assert len(lines) == 4
        starts = [line["started"] for line in lines[1:]] + [result.started_at]
        for line, started in zip(lines, starts, strict=True):
            assert started >= line["ended"] + line["retry_in"] - 0.002, "never before it was due"


def test_half_of_a_thousand_fail_once_and_no_slot_leaks(tmp_path: Path, redis_url: str) -> None:
    """S4."""
    with simulated_endpoints(4, "--latency", "2ms") as endpoints, Broker(redis_url) as broker:
        breaker = {"failures": 1000, "failure_percent": 0}
        pool = pool_config([e.url for e in endpoints], slots=8, retry=QUICK, breaker=breaker)
        with fleet(tmp_path, redis_url, {"llm": pool}, 2) as running:
            works = [chat(str(i), x_sim={"fail_first": 1, "status": 503} if i % 2 else {}) for i in range(1000)]
            results = list(broker.map("llm", works, window=1000, timeout=60))
            assert Counter(result.outcome for result in results) == {"ok": 1000}
            assert Counter(result.attempts for result in results) == {1: 500, 2: 500}
            until(lambda: in_flight(running.store, "llm") == 0, "no slot is in use")


def test_over_long_prompts_are_dead_letters_at_once_and_open_no_breaker(tmp_path: Path, redis_url: str) -> None:
    """S13: 100 tasks answered 400."""
    with simulated_endpoints(2) as endpoints, Broker(redis_url) as broker:
        pool = pool_config([e.url for e in endpoints], retry=QUICK)
        with fleet(tmp_path, redis_url, {"llm": pool}, 2) as running:
            works = [chat(str(i), x_sim={"status": 400} if i < 100 else {}) for i in range(200)]
            results = list(broker.map("llm", works, window=200, timeout=60))
            keys = [running.store.keys.endpoint("llm", endpoint) for endpoint in ("e0", "e1")]
            states = running.store.pipelined([("HGET", key, "state") for key in keys])
        hits = sum(endpoint.stats()["hits"] for endpoint in endpoints)
    assert Counter((result.outcome, result.attempts) for result in results) == {("dead", 1): 100, ("ok", 1): 100}
    assert {result.status_code for result in results if not result.ok} == {400}
    assert set(states) <= {None, b"closed"}
    assert hits == 200


def test_an_answer_cut_in_the_middle_is_a_failed_attempt(tmp_path: Path, redis_url: str) -> None:
    """S20."""
    with simulated_endpoints(2) as endpoints, Broker(redis_url) as broker:
        endpoints[0].control(mode="cut")
        pool = pool_config([e.url for e in endpoints], retry=QUICK)
        with fleet(tmp_path, redis_url, {"llm": pool}, 1) as running:
            results = list(broker.map("llm", [chat() for _ in range(50)], window=50, timeout=60))
            kinds = {line["kind"] for result in results for line in history(running.store, result.task_id)}
    assert {result.outcome for result in results} == {"ok"}
    assert {result.endpoint for result in results} == {"e1"}
    assert kinds == {"cut"}


def test_each_attempt_goes_to_another_endpoint_and_the_last_makes_a_dead_letter(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(4) as endpoints, Broker(redis_url) as broker:
        pool = pool_config([e.url for e in endpoints], retry=QUICK)
        with fleet(tmp_path, redis_url, {"llm": pool}, 1) as running:
            (result,) = broker.map("llm", [chat("x", x_sim={"status": 500})], timeout=30)
            lines = history(running.store, result.task_id)
    assert (result.outcome, result.attempts, result.status_code) == ("dead", 3, 500)
    assert len({line["endpoint"] for line in lines}) == 3
    assert len(lines) == 3
    assert "attempt 3 of 3 failed" in result.reason


def test_a_pool_of_one_endpoint_still_retries(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(1) as (endpoint,), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url], retry=QUICK)}, 1):
            task = broker.enqueue("llm", chat("x", x_sim={"fail_first": 2, "status": 503}))
            result = task.result(timeout=30)
        hits = endpoint.stats()["hits"]
    assert (result.attempts, hits) == (3, 3)


def test_a_deadline_ends_what_waits_and_what_runs(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(1) as (endpoint,), Broker(redis_url) as broker:
        endpoint.control(mode="hang")
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url], slots=1)}, 1) as running:
            tasks = [broker.enqueue("llm", chat(text), deadline=1.0) for text in ("a", "b")]
            results = [task.result(timeout=30, raise_on_failure=False) for task in tasks]
            until(lambda: in_flight(running.store, "llm") == 0, "no slot is in use")
            state = running.store.raw(lambda r: r.hget(running.store.keys.endpoint("llm", "e0"), "fails"))
    assert [result.outcome for result in results] == ["expired", "expired"]
    assert state in (None, b"0"), "a deadline is not the endpoint's fault"


def test_canceled_tasks_never_start_and_running_ones_close_their_connection(tmp_path: Path, redis_url: str) -> None:
    """S6: cancel 100 of 200."""
    with simulated_endpoints(1, "--latency", "600s") as (endpoint,), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url], slots=20)}, 1) as running:
            tasks = broker.enqueue_many("llm", [chat(str(i)) for i in range(200)])
            until(lambda: endpoint.stats()["in_flight"] == 20, "twenty run")
            first = tasks[:100]
            assert broker.cancel("llm", [task.id for task in first]) == [True] * 100
            asked = time.monotonic()
            until(lambda: set(endpoint.stats()["open_now"]).isdisjoint(t.id for t in first), "their connections close")
            closed = time.monotonic() - asked
            until(lambda: endpoint.stats()["in_flight"] == 20, "the slots are used again")
            seen = set(endpoint.stats()["by_task"])
            broker.cancel("llm", [task.id for task in tasks[100:]])
            until(lambda: in_flight(running.store, "llm") == 0, "all slots are free")
            outcomes = {task.result(timeout=10, raise_on_failure=False).outcome for task in tasks}
    assert outcomes == {"canceled"}
    assert closed < 10  # a loaded machine; alone it is a few milliseconds
    assert len(seen & {task.id for task in first}) == 20, "of the canceled, only those that ran had been sent"


def test_a_429_pauses_the_endpoint_and_counts_no_attempt(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(2) as endpoints, Broker(redis_url) as broker:
        endpoints[0].control(mode="status", status=429, retry_after=30)
        pool = pool_config([e.url for e in endpoints], slots=4, retry=QUICK)
        with fleet(tmp_path, redis_url, {"llm": pool}, 1):
            results = list(broker.map("llm", [chat() for _ in range(100)], window=100, timeout=60))
            refused = endpoints[0].stats()["hits"]
    assert Counter((result.outcome, result.attempts) for result in results) == {("ok", 1): 100}
    assert refused <= 4


@pytest.mark.parametrize("mode", ["huge", "bad_json"])
def test_an_endpoint_whose_answers_are_no_answers_is_no_black_hole(tmp_path: Path, redis_url: str, mode: str) -> None:
    """A body over the limit, or JSON that is none: quick, with status 200, and so the least loaded of all."""
    with simulated_endpoints(3, "--latency", "20ms") as endpoints, Broker(redis_url) as broker:
        endpoints[0].control(mode=mode, latency_ms=1)
        pool = pool_config([e.url for e in endpoints], slots=8, retry=QUICK)
        with fleet(tmp_path, redis_url, {"llm": pool}, 2):
            results = list(broker.map("llm", (chat() for _ in range(400)), window=400, timeout=60))
            wasted = endpoints[0].stats()["hits"]
    assert Counter(result.outcome for result in results) == {"ok": 400}
    assert wasted < 30


def test_a_full_memory_lets_workers_start_and_drains(tmp_path: Path) -> None:
    """Fault 12: enqueue is refused, consuming goes on and frees memory."""
    limits = {"maxmemory": "8mb", "maxmemory-policy": "noeviction"}
    with (
        redis_server("redis" if which("redis-server") else "valkey", config=limits) as server,
        simulated_endpoints(2) as endpoints,
        Broker(server.url) as broker,
    ):
        tasks, full = [], False
        while not full:
            try:
                tasks += broker.enqueue_many("llm", [chat("x" * 2000) for _ in range(100)])
            except QueueFull as error:
                tasks += error.queued
                full = True
        pool = pool_config([e.url for e in endpoints], slots=8, queue={"result_ttl": "1s"})
        with fleet(tmp_path, server.url, {"llm": pool}, 1) as running:
            until(lambda: running.store.pipelined([("LLEN", "rq:queue:llm")]) == [0], "the queue is drained")
            until(lambda: in_flight(running.store, "llm") == 0, "no slot is in use")
        assert sum(endpoint.stats()["hits"] for endpoint in endpoints) == len(tasks)


def test_a_mangled_task_stops_nobody(tmp_path: Path, redis_url: str) -> None:
    """Fault 13: strangers wrote into the hashes of tasks; the others of their batches go on."""
    with simulated_endpoints(1, "--latency", "300ms") as (endpoint,), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url], slots=16)}, 1) as running:
            tasks = broker.enqueue_many("llm", [chat(str(i)) for i in range(64)])
            until(lambda: endpoint.stats()["in_flight"] == 16, "sixteen run")
            keys = [running.store.keys.job(task.id) for task in tasks]
            running.store.pipelined([("HSET", key, "x_try", "many", "x_dl", "soon", "x_max", "-") for key in keys[::7]])
            running.store.pipelined([("HSET", keys[40], "data", b"\x80\x05junk"), ("DEL", keys[41])])
            running.store.pipelined([("DEL", keys[42]), ("SET", keys[42], "no hash")])
            kept = [task for i, task in enumerate(tasks) if i not in (40, 41, 42)]
            assert all(task.result(timeout=30).ok for task in kept)
            assert tasks[40].result(timeout=30, raise_on_failure=False).outcome == "dead"
            until(lambda: in_flight(running.store, "llm") == 0, "no slot is in use")
            assert broker.enqueue("llm", chat()).result(timeout=30).ok


def test_a_key_stays_with_its_endpoint_when_a_task_fails_over(tmp_path: Path, redis_url: str) -> None:
    """What each endpoint received, and everything that is kept or shown."""
    keys = {"KEY_OF_ONE": "planted-key-of-one", "KEY_OF_TWO": "planted-key-of-two"}
    first = {"id": "one", "priority": 9, "api_key": "${KEY_OF_ONE}", "headers": {"X-Tenant": "${KEY_OF_ONE}"}}
    second = {"id": "two", "priority": 1, "api_key": "${KEY_OF_TWO}"}
    with upstream_server() as one, upstream_server() as two, Broker(redis_url) as broker:
        one.status = 500
        pool = {
            "endpoints": [{**first, "url": one.url}, {**second, "url": two.url}],
            "retry": QUICK | {"max_attempts": 2}, "health": {"enabled": False},
        }  # fmt: skip
        with fleet(tmp_path, redis_url, {"llm": pool}, 1, "-vv", env=keys) as running:
            over = broker.enqueue("llm", Request("POST", "/over", json={})).result(timeout=60)
            assert (over.ok, over.endpoint, over.attempts) == (True, "two", 2)
            two.status = 500
            dead = broker.enqueue("llm", Request("POST", "/dead", json={})).result(timeout=60, raise_on_failure=False)
            assert (dead.outcome, dead.attempts) == ("dead", 2)
            with api_server(running.store) as api:
                shown = {path: api.get(path).text for path in ("/metrics", f"/api/pools/llm/dead/{dead.task_id}")}
            assert "headrace_tasks" in shown["/metrics"]
            assert dead.task_id in str(shown)
            names = [as_text(name) for name in running.store.raw(lambda client: client.keys("*"))]
            kept = running.store.pipelined([("DUMP", name) for name in names])
            hashes = running.store.pipelined([("HGETALL", f"rq:job:{each.task_id}") for each in (over, dead)])
    assert [seen.path for seen in one.seen] == [seen.path for seen in two.seen] == ["/over", "/dead"]
    assert {seen.headers["authorization"] for seen in one.seen} == {f"Bearer {keys['KEY_OF_ONE']}"}
    assert {seen.headers["authorization"] for seen in two.seen} == {f"Bearer {keys['KEY_OF_TWO']}"}
    assert keys["KEY_OF_TWO"] not in str(one.seen)
    assert keys["KEY_OF_ONE"] not in str(two.seen)
    assert all(len(fields) > 5 for fields in hashes)
    for key in keys.values():
        assert key not in running.log.read_text()
        assert key not in str(shown)
        assert key not in str(hashes)
        assert key.encode() not in b"".join(filter(None, kept))


def test_a_task_that_shows_a_fault_of_ours_ends_as_poison(tmp_path: Path, redis_url: str) -> None:
    with upstream_server() as upstream, Broker(redis_url) as broker:
        queue = {"lease": "1s", "max_deliveries": 2}
        pool = pool_config([upstream.url], slots=1, health={"enabled": False}, queue=queue)
        with fleet(tmp_path, redis_url, {"llm": pool}, 1, module="tests.support.broken") as workers:
            result = broker.enqueue("llm", Request("POST", "/200", json={})).result(timeout=60, raise_on_failure=False)
            log = workers.log.read_text()
    assert result.outcome == "poison"
    assert len(upstream.seen) == 2
    assert log.count("left to the end of its lease: a fault inside headrace") == 2


@pytest.mark.parametrize(("slots", "retry_after"), [(4, "0"), ("auto", "0"), ("auto", "")])
def test_an_endpoint_that_says_try_again_is_not_asked_without_end(
    tmp_path: Path, redis_url: str, slots: Any, retry_after: str
) -> None:
    """429 for one task, all the time."""
    with upstream_server() as upstream, Broker(redis_url) as broker:
        upstream.retry_after = retry_after
        pool = pool_config([upstream.url], slots=slots, health={"enabled": False})
        with fleet(tmp_path, redis_url, {"llm": pool}, 1):
            began = time.monotonic()
            task = broker.enqueue("llm", Request("POST", "/429", json={}))
            for _ in range(4):
                upstream.arrived.get(timeout=30)
            took = time.monotonic() - began
            assert task.cancel()
    assert took > 3 * 0.5
    assert len(upstream.seen) <= 2 + took / 0.5
