"""Endpoints added at run time: they join, outlive restarts, and drain when they are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker import Broker, Request
from broker.config import Endpoint
from broker.registered import add_endpoint, remove_endpoint
from broker.store import Store
from tests.support.endpoints import simulated_endpoints
from tests.support.fleet import done, fleet, in_flight, logged, pool_config, row, until

CHAT = Request("POST", "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "hi"}]})


def test_an_endpoint_added_during_a_backlog_works_within_a_second_and_takes_its_share(
    tmp_path: Path, redis_url: str
) -> None:
    """S18."""
    with simulated_endpoints(3, "--latency", "100ms") as (one, two, late), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([one.url, two.url], slots=4)}, 2) as running:
            tasks = broker.enqueue_many("llm", [CHAT] * 500)
            until(lambda: one.stats()["hits"] > 20, "the backlog is being worked off")
            word = add_endpoint(running.store, "llm", Endpoint("late", late.url, max_concurrent=4))
            assert word == "added"
            until(lambda: late.stats()["hits"] > 0, "it works", 2)  # within 1 s; two for a busy machine
            before = [each.stats()["hits"] for each in (one, two, late)]
            assert done(tasks) == {"ok": 500}
            after = [each.stats()["hits"] for each in (one, two, late)]
    shares = [now - then for now, then in zip(after, before, strict=True)]
    assert min(shares) > 0.7 * max(shares), shares


def test_an_added_endpoint_survives_a_restart_and_drains_when_it_is_removed(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(2) as (one, late), Broker(redis_url) as broker:
        pool = {"llm": pool_config([one.url], slots=2)}
        with fleet(tmp_path, redis_url, pool) as running:
            add_endpoint(running.store, "llm", Endpoint("late", late.url, max_concurrent=2, priority=9))
            logged(running, "endpoint late added")
        with fleet(tmp_path, redis_url, pool) as running:
            late.control(latency_ms=1500)
            tasks = broker.enqueue_many("llm", [CHAT] * 2)
            until(lambda: late.stats()["in_flight"] == 2, "the preferred one works")
            remove_endpoint(running.store, "llm", "late")
            logged(running, "endpoint late removed")
            assert late.stats()["in_flight"] == 2
            assert done(tasks) == {"ok": 2}
            until(lambda: not row(running, "late"), "it is gone")
            assert done(broker.enqueue_many("llm", [CHAT] * 4)) == {"ok": 4}
        assert late.stats()["hits"] == 2


def test_the_files_endpoint_of_the_same_id_wins(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(2) as (one, two), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([one.url])}) as running:
            add_endpoint(running.store, "llm", Endpoint("e0", two.url))
            logged(running, "endpoint e0, added to pool llm at run time, is left out")
            assert done(broker.enqueue_many("llm", [CHAT] * 4)) == {"ok": 4}
        assert two.stats()["hits"] == 0


def test_a_process_that_registers_late_knows_added_endpoints(tmp_path: Path, redis_url: str) -> None:
    """A killed one registers its pools again: the added endpoint must not look gone."""
    with simulated_endpoints(2) as (one, late):
        with fleet(tmp_path, redis_url, {"llm": pool_config([one.url])}) as running:
            add_endpoint(running.store, "llm", Endpoint("late", late.url))
            logged(running, "endpoint late added")
            killed = running.kill_one()
            until(lambda: set(running.pids) - {killed} and running.ready("llm"), "another in its place")
            assert row(running, "late")["gone"] == "0"


def test_a_server_that_lost_its_data_is_told_of_the_pool_again(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(1) as (endpoint,), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url], slots=3)}) as running:
            running.store.raw(lambda client: client.flushall())
            until(lambda: row(running, "e0").get("cap") == "3", "registered again")
            assert done(broker.enqueue_many("llm", [CHAT] * 4)) == {"ok": 4}


# Refusals, at the door


def test_only_what_was_added_can_be_removed(redis_url: str) -> None:
    store = Store(redis_url)
    try:
        store.raw(lambda client: client.sadd(store.keys.pools(), "llm"))
        add_endpoint(store, "llm", Endpoint("x", "http://10.0.0.1:1"))
        with pytest.raises(
            Exception, match=r"headrace\.yaml:7: pool llm: endpoint 'e0' comes from a configuration file"
        ):
            remove_endpoint(store, "llm", "e0", where="headrace.yaml:7")
        with pytest.raises(Exception, match="no endpoint 'y' was added; there is x"):
            remove_endpoint(store, "llm", "y")
        with pytest.raises(Exception, match="the same server as endpoint 'x'"):
            add_endpoint(store, "llm", Endpoint("y", "http://10.0.0.1:1/"))
        with pytest.raises(Exception, match="no pool is called 'npu'; there is llm"):
            add_endpoint(store, "npu", Endpoint("y", "http://10.0.0.2:1"))
        assert in_flight(store, "llm") == 0
    finally:
        store.close()
