"""`headrace doctor`, and the verbs that must refuse at their start what it warns of: each one line, with what to do."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import environment, headrace, write_batch
from tests.support.endpoints import SimulatedEndpoint
from tests.support.servers import redis_server
from tests.support.standin import stand_in
from tests.support.upstream import upstream_server

pytestmark = pytest.mark.e2e

STARTING = (
    "run in.jsonl -o out.jsonl --endpoint http://127.0.0.1:1",
    "worker --endpoint http://127.0.0.1:1",
    "serve --port 0",
    "enqueue llm --json {}",
)


def findings(folder: Path, *words: str, code: int = 0, **env: str) -> dict[str, tuple[str, str]]:
    """Result and text by what was looked at. Every one is a line."""
    done = headrace("doctor", "--json", *words, cwd=folder, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr == ""
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert all("\n" not in each["text"] for each in found)
    return {each["what"]: (each["result"], each["text"]) for each in found}


@pytest.fixture(scope="module")
def unsuitable() -> Iterator[dict[str, tuple[str, str]]]:
    """Redis servers that must not be used: URL, and what is said of each."""
    with ExitStack() as stack:
        evicting = stack.enter_context(redis_server("valkey", {"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"}))
        replica = stack.enter_context(redis_server("valkey", {"replicaof": f"127.0.0.1 {evicting.port}"}))
        old = stack.enter_context(stand_in("redis_version:6.2.14", "role:master", "maxmemory_policy:noeviction"))
        older = stack.enter_context(stand_in("redis_version:5.0.14", "role:master"))
        yield {
            "evicting": (evicting.url, "maxmemory-policy is allkeys-lru: it would drop tasks; set it to noeviction"),
            "replica": (replica.url, "it is a replica; give the address of the primary"),
            "too-old": (old, "version 6.2.14 is too old; use Redis 7.0 or newer, or Valkey"),
            "much-too-old": (older, "too old; use Redis 7.0 or newer, or Valkey"),
        }


@pytest.mark.parametrize("case", ["evicting", "replica", "too-old", "much-too-old"])
def test_a_server_that_would_lose_tasks_is_refused_by_name_of_the_setting(
    tmp_path: Path, unsuitable: dict[str, tuple[str, str]], case: str
) -> None:
    url, told = unsuitable[case]
    write_batch(tmp_path / "in.jsonl", 1)
    result, text = findings(tmp_path, "--redis", url, code=4)["Redis"]
    assert result == "failed"
    assert told in text
    for words in STARTING:
        done = headrace(*words.split(), "--redis", url, cwd=tmp_path)
        assert done.returncode == 4, (words, done.stderr)
        assert told in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_text()


def test_a_url_that_sets_what_is_ours_to_set_is_refused(tmp_path: Path, redis_url: str) -> None:
    write_batch(tmp_path / "in.jsonl", 1)
    for option in ("decode_responses=1", "socket_timeout=1", "retry_on_timeout=1", "ssl_password=hunter2"):
        name = option.partition("=")[0]
        url = f"{redis_url}?{option}"
        result, text = findings(tmp_path, "--redis", url, code=3)["configuration"]
        assert (result, f"must not set {name}" in text) == ("failed", True), text
        assert "hunter2" not in text
    for words in STARTING:
        done = headrace(*words.split(), "--redis", f"{redis_url}?decode_responses=1", cwd=tmp_path)
        assert done.returncode == 3, (words, done.stderr)
        assert "redis.url: must not set decode_responses" in done.stderr
        assert "Traceback" not in done.stderr


def test_what_costs_tasks_later_is_a_warning(tmp_path: Path) -> None:
    with redis_server("valkey", {"maxmemory": "20mb", "maxmemory-policy": "noeviction"}) as server:
        found = findings(tmp_path, "--redis", server.url)
    assert found["Redis"][0] == "ok"
    assert found["persistence"] == ("warning", "appendonly is off: a restart of Redis loses tasks; set it to yes")
    assert found["memory"][0] == "warning"
    assert "raise maxmemory" in found["memory"][1]
    assert found["rights"] == ("ok", "look, enqueue and serve")
    with redis_server("valkey", {"appendonly": "yes"}) as server:
        found = findings(tmp_path, "--redis", server.url)
    assert not {"persistence", "memory"} & set(found)


USERS = {
    "blind": ("on >pw ~rq:* -@all +ping +hello", "failed", "may not even look"),
    "viewer": ("on >pw %R~rq:* +@all -flushall", "warning", "may look, but not enqueue or serve"),
    "half": ("on >pw ~rq:* +@all -blmove", "warning", "may look and enqueue, but not serve"),
    "other-keys": ("on >pw ~other:* +@all", "failed", "may not even look"),
}


def test_rights_that_lack_are_named(tmp_path: Path) -> None:
    with redis_server("valkey") as server:
        for name, (rules, result, told) in USERS.items():
            assert server.command("ACL", "SETUSER", name, *rules.split()) == b"OK"
            url = server.url.replace("://", f"://{name}:pw@")
            before = server.command("DBSIZE")
            done = findings(tmp_path, "--redis", url, code=4 if result == "failed" else 0)
            said = done.get("rights") or done["Redis"]
            assert said[0] == result, name
            assert told in said[1] or "permission" in said[1].lower(), said
            assert "docs/security.md" in said[1]
            assert server.command("DBSIZE") == before == 0  # asked, not done


def test_endpoints_are_asked_as_workers_ask_them(tmp_path: Path, redis_url: str) -> None:
    """Reachable or not, the wrong key, a wrong path, a redirect: which, where, what to do; the key goes along."""
    with upstream_server() as upstream, SimulatedEndpoint() as sample:
        ids = {
            "good": {"url": sample.url, "api_key": "${KEY}"},
            "gone": {"url": "http://127.0.0.1:1"},
            "locked": {"url": f"{upstream.url}/401", "api_key": "${KEY}"},
            "moved": {"url": f"{upstream.url}/307", "api_key": "${KEY}"},
            "wrong-path": {"url": f"{upstream.url}/404/v1"},
            "busy": {"url": f"{upstream.url}/503"},
        }
        endpoints = [{"id": name, **values} for name, values in ids.items()]
        pools = {"llm": {"endpoints": endpoints}, "dark": {"endpoints": [{"id": "dark", "url": "http://127.0.0.1:2"}]}}
        (tmp_path / "h.yaml").write_text(yaml.safe_dump({"redis": {"url": redis_url}, "pools": pools}))
        found = findings(tmp_path, "-c", "h.yaml", code=1, KEY="planted")
        keys = {seen.path: seen.headers.get("authorization") for seen in upstream.seen}
    assert found["endpoint good"][0] == "ok"
    for name, result, told in (
        ("gone", "warning", "does not answer: connect"),
        ("locked", "failed", "answers 401 to GET /health: it refuses our key; check api_key"),
        ("moved", "warning", "redirects are not followed; correct the endpoint's url"),
        ("wrong-path", "warning", "answers 404 to GET /health: is that path, or the one in the endpoint's url, right?"),
        ("busy", "warning", "answers 503"),
        ("dark", "warning", "does not answer"),
    ):
        assert found[f"endpoint {name}"][0] == result, found[f"endpoint {name}"]
        assert told in found[f"endpoint {name}"][1]
    assert found["pool dark"][0] == "failed"
    assert "pool llm" not in found
    assert keys["/401/health"] == "Bearer planted"
    assert keys["/404/v1/health"] is None
    assert "planted" not in str(found)


def test_a_key_that_only_the_work_needs_is_tried_too(tmp_path: Path, redis_url: str) -> None:
    """`GET /health` is open to all on most servers: /v1/models tells whether the key is good."""
    with SimulatedEndpoint() as sample:
        sample.control(api_key="right")
        for key, result in (("right", "ok"), ("wrong", "failed")):
            pool = {"endpoints": [{"id": "e", "url": sample.url, "api_key": "${KEY}"}]}
            (tmp_path / "h.yaml").write_text(yaml.safe_dump({"redis": {"url": redis_url}, "pools": {"llm": pool}}))
            found = findings(tmp_path, "-c", "h.yaml", code=0 if result == "ok" else 1, KEY=key)
            assert found["endpoint e"][0] == result, found["endpoint e"]


def test_a_port_in_use(tmp_path: Path, redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "h.yaml").write_text(yaml.safe_dump({"redis": {"url": redis_url}, "api": {"port": port}}))
        result, text = findings(tmp_path, "-c", "h.yaml")["api"]
    assert result == "warning"
    assert f"port {port}: Address already in use" in text
    assert findings(tmp_path, "-c", "h.yaml")["api"][0] == "ok"


def test_packages_out_of_range_are_named(tmp_path: Path, redis_url: str) -> None:
    """As pip leaves them when another program downgrades what we need."""
    stale = tmp_path / "site"
    for name, version in (("redis", "4.6.0"), ("tenacity", "10.0.0")):
        info = stale / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = f"{stale}:{environment()['PYTHONPATH']}"
    done = headrace("doctor", "--redis", redis_url, cwd=tmp_path, env={"PYTHONPATH": path})
    assert done.returncode == 1
    assert "failed   packages: redis 4.6.0: headrace needs !=6.0.0,<9,>=5.1; pip install " in done.stdout
    assert "failed   packages: tenacity 10.0.0: headrace needs <10,>=9" in done.stdout


def test_a_password_in_clear_over_a_network_is_a_warning(tmp_path: Path) -> None:
    with redis_server("valkey") as server:
        server.command("CONFIG", "SET", "requirepass", "pw1")
        found = findings(tmp_path, "--redis", server.url.replace("://", "://:pw1@"))
        assert "way to Redis" not in found  # this machine's own
    url = "redis://:pw1@redis.invalid:6379/0"
    found = findings(tmp_path, "--redis", url, code=4)
    assert found["Redis"][0] == "failed"
    assert found["way to Redis"][0] == "warning"
    assert "rediss://" in found["way to Redis"][1]
    assert "pw1" not in str(found)
