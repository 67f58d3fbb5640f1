"""The management API over HTTP, against a real Redis: what its routes do, and that looking changes nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from broker import Broker
from broker.config import Endpoint
from broker.registered import add_endpoint, registered
from broker.store import Store
from broker.web.app import OPERATIONS
from tests.support.api import FILE, POOL, ask, fail, good, in_use, refused, rows, until
from tests.support.player import claim, listen, refuse, register, settle

#
# Looking changes nothing


READ = {
    "hash": ("HGETALL",), "list": ("LRANGE", 0, -1), "set": ("SMEMBERS",), "zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    "string": ("GET",), "stream": ("XRANGE", "-", "+"),
}  # fmt: skip


def dump(store: Store) -> dict[bytes, Any]:
    """Every key: its type, its value, and when it expires."""
    keys = sorted(store.pipelined([("KEYS", "*")])[0])
    kinds = [kind.decode() for kind in store.pipelined([("TYPE", key) for key in keys])]
    values = store.pipelined([(READ[kind][0], key, *READ[kind][1:]) for key, kind in zip(keys, kinds, strict=True)])
    expiries = store.pipelined([("PEXPIRETIME", key) for key in keys])
    return dict(zip(keys, zip(kinds, values, expiries, strict=True), strict=True))


def test_no_get_changes_anything(api: httpx.Client, broker: Broker, store: Store) -> None:
    tasks = in_use(store, broker)
    broker.enqueue(POOL, ask())
    settle(store, POOL, [fail(claim(store, POOL, 1)[0], 0.0, "open")])
    before = dump(store)
    assert len(before) > 10
    paths = ["/livez", "/readyz", "/metrics", "/openapi.json", "/api/nothing"]
    for operation in OPERATIONS:
        if operation.method == "GET":
            for task in [*tasks.values(), "nobody"] if "{task}" in operation.path else [""]:
                for pool in (POOL, "nobody"):
                    paths.append(operation.path.format(pool=pool, task=task, endpoint="vm1"))
    for path in dict.fromkeys(paths):
        assert api.get(path).status_code in (200, 404), path
        api.head(path)
        assert dump(store) == before, path
    assert len(dict.fromkeys(paths)) > 25


def test_a_get_does_not_make_an_open_breaker_half_open(api: httpx.Client, broker: Broker, store: Store) -> None:
    store.run(store.scripts.register(POOL, {"cooldown": 1}, rows()))
    listen(store, POOL)
    broker.enqueue(POOL, ask())
    settle(store, POOL, [fail(claim(store, POOL, 1)[0], 0.0, "open")])
    key = store.keys.endpoint(POOL, "vm1")
    until(lambda: good(api.get(f"/api/pools/{POOL}/endpoints"))["endpoints"][0]["state"] == "probing")
    assert store.redis.hget(key, "state") == b"open"
    (first, _) = good(api.get("/api/npu/pool/workers"))["workers"]
    assert first["circuit_state"] == "OPEN"


# Pools and endpoints


def test_pools_and_their_stats(api: httpx.Client, broker: Broker, store: Store) -> None:
    in_use(store, broker)
    register(store, "llm")
    listen(store, "llm")
    llm, npu = good(api.get("/api/pools"))["pools"]
    assert (llm["pool"], llm["adapter"], llm["endpoints"], llm["endpoints_up"]) == ("llm", None, 1, 1)
    expected = {"waiting": 1, "delayed": 1, "running": 1, "dead": 1, "finished": 1, "canceled": 1}
    assert {name: npu[name] for name in expected} == expected
    assert (npu["adapter"], npu["endpoints"], npu["endpoints_up"], npu["processes"]) == ("npu", 2, 1, 1)
    stats = good(api.get(f"/api/pools/{POOL}/stats"))
    assert stats["max_depth"] == 50
    assert (stats["counts"]["enqueued"], stats["counts"]["ok"], stats["counts"]["dead"]) == (6, 1, 1)
    vm1, vm2 = stats["endpoints"]
    assert (vm1["id"], vm1["state"], vm1["in_flight"], vm1["served"], vm1["failed"]) == ("vm1", "ready", 1, 1, 2)
    assert (vm1["url"], vm1["labels"], vm1["source"]) == ("http://127.0.0.1:9001", {"room": "b2"}, "file")
    assert (vm2["id"], vm2["state"], vm2["enabled"]) == ("vm2", "disabled", False)


def test_a_pool_of_the_file_that_no_worker_has_registered(api: httpx.Client) -> None:
    (pool,) = good(api.get("/api/pools"))["pools"]
    assert (pool["pool"], pool["endpoints"], pool["endpoints_up"]) == (POOL, 2, 0)
    vm1, vm2 = good(api.get(f"/api/pools/{POOL}/endpoints"))["endpoints"]
    assert (vm1["state"], vm1["url"], vm2["state"]) == ("absent", "http://127.0.0.1:9001", "disabled")
    refused(api.post(f"/api/pools/{POOL}/endpoints/vm1/drain"), 409, "not_registered")


def test_drain_undrain_reset(api: httpx.Client, broker: Broker, store: Store) -> None:
    store.run(store.scripts.register(POOL, {}, rows()))
    listen(store, POOL)
    at = f"/api/pools/{POOL}/endpoints/vm1"
    assert good(api.post(f"{at}/drain"))["state"] == "draining"
    broker.enqueue(POOL, ask())
    assert claim(store, POOL, 1) == []
    assert good(api.post(f"{at}/undrain"))["state"] == "ready"
    (claimed,) = claim(store, POOL, 1)
    settle(store, POOL, [fail(claimed, 0.0, "open", pause=60)])
    (vm1, _) = good(api.get(f"/api/pools/{POOL}/endpoints"))["endpoints"]
    assert (vm1["state"], vm1["reason"]) == ("open", "http_5xx: busy")
    vm1 = good(api.post(f"{at}/reset", json={}))
    assert (vm1["state"], vm1["breaker"], vm1["paused_until"]) == ("ready", "closed", None)
    assert len(claim(store, POOL, 1)) == 1


def test_an_endpoint_comes_and_goes_at_run_time(api: httpx.Client, store: Store) -> None:
    store.run(store.scripts.register(POOL, {}, rows()))
    at = f"/api/pools/{POOL}/endpoints"
    body = {"id": "vm3", "url": "http://127.0.0.1:9003/", "priority": 7, "max_concurrent": 2, "capabilities": ["llm"]}
    added = good(api.post(at, json=body), 201)
    url = "http://127.0.0.1:9003"
    assert (added["id"], added["state"], added["url"], added["source"]) == ("vm3", "absent", url, "added")
    assert [each.id for each in registered(store, POOL)] == ["vm3"]
    assert [each["id"] for each in good(api.get(at))["endpoints"]] == ["vm1", "vm3", "vm2"]
    refused(api.post(at, json=body), 409, "exists")
    assert "headrace.yaml:" in refused(api.post(at, json={**body, "id": "vm1"}), 409, "exists")
    assert good(api.post(at, json={"url": "http://127.0.0.1:9004", "max_concurrent": "auto"}), 201)["adapts"]
    assert good(api.delete(f"{at}/vm3")) == {"id": "vm3", "removed": True}
    refused(api.delete(f"{at}/vm3"), 404, "unknown_endpoint")
    message = refused(api.delete(f"{at}/vm1"), 409, "in_file")
    assert re.search(r"headrace\.yaml:\d+: remove it there, or drain it", message)


def test_an_added_endpoint_that_the_file_has_too_can_be_removed(api: httpx.Client, store: Store) -> None:
    at = f"/api/pools/{POOL}/endpoints"
    store.run(store.scripts.register(POOL, {}, rows()))
    add_endpoint(store, POOL, Endpoint("vm1", "http://127.0.0.1:9003"))
    assert good(api.delete(f"{at}/vm1")) == {"id": "vm1", "removed": True}
    assert registered(store, POOL) == ()
    refused(api.delete(f"{at}/vm1"), 409, "in_file")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "url is missing"),
        ({"url": "ftp://127.0.0.1"}, "http"),
        ({"url": "http://127.0.0.1:1", "priority": 11}, "priority"),
        ({"url": "http://127.0.0.1:1", "priority": "5"}, "whole number"),
        ({"url": "http://127.0.0.1:1", "max_concurrent": 0}, "max_concurrent"),
        ({"url": "http://127.0.0.1:1", "api_key": "k3y"}, "unknown key 'api_key'"),
        ({"url": "http://me:k3y@127.0.0.1:1"}, "password"),
        ([], "object"),
    ],
)
def test_a_bad_endpoint_is_refused(api: httpx.Client, store: Store, body: Any, told: str) -> None:
    register(store, POOL)
    message = refused(api.post(f"/api/pools/{POOL}/endpoints", json=body), 400, "invalid")
    assert told in message
    assert "k3y" not in message
    assert registered(store, POOL) == ()


def test_the_file_may_change_while_it_serves(api: httpx.Client, file: Path) -> None:
    changed = json.loads(json.dumps(FILE))
    changed["pools"]["npu"]["endpoints"][0]["url"] = "http://127.0.0.1:9999"
    file.write_text(yaml.safe_dump(changed))
    at = f"/api/pools/{POOL}/endpoints"
    assert good(api.get(at))["endpoints"][0]["url"] == "http://127.0.0.1:9999"
    file.write_text("pools: [broken")
    assert good(api.get(at))["endpoints"][0]["url"] == "http://127.0.0.1:9999"
    file.unlink()
    assert good(api.get(at))["endpoints"][0]["url"] == "http://127.0.0.1:9999"


# Dead letters and tasks


def test_dead_letters(api: httpx.Client, broker: Broker, store: Store) -> None:
    register(store, POOL)
    broker.enqueue_many(POOL, [ask(n) for n in range(6)])
    settle(store, POOL, [refuse(each, f"http_400: reason {at}") for at, each in enumerate(claim(store, POOL, 6))])
    at = f"/api/pools/{POOL}/dead"
    page = good(api.get(at, params={"limit": 4}))
    rest = good(api.get(at, params={"limit": 4, "cursor": page["cursor"]}))
    ids = [letter["id"] for letter in [*page["letters"], *rest["letters"]]]
    assert (len(page["letters"]), len(rest["letters"]), len(set(ids))) == (4, 2, 6)
    (found,) = good(api.get(at, params={"reason": "reason 3"}))["letters"]
    shown = good(api.get(f"{at}/{found['id']}"))
    assert (shown["state"], shown["payload"]["json"], shown["answer"]) == ("dead", {"n": 3}, '{"error": "no"}')
    assert good(api.post(f"{at}/redrive", json={"ids": [found["id"], "nobody"]})) == {
        "queued": 1, "unsettled": 0, "done": 0, "unknown": 1,
    }  # fmt: skip
    refused(api.get(f"{at}/{found['id']}"), 404, "unknown_task")
    assert good(api.post(f"{at}/purge", json={"all": True, "reason": "reason 4"})) == {"deleted": 1}
    assert good(api.post(f"{at}/redrive", json={"all": True}))["queued"] == 4
    assert good(api.get(at)) == {"letters": [], "cursor": None}
    bodies: list[dict[str, Any]] = [
        {}, {"ids": []}, {"all": False}, {"ids": ["x"], "all": True}, {"ids": ["x"], "reason": "y"},
    ]  # fmt: skip
    for body in bodies:
        refused(api.post(f"{at}/purge", json=body), 400, "invalid")
    refused(api.get(at, params={"limit": 0}), 400, "invalid")
    refused(api.get(at, params={"cursor": "x/y"}), 400, "invalid")


def test_a_task_is_shown_explained_and_canceled(api: httpx.Client, broker: Broker, store: Store) -> None:
    tasks = in_use(store, broker)
    for state, task in tasks.items():
        shown = good(api.get(f"/api/tasks/{task}"))
        assert (shown["state"], shown["payload"], shown["answer"]) == (state, None, None)
        assert good(api.get(f"/api/tasks/{task}/explain"))["state"] == state
    assert good(api.get(f"/api/tasks/{tasks['ok']}", params={"payload": "true"}))["payload"]["path"] == "/inference"
    why = good(api.get(f"/api/tasks/{tasks['queued']}/explain"))
    assert why["place"] == 1
    assert "no endpoint has vision" in why["summary"]
    cancel = good(api.post(f"/api/tasks/{tasks['queued']}/cancel"))
    assert cancel == {"id": tasks["queued"], "canceled": True, "state": "canceled"}
    assert good(api.post(f"/api/tasks/{tasks['ok']}/cancel"))["canceled"] is False
    assert good(api.get(f"/api/tasks/{tasks['queued']}"))["state"] == "canceled"
    for path in ("", "/explain"):
        refused(api.get(f"/api/tasks/nobody{path}"), 404, "unknown_task")
    refused(api.post("/api/tasks/nobody/cancel"), 404, "unknown_task")
    refused(api.get("/api/tasks/no%20id"), 400, "invalid")


def test_a_number_that_json_does_not_have(api: httpx.Client, broker: Broker, store: Store) -> None:
    """Python reads NaN where a stranger wrote it; other readers would choke on it."""
    register(store, POOL)
    task = broker.enqueue(POOL, ask())
    store.redis.hset(store.keys.job(task.id), "x_hist", '{"endpoint": "vm1", "started": NaN}\n')
    response = api.get(f"/api/tasks/{task.id}")
    assert "NaN" not in response.text
    assert good(response)["history"][0]["started_at"] is None
