"""What Prometheus reads equals a full scan, and its names follow the rules."""

from __future__ import annotations

import re

import httpx

from broker import Broker, TaskOptions
from broker.store import Store
from tests.support.api import POOL, ask, in_use
from tests.support.player import register


def test_the_gauges_equal_a_full_scan(api: httpx.Client, broker: Broker, store: Store) -> None:
    tasks = in_use(store, broker)
    broker.enqueue_many(POOL, [(ask(n), TaskOptions(priority="high")) for n in range(3)])
    store.run(store.scripts.health(POOL, "vm1", False, "HTTP 500"))
    response = api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = samples(response.text)
    scanned = scan(store)
    for state, number in scanned.items():
        assert found[f'headrace_tasks{{pool="npu",state="{state}"}}'] == number, state
    assert scanned == {"waiting": 4, "delayed": 1, "running": 1, "dead": 1, "finished": 1, "canceled": 1}
    one = 'endpoint="vm1",pool="npu"'
    assert found[f"headrace_endpoint_in_flight{{{one}}}"] == 1
    assert found[f"headrace_endpoint_slots{{{one}}}"] == 4
    assert found[f"headrace_endpoint_healthy{{{one}}}"] == 0
    assert found[f'headrace_endpoint_state{{{one},state="unhealthy"}}'] == 1
    assert sum(value for name, value in found.items() if name.startswith(f"headrace_endpoint_state{{{one}")) == 1
    assert found[f'headrace_endpoint_attempts_total{{{one},state="served"}}'] == 1
    assert found[f'headrace_endpoint_attempts_total{{{one},state="failed"}}'] == 2
    assert found['headrace_tasks_settled_total{pool="npu",state="ok"}'] == 1
    assert found['headrace_tasks_enqueued_total{pool="npu"}'] == 9
    assert all(name.startswith("headrace_") for name in found)
    assert not any(task in response.text for task in tasks.values())


def test_the_names_of_metrics_follow_the_rules(api: httpx.Client, store: Store) -> None:
    register(store, POOL)
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", api.get("/metrics").text, re.M))
    assert len(kinds) > 12
    for name, kind in kinds.items():
        assert (kind == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(ms|milliseconds|percent|kb|mb)(_|$)", name), name
    labels = set(re.findall(r'(\w+)="', api.get("/metrics").text))
    assert labels == {"pool", "endpoint", "state", "version"}


def samples(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def scan(store: Store) -> dict[str, int]:
    """Tasks by state, counted job by job."""
    found = dict.fromkeys(("waiting", "delayed", "running", "dead", "finished", "canceled"), 0)
    words = {"queued": "waiting", "scheduled": "delayed", "started": "running", "failed": "dead"}
    for key in store.redis.scan_iter("rq:job:*"):
        status = bytes(store.pipelined([("HGET", key, "status")])[0]).decode()
        found[words.get(status, status)] += 1
    return found
