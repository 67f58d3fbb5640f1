"""Breaker, health, pauses, tiers and recovery, over several processes, counted at the endpoints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from broker import Broker, Request
from broker.store import Store
from tests.support.endpoints import SimulatedEndpoint, simulated_endpoints
from tests.support.fleet import Fleet, fleet, in_flight, pool_config, until

CHAT = Request("POST", "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "hi"}]})
QUICK = {"max_attempts": 3, "backoff": {"initial": "20ms", "max": "100ms"}}
PATIENT = {"max_attempts": 100, "backoff": {"initial": "20ms", "max": "100ms"}}


def field(store: Store, endpoint: str, name: str, pool: str = "llm") -> str:
    (value,) = store.pipelined([("HGET", store.keys.endpoint(pool, endpoint), name)])
    return value.decode() if value else ""


def served(endpoint: SimulatedEndpoint) -> int:
    """Tasks that came, without the health checks."""
    return int(endpoint.stats()["hits"])


def test_after_the_fifth_failure_no_process_claims(tmp_path: Path, redis_url: str) -> None:
    """S9 and R2.6: four processes on one endpoint."""
    with simulated_endpoints(1) as (endpoint,), Broker(redis_url) as broker:
        pool = pool_config([endpoint.url], slots=4, retry=PATIENT, breaker={"cooldown": "1h"})
        with fleet(tmp_path, redis_url, {"llm": pool}, 4) as first:
            endpoint.control(mode="status", status=503)
            tasks = broker.enqueue_many("llm", [CHAT] * 50)
            until(lambda: field(first.store, "e0", "state") == "open", "the breaker opens")
            until(lambda: all(task.status() in ("queued", "scheduled") for task in tasks), "nothing runs")
            hits = served(endpoint)
            until(lambda: all(task.status() == "queued" for task in tasks), "all retries are due")
            assert served(endpoint) == hits
            assert 5 <= hits <= 5 + 3, "the fifth failure, and what was out beside it"
            assert "503" in field(first.store, "e0", "reason")


def test_half_open_sends_one_probe_and_closes_without_anybody_asking(tmp_path: Path, redis_url: str) -> None:
    """S14, S8: four processes, everything is out, tasks wait, the probe succeeds, all complete."""
    with simulated_endpoints(1, "--latency", "20ms") as (endpoint,), Broker(redis_url) as broker:
        breaker = {"cooldown": "1s", "failures": 3}
        pool = pool_config([endpoint.url], slots=4, retry=PATIENT, breaker=breaker)
        with fleet(tmp_path, redis_url, {"llm": pool}, 4) as running:
            endpoint.control(mode="status", status=503, latency_ms=1)
            tasks = broker.enqueue_many("llm", [CHAT] * 300)
            until(lambda: int(field(running.store, "e0", "opened") or 0) >= 2, "one probe has failed")
            endpoint.control(mode="ok")
            results = [task.result(timeout=60) for task in tasks]
            assert field(running.store, "e0", "state") == "closed"
        stats = endpoint.stats()
    assert Counter(result.outcome for result in results) == {"ok": 300}
    # 3 to open and those in flight beside them, then one for each probe; never a crowd at a half-open endpoint.
    assert stats["hits"] - 300 <= 3 + 3 + 2 * int(stats["hits"] > 306) + 2


def test_one_probe_over_four_processes_and_a_thousand_waiting(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(1) as (endpoint,), Broker(redis_url) as broker:
        breaker = {"cooldown": "500ms", "failures": 2, "cooldown_max": "2s"}
        pool = pool_config([endpoint.url], slots=8, retry=PATIENT, breaker=breaker)
        with fleet(tmp_path, redis_url, {"llm": pool}, 4) as running:
            endpoint.control(mode="status", status=503)
            broker.enqueue_many("llm", [CHAT] * 1000)
            until(lambda: field(running.store, "e0", "state") == "open", "the breaker opens")
            until(lambda: in_flight(running.store, "llm") == 0, "nothing is out, or about to go out")
            endpoint.control(mode="hang")
            before = served(endpoint)
            until(lambda: field(running.store, "e0", "state") == "half_open", "it is probed")
            until(lambda: endpoint.stats()["in_flight"] == 1, "by one request")
            for _ in range(20):  # each look asks Redis and the endpoint: four processes had time to err
                assert running.ready("llm")
                assert endpoint.stats()["in_flight"] == 1
            assert served(endpoint) == before + 1


def test_a_hung_endpoint_is_out_after_five_timeouts_and_the_others_do_not_notice(
    tmp_path: Path, redis_url: str
) -> None:
    """S15."""
    with simulated_endpoints(3, "--latency", "10ms") as endpoints, Broker(redis_url) as broker:
        endpoints[0].control(mode="hang")
        pool = pool_config([e.url for e in endpoints], slots=5, retry=QUICK, timeout={"first_byte": "500ms"})
        with fleet(tmp_path, redis_url, {"llm": pool}, 2) as running:
            results = list(broker.map("llm", [CHAT] * 600, window=600, timeout=60))
            until(lambda: field(running.store, "e0", "state") == "open", "the hung one is out")
        assert Counter(result.outcome for result in results) == {"ok": 600}
        assert served(endpoints[0]) <= 10
        assert {result.endpoint for result in results} == {"e1", "e2"}


def test_a_start_with_one_endpoint_down_warns_uses_the_others_and_takes_it_in_when_it_is_up(
    tmp_path: Path, redis_url: str
) -> None:
    """S16."""
    with simulated_endpoints(3, "--latency", "5ms") as endpoints, Broker(redis_url) as broker:
        endpoints[2].stop()
        pool = pool_config([e.url for e in endpoints], slots=4, retry=QUICK, health={"interval": "1s", "timeout": "1s"})
        with fleet(tmp_path, redis_url, {"llm": pool}, 2) as running:
            results = list(broker.map("llm", [CHAT] * 100, window=100, timeout=60))
            assert {result.endpoint for result in results} == {"e0", "e1"}
            assert all(result.attempts == 1 for result in results), "no task had to find out"
            until(lambda: "e2: health check failed" in running.log.read_text(), "it is said")
            endpoints[2].start()
            until(lambda: field(running.store, "e2", "healthy") == "1", "it is found healthy")
            again = list(broker.map("llm", [CHAT] * 200, window=200, timeout=60))
    assert "e2" in {result.endpoint for result in again}


def test_a_failed_check_takes_an_endpoint_out_and_never_opens_its_breaker(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(2) as endpoints, Broker(redis_url) as broker:
        pool = pool_config([e.url for e in endpoints], health={"interval": "1s", "timeout": "1s"})
        with fleet(tmp_path, redis_url, {"llm": pool}, 2) as running:
            endpoints[0].control(health="fail")
            until(lambda: field(running.store, "e0", "healthy") == "0", "the check fails")
            results = list(broker.map("llm", [CHAT] * 50, timeout=60))
            assert {result.endpoint for result in results} == {"e1"}
            assert field(running.store, "e0", "state") in ("", "closed")


def test_the_later_of_two_pauses_wins(tmp_path: Path, redis_url: str) -> None:
    """S7: a 429 with Retry-After 1, then a failure with Retry-After 60."""
    with simulated_endpoints(1) as (endpoint,), Broker(redis_url) as broker:
        pool = pool_config([endpoint.url], slots=1, retry=PATIENT)
        with fleet(tmp_path, redis_url, {"llm": pool}, 1) as running:

            def ask(status: int, retry_after: int) -> None:
                wish = {"x_sim": {"status": status, "retry_after": retry_after}}
                broker.enqueue("llm", Request("POST", CHAT.path, json=CHAT.json | wish))

            ask(429, 1)
            until(lambda: field(running.store, "e0", "pause"), "it is paused")
            first = int(field(running.store, "e0", "pause"))
            ask(503, 60)
            until(lambda: int(field(running.store, "e0", "pause")) > first + 30_000, "the later pause stands")
            hits = served(endpoint)
            last = broker.enqueue("llm", CHAT)
            until(lambda: running.ready("llm"), "the process waits")
            assert last.status() == "queued"
            assert served(endpoint) == hits


@pytest.mark.alone
def test_shares_are_proportional_to_speed(tmp_path: Path, redis_url: str) -> None:
    """R1.3: 2x, 1x and 0.5x with the same slots."""
    with simulated_endpoints(3) as endpoints, Broker(redis_url) as broker:
        for endpoint, latency in zip(endpoints, (100, 200, 400), strict=True):
            endpoint.control(latency_ms=latency)
        pool = pool_config([e.url for e in endpoints], slots=4)
        with fleet(tmp_path, redis_url, {"llm": pool}, 2):
            tasks = broker.enqueue_many("llm", [CHAT] * 700)
            tasks[-1].result(timeout=60)
            results = [task.result(timeout=60) for task in tasks]
        hits = [served(endpoint) for endpoint in endpoints]
    assert all(result.ok for result in results)
    assert sum(hits) == 700
    # Slots that are never left idle while tasks wait: the makespan is what the endpoints' own times allow.
    runs = {e: [r.ended_at - r.started_at for r in results if r.endpoint == e] for e in ("e0", "e1", "e2")}
    best = 700 / sum(4 * len(times) / sum(times) for times in runs.values())
    makespan = max(result.ended_at for result in results) - min(result.started_at for result in results)
    assert makespan <= 1.05 * best
    # 4:2:1, less what a request costs beside its latency, which weighs most on the fastest
    assert abs(hits[0] / 700 - 4 / 7) < 0.03
    assert abs(hits[1] / 700 - 2 / 7) < 0.03
    assert abs(hits[2] / 700 - 1 / 7) < 0.03


def adaptive(folder: Path, url: str, endpoint: SimulatedEndpoint) -> Any:
    pool = pool_config([endpoint.url], slots="auto")
    return fleet(folder, url, {"llm": pool}, 1)


def slots(running: Fleet) -> int:
    return int(field(running.store, "e0", "cap") or 0)


@pytest.mark.alone
def test_auto_finds_the_knee_and_follows_it(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(1, "--latency", "50ms", "--knee", "16") as (endpoint,), Broker(redis_url) as broker:
        with adaptive(tmp_path, redis_url, endpoint) as running:
            tasks = broker.enqueue_many("llm", [CHAT] * 20_000)
            until(lambda: 14 <= slots(running) <= 22 and field(running.store, "e0", "a_step") == "hold", "16 is found")
            endpoint.control(knee=4)
            until(lambda: 3 <= slots(running) <= 6, "it follows down")
            endpoint.control(knee=16)
            until(lambda: 14 <= slots(running) <= 24, "and up again")
            broker.cancel("llm", [task.id for task in tasks])


@pytest.mark.alone
def test_auto_settles_below_what_an_endpoint_refuses(tmp_path: Path, redis_url: str) -> None:
    """It answers 429, without Retry-After, to more than ten at a time."""
    with simulated_endpoints(1, "--latency", "50ms", "--slots", "10") as (endpoint,), Broker(redis_url) as broker:
        with adaptive(tmp_path, redis_url, endpoint) as running:
            tasks = broker.enqueue_many("llm", [CHAT] * 20_000)
            until(lambda: slots(running) in (9, 10) and field(running.store, "e0", "a_limit") == "11", "10 is found")
            refused = endpoint.stats()["by_status"].get("429", 0)
            until(lambda: endpoint.stats()["by_status"]["200"] > 3000, "it goes on")
            assert slots(running) in (8, 9, 10)
            assert endpoint.stats()["by_status"].get("429", 0) - refused <= 20
            broker.cancel("llm", [task.id for task in tasks])
