"""Callers, other sites and Redis itself against the API: every route that the application has, not a list by hand."""

from __future__ import annotations

import io
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker import Broker, UnknownTask, admin, logs
from broker.catalog import Catalog
from broker.config import Config
from broker.errors import HeadraceError
from broker.store import Store
from broker.web.app import make_app
from broker.web.guard import OPEN_PATHS
from tests.support.api import POOL, TOKEN, api_server, in_use, refused

READS = ("GET", "HEAD")
HOSTILE = "<script>alert(1)</script>\"'\r\n\x1b[2J{evil}"


def routes(store: Store) -> list[tuple[str, str]]:
    """Method and path of every route, names filled in with those of `in_use`."""
    app: Any = make_app(store, Catalog(Config(), Config), None)
    found = []
    for route in cast(Any, app)._app.routes:
        for method in sorted(route.methods - {"HEAD"}):
            found.append((method, route.path.replace("{pool}", POOL).replace("{endpoint}", "vm1")))
    assert len(found) > 15
    return found


def dump(store: Store) -> dict[bytes, Any]:
    keys = sorted(store.pipelined([("KEYS", "*")])[0])
    return dict(zip(keys, store.pipelined([("DUMP", key) for key in keys]), strict=True))


@pytest.fixture
def tasks(store: Store, broker: Broker) -> dict[str, str]:
    return in_use(store, broker)


@pytest.fixture
def changing(store: Store, tasks: dict[str, str]) -> list[tuple[str, str]]:
    """The routes that may change something."""
    found = [(method, path.replace("{task}", tasks["queued"])) for method, path in routes(store)]
    return [(method, path) for method, path in found if method not in READS]


def test_no_other_site_can_use_a_route_that_changes(store: Store, changing: list[tuple[str, str]]) -> None:
    """What a page elsewhere can make a browser send without asking us first: forms, text, lies about where it is."""
    kinds: tuple[dict[str, str], ...] = (
        {}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=application/json"},
        {"content-type": "text/plain; application/json"},
        {"content-type": "application/json", "origin": "http://evil.example"},
        {"content-type": "application/json", "origin": "null"},
        {"x-requested-with": "x", "origin": "https://127.0.0.1.evil.example"},
    )  # fmt: skip
    before = dump(store)
    with api_server(store) as client, httpx.Client(base_url=client.base_url, trust_env=False) as site:
        for method, path in changing:
            for headers in kinds:
                response = site.request(method, path, headers=headers, content=b'{"all": true}')
                refused(response, 403, "cross_site")
                assert "access-control-allow-origin" not in response.headers
            question = {"origin": "http://evil.example", "access-control-request-method": method}
            asked = site.options(path, headers=question)
            assert not asked.is_success
            assert not [name for name in asked.headers if name.startswith("access-control")]
    assert dump(store) == before


def test_no_foreign_name_reaches_any_route(store: Store, changing: list[tuple[str, str]]) -> None:
    """DNS rebinding: a name of the attacker's that now means this machine."""
    before = dump(store)
    with api_server(store) as client:
        for method, path in {*changing, *routes(store)}:
            for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]"):
                refused(client.request(method, path, headers={"host": host}, json={}), 403, "foreign_host")
    assert dump(store) == before


def test_without_the_token_only_the_open_paths_answer(
    api: httpx.Client, store: Store, changing: list[tuple[str, str]]
) -> None:
    before = dump(store)
    with httpx.Client(base_url=api.base_url, trust_env=False) as stranger:
        for method, path in {*changing, *routes(store)}:
            response = stranger.request(method, path, json={"all": True})
            assert response.is_success == (path in OPEN_PATHS), path
            for given in ("Bearer x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", f"Bearer {TOKEN.upper()}"):
                headers = {"authorization": given, "cookie": f"token={TOKEN}", "x-token": TOKEN}
                asked = stranger.request(method, f"{path}?token={TOKEN}", headers=headers, json={})
                assert asked.is_success == (path in OPEN_PATHS), path
    assert dump(store) == before


def test_every_answer_has_the_headers_and_is_no_page_by_chance(
    api: httpx.Client, store: Store, tasks: dict[str, str]
) -> None:
    methods = ("GET", "HEAD", "PUT", "PATCH", "OPTIONS", "TRACE")
    for path in {path.replace("{task}", tasks["dead"]) for _, path in routes(store)} | {"/", f"/{HOSTILE!r}"}:
        for method in methods:
            response = api.request(method, path)
            assert response.status_code < 500, (method, path)
            policy = response.headers["content-security-policy"]
            assert "unsafe" not in policy
            assert "default-src 'none'" in policy or "default-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["x-frame-options"] == "DENY"
            kind = response.headers.get("content-type", "")
            if kind.startswith("text/html"):  # a page: what is hostile in the path is escaped there, or not there
                assert "<script>alert" not in response.text


# What others wrote into Redis


