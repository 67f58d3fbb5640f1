"""The routes that callers of an NPU worker pool know, and reload."""

from __future__ import annotations

import time

import httpx

from broker import Broker
from broker.scripts import Release
from broker.store import Store
from tests.support.api import POOL, ask, fail, good, in_use, refused, supervisor
from tests.support.player import claim, echo, register, settle


def test_the_routes_of_an_npu_pool(api: httpx.Client, broker: Broker, store: Store) -> None:
    in_use(store, broker)
    store.run(store.scripts.health(POOL, "vm1", True, "healthy"))
    stats = good(api.get("/api/npu/pool/stats"))
    assert list(stats) == [
        "total_workers", "healthy_workers", "total_tasks_processed", "active_tasks", "avg_task_duration_ms",
        "success_rate",
    ]  # fmt: skip
    assert (stats["total_workers"], stats["healthy_workers"], stats["active_tasks"]) == (2, 1, 1)
    assert (stats["total_tasks_processed"], stats["success_rate"]) == (2, 0.5)
    vm1, vm2 = good(api.get("/api/npu/pool/workers"))["workers"]
    assert list(vm1) == [
        "id", "url", "priority", "enabled", "healthy", "circuit_state", "active_tasks", "total_requests", "failures",
        "last_health_check",
    ]  # fmt: skip
    checked = vm1.pop("last_health_check")
    assert abs(checked - time.time()) < 60
    assert vm1 == {
        "id": "vm1", "url": "http://127.0.0.1:9001", "priority": 10, "enabled": True, "healthy": True,
        "circuit_state": "CLOSED", "active_tasks": 1, "total_requests": 3, "failures": 2,
    }  # fmt: skip
    assert (vm2["enabled"], vm2["healthy"], vm2["last_health_check"]) == (False, False, None)


def test_the_average_duration_is_that_of_the_served(api: httpx.Client, broker: Broker, store: Store) -> None:
    register(store, POOL)
    assert good(api.get("/api/npu/pool/stats"))["avg_task_duration_ms"] == 0.0
    broker.enqueue_many(POOL, [ask(n) for n in range(2)])
    began = time.monotonic()
    claimed = claim(store, POOL, 2)
    time.sleep(0.05)  # they run
    settle(store, POOL, [echo(each) for each in claimed])
    most = (time.monotonic() - began) * 1000 + 1
    assert 49 <= good(api.get("/api/npu/pool/stats"))["avg_task_duration_ms"] <= most


def test_canceled_tasks_are_not_active(api: httpx.Client, broker: Broker, store: Store) -> None:
    register(store, POOL)
    tasks = broker.enqueue_many(POOL, [ask(n) for n in range(3)])
    claimed = claim(store, POOL, 3)
    assert good(api.get("/api/npu/pool/stats"))["active_tasks"] == 3
    assert all(task.cancel() for task in tasks)
    store.run(store.scripts.release(POOL, [Release(each.lease) for each in claimed]))
    assert good(api.get("/api/npu/pool/stats"))["active_tasks"] == 0


def test_an_unhealthy_or_open_worker_is_not_healthy(api: httpx.Client, broker: Broker, store: Store) -> None:
    store.run(store.scripts.register(POOL, {}, [("vm1", 5, 4, True, ()), ("vm2", 5, 4, True, ())]))
    assert good(api.get("/api/npu/pool/stats"))["healthy_workers"] == 2
    store.run(store.scripts.health(POOL, "vm2", False, "HTTP 500"))
    broker.enqueue(POOL, ask())
    settle(store, POOL, [fail(claim(store, POOL, 1)[0], 0.0, "open")])
    assert good(api.get("/api/npu/pool/stats"))["healthy_workers"] == 0
    workers = good(api.get("/api/npu/pool/workers"))["workers"]
    assert [(each["healthy"], each["circuit_state"]) for each in workers] == [(True, "OPEN"), (False, "CLOSED")]


def test_reload_tells_what_the_workers_said(api: httpx.Client, store: Store) -> None:
    refused(api.post("/api/reload"), 409, "no_worker")
    assert good(api.post("/api/npu/pool/reload"))["success"] is False
    register(store, POOL)
    with supervisor(store, POOL, success=True, message="2 endpoints loaded", loaded=2):
        told = good(api.post("/api/reload"))
        assert told["pools"][POOL] == {"success": True, "message": "2 endpoints loaded", "loaded": 2, "answered": True}
        legacy = good(api.post("/api/npu/pool/reload"))
        assert legacy == {"success": True, "workers_loaded": 2, "message": "2 endpoints loaded"}
    broken = "headrace.yaml:3: pools.npu.endpoints[0].url: must start with http://"
    with supervisor(store, POOL, success=False, message=broken, loaded=0):
        assert broken in refused(api.post("/api/reload"), 409, "refused")
        legacy = good(api.post("/api/npu/pool/reload"))
        assert legacy == {"success": False, "workers_loaded": 2, "message": broken}


def test_reload_when_no_worker_answers(api: httpx.Client, store: Store) -> None:
    register(store, POOL)
    legacy = good(api.post("/api/npu/pool/reload"))
    assert legacy["success"] is False
    assert "no worker answered within 5 s" in legacy["message"]
