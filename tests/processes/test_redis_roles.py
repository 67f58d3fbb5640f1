"""Redis users by role, with the rules of docs/security.md, and Redis over TLS: real servers, real processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from broker import AsyncBroker, Broker, Request
from broker.config import Config
from broker.errors import BrokerUnsuitable
from broker.launch import free_port
from broker.store import Store
from tests.support.api import api_server, good, refused
from tests.support.commands import headrace
from tests.support.endpoints import simulated_endpoints
from tests.support.fleet import as_text, fleet, pool_config
from tests.support.rules import documented_rules, set_users
from tests.support.sentinels import SERVICE, Sentinel
from tests.support.servers import Kind, MissingServer, RealServer, redis_server

ASK = Request("POST", "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "hi"}]})


@pytest.fixture(params=["valkey", "redis"])
def server(request: pytest.FixtureRequest) -> Iterator[RealServer]:
    kind: Kind = request.param
    try:
        with redis_server(kind) as running:
            yield running
    except MissingServer as error:
        pytest.skip(str(error))


def denials(server: RealServer) -> list[str]:
    """What the server refused anybody since the last ACL LOG RESET: user, why, what."""
    rows: list[dict[Any, Any]] = redis.Redis.from_url(server.url).acl_log()
    text = [{as_text(name): value for name, value in row.items()} for row in rows]
    told = [f"{as_text(row['username'])}: {as_text(row['reason'])} {as_text(row['object'])}" for row in text]
    return [line for line in told if "client|setinfo" not in line]  # redis-py's name, which servers before 7.2 lack


def test_each_role_can_do_its_work(tmp_path: Path, server: RealServer) -> None:
    """Enqueue of every kind, retries, results, housekeeping, redrive; and nothing is refused on the way."""
    urls = set_users(server)
    with simulated_endpoints(2) as (first, second), Broker(urls["producer"]) as broker:
        pool = pool_config([first.url, second.url], retry={"max_attempts": 2, "backoff": {"initial": "10ms"}})
        pool["endpoints"][0]["capabilities"] = ["vision"]
        with fleet(tmp_path, urls["worker"], {"llm": pool}, 2):
            tasks = broker.enqueue_many("llm", [ASK] * 20)
            assert all(task.result(timeout=30).ok for task in tasks)
            vision = broker.enqueue("llm", ASK, requires=("vision",), priority="high", idempotency_key="k", delay=0.1)
            assert vision.result(timeout=30).endpoint == "e0"
            assert len(list(broker.map("llm", [ASK] * 10))) == 10
            for sample in (first, second):
                sample.control(mode="status", status=503, fail_first=2)
            dead = broker.enqueue("llm", ASK, max_attempts=1, deadline=60)
            assert dead.result(timeout=30, raise_on_failure=False).outcome == "dead"
            waiting = broker.enqueue("llm", ASK, requires=("nothing-has-it",))
            assert waiting.cancel()
            look(tmp_path, urls["viewer"], dead.id)
        assert broker.discard("llm", [task.id for task in tasks]) == 20
    assert denials(server) == []


def look(folder: Path, url: str, task: str) -> None:
    for words in ("status", f"task explain {task}", "dead list"):
        done = headrace(*words.split(), "--redis", url, "--json", cwd=folder)
        assert done.returncode == 0, (words, done.stderr)
        json.loads(done.stdout)


def test_a_viewer_sees_all_and_changes_nothing(server: RealServer) -> None:
    urls = set_users(server)
    with Broker(server.url) as broker:
        task = broker.enqueue("llm", ASK)
    store = Store(urls["viewer"])
    with api_server(store, Config()) as api:
        assert good(api.get("/readyz"))
        assert good(api.get(f"/api/tasks/{task.id}?payload=true"))["payload"]
        for path in ("/api/pools", "/metrics"):
            assert api.get(path).is_success
        assert denials(server) == []
        message = refused(api.post(f"/api/tasks/{task.id}/cancel"), 503, "redis_unsuitable")
        assert "docs/security.md" in message
    with Broker(urls["viewer"]) as broker, pytest.raises(BrokerUnsuitable, match="permission"):
        broker.enqueue("llm", ASK)
    client: Any = redis.Redis.from_url(urls["viewer"])
    for words in (
        ("SET", "rq:x:new", 1), ("DEL", f"rq:job:{task.id}"), ("FLUSHALL",), ("KEYS", "*"), ("SCAN", 0),
        ("GET", "other"), ("CONFIG", "GET", "*"), ("EVAL", "return 1", 0), ("PUBLISH", "c", "m"),
    ):  # fmt: skip
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*words)
    assert Store(server.url).raw(lambda each: each.hget(f"rq:job:{task.id}", "status")) == b"queued"
    store.close()


def test_a_producer_reaches_neither_other_keys_nor_endpoints(server: RealServer) -> None:
    urls = set_users(server)
    admin = redis.Redis.from_url(server.url)
    admin.set("other", "secret")
    client: Any = redis.Redis.from_url(urls["producer"])
    endpoint = json.dumps({"url": "http://evil.example"})
    for words in (
        ("GET", "other"), ("SET", "other", 1), ("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("SCAN", 0),
        ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"), ("SCRIPT", "FLUSH"), ("ACL", "LIST"), ("MONITOR",),
        ("CLIENT", "KILL", "TYPE", "normal"), ("SHUTDOWN",), ("REPLICAOF", "evil.example", 1),
        ("HSET", "rq:x:registered:llm", "evil", endpoint), ("HSET", "rq:x:endpoint:llm:e0", "breaker", "open"),
        ("COPY", "other", "rq:job:x"), ("RENAME", "rq:job:x", "other"), ("PUBLISH", "c", "m"),
    ):  # fmt: skip
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*words)
    for script in ("return redis.call('GET', 'other')", "return redis.call('FLUSHALL')"):
        with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permission|ACL|can't (access|run)"):
            client.eval(script, 0)
    assert admin.get("other") == b"secret"


def test_doctor_tells_a_role_what_it_may(tmp_path: Path, server: RealServer) -> None:
    urls = set_users(server)
    told = {
        "worker": "rights: look, enqueue and serve",
        "producer": "may look and enqueue, but not serve",
        "viewer": "may look, but not enqueue or serve",
    }
    for role, words in told.items():
        done = headrace("doctor", "--redis", urls[role], cwd=tmp_path)
        assert done.returncode == 0, done.stdout
        assert words in done.stdout
    assert set(told) | {"default"} == set(documented_rules())


def test_a_worker_with_a_producers_rights_is_told_what_to_do(tmp_path: Path, server: RealServer) -> None:
    """It is a script that is refused, by the keys it uses, in the server's words for scripts."""
    url = set_users(server)["producer"]
    done = headrace("worker", "--endpoint", "http://127.0.0.1:1", "--redis", url, cwd=tmp_path)
    assert done.returncode == 4
    (told,) = [line for line in done.stderr.splitlines() if "refuses us" in line]
    assert told.endswith("; give its user the rules of its role, as in docs/security.md")
    assert "script:" not in told