MANGLED: tuple[bytes, ...] = (
    b"", b"\xff\xfe\x00", b"{", b"[1, 2]", b"null", b'"text"', b"NaN", b"-1", b"1e999", b"9" * 5000, b"0x10",
    b'{"at": "x", "started": [], "attempt": {}, "status": "x", "headers": 3, "endpoint": {}}', HOSTILE.encode(),
    b'{"status": [], "headers": {"content-type": 5}, "endpoint": 7, "started": "x"}', b"[" * 5000,
)  # fmt: skip


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[io.StringIO]:
    """Headrace's log as text."""
    stream = io.StringIO()
    handler = logs.set_up("debug", "text", stream)
    yield stream
    logging.getLogger().removeHandler(handler)


def test_a_mangled_task_is_shown_and_stops_nobody(
    api: httpx.Client, store: Store, broker: Broker, tasks: dict[str, str], said: io.StringIO
) -> None:
    turn = itertools.cycle(MANGLED)  # not every value in every field: tests/pure/test_fields.py has them all
    for state in ("dead", "ok", "queued"):
        key = store.keys.job(tasks[state])
        whole: dict[Any, Any] = store.redis.hgetall(key)
        fields = {*whole, *b"x_hist x_ans x_why ended_at x_dl exc_info x_ttl x_req x_excl".split()}
        for field in sorted(fields):
            for value in itertools.islice(turn, 2):
                store.redis.hset(key, field, value)
                for path in (
                    f"/api/tasks/{tasks[state]}?payload=true", f"/api/tasks/{tasks[state]}/explain",
                    f"/api/pools/{POOL}/dead/{tasks[state]}", f"/api/pools/{POOL}/dead",
                ):  # fmt: skip
                    response = api.get(path)
                    assert response.status_code in (200, 404), (field, value[:50], path, response.text)
                    json.loads(response.text)
                if state != "queued":
                    with suppress(HeadraceError):
                        broker.task(POOL, tasks[state]).result(timeout=0.01, raise_on_failure=False)
            store.redis.hset(key, field, whole.get(field, b""))
            if field not in whole:
                store.redis.hdel(key, field)
    assert "\x1b" not in said.getvalue()


def test_a_key_of_another_type_is_as_none_and_stops_nobody(
    api: httpx.Client, store: Store, broker: Broker, tasks: dict[str, str]
) -> None:
    """Of a task: it alone is gone. Of a pool or an endpoint: what it held is unset."""
    kept = {"dead": [tasks["dead"]], "waiting": 1}

    def looked_at() -> dict[str, Any]:
        for path in (f"/api/pools/{POOL}/stats", "/api/pools", "/metrics", f"/api/pools/{POOL}/endpoints", "/readyz"):
            response = api.get(path)
            assert response.status_code == 200, (path, response.text)
        letters = admin.dead_list(store, POOL).letters
        return {"dead": [each.id for each in letters], "waiting": admin.status(store, POOL).backlog}

    assert looked_at() == kept
    for name in sorted(store.redis.keys("*")):
        whole, kind = cast(bytes, store.redis.dump(name)), store.redis.type(name)
        store.redis.delete(name)
        if kind == b"string":
            store.redis.rpush(name, "another type")
        else:
            store.redis.set(name, "another type")
        found = looked_at()
        task = next((state for state in tasks if store.keys.job(tasks[state]).encode() == name), None)
        if task is not None:
            assert found["dead"] == ([] if task == "dead" else kept["dead"])
            for path in (f"/api/tasks/{tasks[task]}", f"/api/tasks/{tasks[task]}/explain"):
                response = api.get(path)
                assert response.status_code == 404, (task, path, response.text)
            with pytest.raises(UnknownTask):
                broker.task(POOL, tasks[task]).status()
            with pytest.raises(UnknownTask, match="delete rq:job:"):
                admin.task_show(store, tasks[task])
            assert admin.cancel(store, [tasks[task]]).unknown == 1
        store.redis.delete(name)
        store.redis.restore(name, 0, whole)


def test_mangled_pools_and_endpoints_stop_nobody(api: httpx.Client, store: Store, tasks: dict[str, str]) -> None:
    """Nor do they become metrics of their own, or lines of the log."""
    names = (HOSTILE, 'x"} 1\nheadrace_evil 1\n', "a" * 5000, "../..", "")
    for name in names:
        store.redis.sadd(store.keys.pools(), name)
        store.redis.sadd(store.keys.endpoints(POOL), name)
    store.redis.sadd(store.keys.pools(), b"\xff\xfe")
    turn = itertools.cycle(MANGLED)
    for key in (store.keys.pool(POOL), store.keys.endpoint(POOL, "vm1")):
        whole: dict[Any, Any] = store.redis.hgetall(key)
        for field in sorted(whole):
            for value in itertools.islice(turn, 2):
                store.redis.hset(key, field, value)
                for path in (f"/api/pools/{POOL}/stats", "/metrics", "/api/npu/pool/workers"):
                    response = api.get(path)
                    assert response.status_code == 200, (field, value[:50], path, response.text)
            store.redis.hset(key, field, whole[field])
    families = {family.name for family in text_string_to_metric_families(api.get("/metrics").text)}
    assert all(name.startswith("headrace_") for name in families)
    assert "headrace_evil" not in families
