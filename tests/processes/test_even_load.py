"""R1.2: share of traffic never depends on the process count. Counted at the endpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker import Broker, Request
from tests.support.endpoints import simulated_endpoints
from tests.support.fleet import fleet, pool_config, until

CHAT = Request("POST", "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "hi"}]})


@pytest.mark.alone
@pytest.mark.parametrize("processes", [1, 5, 8])
def test_nine_equal_endpoints_serve_equal_shares_of_a_long_queue(
    tmp_path: Path, redis_url: str, processes: int
) -> None:
    with simulated_endpoints(9, "--latency", "200ms") as endpoints, Broker(redis_url) as broker:
        urls = [endpoint.url for endpoint in endpoints]
        with fleet(tmp_path, redis_url, {"llm": pool_config(urls, slots=8)}, processes):
            # Collected afterwards: a busy collector on two cores would make the CPU the limit.
            tasks = broker.enqueue_many("llm", [CHAT] * 2700)
            tasks[-1].result(timeout=60)
            assert all(task.result(timeout=60).ok for task in tasks)
            stats = [endpoint.stats() for endpoint in endpoints]
    hits = [each["hits"] for each in stats]
    assert sum(hits) == 2700
    assert max(each["max_in_flight"] for each in stats) <= 8
    assert max(hits) / min(hits) <= 1.05, hits


@pytest.mark.alone
@pytest.mark.parametrize("processes", [1, 5, 10])
def test_tasks_that_trickle_in_one_at_a_time_go_round(tmp_path: Path, redis_url: str, processes: int) -> None:
    with simulated_endpoints(9, "--latency", "1ms") as endpoints, Broker(redis_url) as broker:
        urls = [endpoint.url for endpoint in endpoints]
        with fleet(tmp_path, redis_url, {"llm": pool_config(urls)}, processes):
            for _ in range(90):
                assert broker.enqueue("llm", CHAT).result(timeout=30).ok
            hits = [endpoint.stats()["hits"] for endpoint in endpoints]
    assert sum(hits) == 90
    assert max(hits) - min(hits) <= 1, hits


def test_no_more_connections_than_slots_and_no_connect_errors(tmp_path: Path, redis_url: str) -> None:
    """S1: 2,000 tasks at once on 4 endpoints."""
    with simulated_endpoints(4, "--latency", "20ms") as endpoints, Broker(redis_url) as broker:
        urls = [endpoint.url for endpoint in endpoints]
        with fleet(tmp_path, redis_url, {"llm": pool_config(urls, slots=16)}, 2):
            results = list(broker.map("llm", [CHAT] * 2000, window=2000, timeout=60))
            stats = [endpoint.stats() for endpoint in endpoints]
    assert [result.outcome for result in results] == ["ok"] * 2000
    assert all(result.attempts == 1 for result in results)
    assert all(each["max_connections"] <= 16 for each in stats), stats


def test_every_task_is_started_exactly_once_by_sixteen_processes(tmp_path: Path, redis_url: str) -> None:
    """S10: 10,000 tasks."""
    with simulated_endpoints(4) as endpoints, Broker(redis_url) as broker:
        urls = [endpoint.url for endpoint in endpoints]
        with fleet(tmp_path, redis_url, {"llm": pool_config(urls, slots=32)}, 16):
            results = list(broker.map("llm", (CHAT for _ in range(10_000)), window=2000, timeout=60))
            stats = [endpoint.stats() for endpoint in endpoints]
    assert len({result.task_id for result in results if result.ok}) == 10_000
    assert sum(each["hits"] for each in stats) == 10_000
    assert all(count == 1 for each in stats for count in each["by_task"].values())


def test_one_slot_completes_in_order_of_submission(tmp_path: Path, redis_url: str) -> None:
    """S5: 1,000 tasks of one priority."""
    with simulated_endpoints(1) as endpoints, Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoints[0].url], slots=1)}, 1):
            tasks = broker.enqueue_many("llm", [CHAT] * 1000)
            results = [task.result(timeout=60) for task in tasks]
    started = [result.started_at for result in results]
    ended = [result.ended_at for result in results]
    assert started == sorted(started)
    assert ended == sorted(ended)


def test_a_burst_ends_when_nothing_waits(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(2) as endpoints, Broker(redis_url) as broker:
        tasks = broker.enqueue_many("llm", [CHAT] * 200)
        pool = {"llm": pool_config([endpoint.url for endpoint in endpoints])}
        with fleet(tmp_path, redis_url, pool, 2, "--burst") as running:
            assert running.wait() == 0
        assert all(task.result(timeout=1).ok for task in tasks)


@pytest.mark.alone
def test_an_endpoint_of_a_lower_priority_is_left_alone_while_the_upper_has_room(
    tmp_path: Path, redis_url: str
) -> None:
    with simulated_endpoints(2, "--latency", "5ms") as (upper, lower), Broker(redis_url) as broker:
        pool = pool_config([upper.url, lower.url], slots=4)
        pool["endpoints"][1]["priority"] = 1
        with fleet(tmp_path, redis_url, {"llm": pool}, 2):
            for _ in range(20):
                assert broker.enqueue("llm", CHAT).result(timeout=30).ok
            assert lower.stats()["hits"] == 0
            assert all(result.ok for result in broker.map("llm", [CHAT] * 200, window=200, timeout=60))
            until(lambda: lower.stats()["hits"] > 0, "the lower tier takes what the upper cannot")


def test_processes_together_keep_no_more_connections_than_an_endpoint_has_slots(
    tmp_path: Path, redis_url: str
) -> None:
    """R1.6: idle ones count."""
    with simulated_endpoints(1, "--latency", "20ms") as (endpoint,), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url], slots=8)}, 4):
            for _ in range(3):  # bursts with pauses between them, so that all processes have had all the slots
                assert all(result.ok for result in broker.map("llm", [CHAT] * 200, window=200, timeout=60))
                assert broker.enqueue("llm", CHAT).result(timeout=30).ok
            stats = endpoint.stats()
    assert stats["max_in_flight"] <= 8
    assert stats["max_connections"] <= 8, stats