# TLS


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server's certificate and key of it (ca.pem, server.pem, server.key); a stranger (other.pem)."""
    folder = tmp_path_factory.mktemp("tls")
    new = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    for command in (
        f"req -x509 {new} -days 2 -subj /CN=ca -keyout ca.key -out ca.pem",
        f"req -x509 {new} -days 2 -subj /CN=other -keyout other.key -out other.pem",
        f"req -x509 {new} -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost "
        "-CA ca.pem -CAkey ca.key -addext basicConstraints=critical,CA:FALSE -keyout server.key -out server.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder


def with_tls(keys: Path) -> dict[str, str]:
    files = {"tls-cert-file": "server.pem", "tls-key-file": "server.key", "tls-ca-cert-file": "ca.pem"}
    return {"tls-auth-clients": "no", **{name: str(keys / file) for name, file in files.items()}}


@pytest.fixture(scope="module")
def tls_server(keys: Path) -> Iterator[RealServer]:
    port = free_port()
    try:
        with redis_server("redis", {**with_tls(keys), "port": "0", "tls-port": str(port)}, port=port) as running:
            yield running
    except (MissingServer, RuntimeError) as error:  # there is none, or it was built without TLS
        pytest.skip(f"no server with TLS: {str(error).splitlines()[0]}")


def test_redis_over_tls(tmp_path: Path, tls_server: RealServer, keys: Path) -> None:
    """Commands, processes and the API alike: all connect by the one URL."""
    url = f"rediss://localhost:{tls_server.port}/0?ssl_ca_certs={keys / 'ca.pem'}"
    with simulated_endpoints(1) as (sample,), Broker(url) as broker:
        with fleet(tmp_path, url, {"llm": pool_config([sample.url])}):
            assert broker.enqueue("llm", ASK).result(timeout=30).ok
    store = Store(url)
    with api_server(store, Config()) as api:
        assert good(api.get("/readyz"))
    store.close()
    assert headrace("status", "--redis", url, cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("host", "ca"),
    [("localhost", "other.pem"), ("localhost", None), ("127.0.0.1", "ca.pem")],
    ids=["another-authority", "unknown-authority", "another-name"],
)
def test_a_certificate_that_is_not_known_is_refused_in_one_line(
    tmp_path: Path, tls_server: RealServer, keys: Path, host: str, ca: str | None
) -> None:
    query = f"?ssl_ca_certs={keys / ca}" if ca else ""
    done = headrace("status", "--redis", f"rediss://{host}:{tls_server.port}/0{query}", cwd=tmp_path)
    assert done.returncode == 4
    assert "certificate" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def tls_sentinel(tls_server: RealServer, keys: Path) -> Iterator[int]:
    """The port of one that speaks TLS alone, also to the server that it watches."""
    port = free_port()
    config = {**with_tls(keys), "tls-replication": "yes", "port": "0", "tls-port": str(port)}
    settings = "".join(f"{name} {value}\n" for name, value in config.items())
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        watches = f"sentinel monitor {SERVICE} 127.0.0.1 {tls_server.port} 1\n"
        sentinel = Sentinel(Path(folder) / "sentinel", settings + watches)
        try:
            sentinel.start()
            yield port
        finally:
            sentinel.kill()


def test_sentinels_over_tls(tls_sentinel: int, tls_server: RealServer, keys: Path) -> None:
    """They name the primary by its number, which is not in its certificate."""
    options = f"ssl_ca_certs={keys / 'ca.pem'}&ssl_check_hostname=false"
    url = f"rediss+sentinel://localhost:{tls_sentinel}/{SERVICE}/0?{options}"
    with Broker(url) as broker:
        task = broker.enqueue("llm", ASK)

    async def under_asyncio() -> str:
        async with AsyncBroker(url) as own:
            return (await own.enqueue("llm", ASK)).id

    ids = [task.id, asyncio.run(under_asyncio())]
    assert [tls_server.command("EXISTS", f"rq:job:{each}") for each in ids] == [1, 1]


def test_a_sentinel_whose_certificate_is_not_known_is_refused_in_one_line(
    tmp_path: Path, tls_sentinel: int, keys: Path
) -> None:
    for query in (f"ssl_ca_certs={keys / 'other.pem'}", "ssl_check_hostname=false"):
        url = f"rediss+sentinel://localhost:{tls_sentinel}/{SERVICE}/0?{query}"
        done = headrace("status", "--redis", url, cwd=tmp_path)
        assert done.returncode == 4
        assert "certificate" in done.stderr
        assert len(done.stderr.splitlines()) == 1
