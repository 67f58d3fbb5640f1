"""Secrets planted in a configuration are in nothing that people or machines get to see: every channel, in one place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from tests.support.commands import PATIENCE_S, headrace, read_until, started, write_batch
from tests.support.servers import RealServer, redis_server
from tests.support.upstream import upstream_server

pytestmark = pytest.mark.e2e

SECRETS = {
    "REDIS_PW": "planted-redis-password", "KEY": "planted-api-key", "HEADER": "planted-header-value",
    "HMAC": "planted-hmac-secret", "TOKEN": "planted-api-token",
}  # fmt: skip


def leaked(text: str | bytes) -> list[str]:
    text = text if isinstance(text, bytes) else text.encode()
    return [name for name, secret in SECRETS.items() if secret.encode() in text]


def configuration(folder: Path, server: RealServer, url: str, form: str) -> dict[str, str]:
    """Two of the secrets stand in the file, as references, or only in the environment; which is returned."""
    endpoint = {"url": url, "api_key": "${KEY}", "hmac_secret": "${HMAC}", "headers": {"X-Api-Key": "${HEADER}"}}
    endpoints = [{"id": "e", **endpoint}, {"id": "gone", **endpoint, "url": "http://127.0.0.1:1"}]
    told: dict[str, Any] = {
        "redis": {"url": server.url, "password": "${REDIS_PW}"},
        "api": {"token": "${TOKEN}", "port": 0},
        "log": {"level": "debug", "format": form},
        "pools": {"llm": {"endpoints": endpoints, "retry": {"max_attempts": 2, "backoff": {"initial": "10ms"}}}},
    }
    env = {**SECRETS, "HEADRACE_CONFIG": "headrace.yaml"}
    if form == "json":
        del told["redis"]["password"], told["api"]["token"]
        env |= {"HEADRACE_REDIS_PASSWORD": env.pop("REDIS_PW"), "HEADRACE_API_TOKEN": env.pop("TOKEN")}
    (folder / "headrace.yaml").write_text(json.dumps(told))
    return env


def children(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += children(int(child))
    return found


def everything(server: RealServer) -> bytes:
    """All that Redis holds, as it is saved."""
    assert Redis.from_url(server.url, password=SECRETS["REDIS_PW"]).save()
    return (server.folder / "dump.rdb").read_bytes()


VERBS = (
    "config show", "config show --origins", "config show --json", "config check", "doctor", "doctor --json", "status",
    "status --json", "endpoint list", "endpoint list --json", "dead list", "dead list --json",
    "run in.jsonl -o out.jsonl",
    "run in.jsonl -o other.jsonl --no-workers --redis redis://:wrong@127.0.0.1:1/0", "-v status --redis nonsense",
    "enqueue llm --json {} --path /400 --wait",
    "enqueue llm --json {} --path /echo --wait", "enqueue llm --json {} --path /400/echo --wait",
    "endpoint drain nobody", "task show nobody", "worker --burst",
)  # fmt: skip
BRIEFLY = [words for words in VERBS if words.startswith(("doctor", "dead", "run in.jsonl -o out", "enqueue"))]


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_secret_is_in_anything_that_is_shown_or_kept(tmp_path: Path, form: str) -> None:
    write_batch(tmp_path / "in.jsonl", 3)
    with redis_server("valkey", {"rdbcompression": "no"}) as server, upstream_server() as upstream:
        env = configuration(tmp_path, server, upstream.url, form)
        server.command("CONFIG", "SET", "requirepass", SECRETS["REDIS_PW"])
        seen: dict[str, str] = {}
        worker_words, serve_words = ("worker", "-vv"), ("serve", "-vv")
        with (
            started(*worker_words, cwd=tmp_path, env=env) as worker,
            started(*serve_words, cwd=tmp_path, env=env) as serve,
        ):
            assert serve.stdout is not None
            read_until(worker, "process")
            address = ""
            while "listening on" not in address:
                address = serve.stdout.readline()
            address = address.split("listening on ")[1].split(",")[0].strip()
            for words in VERBS if form == "text" else BRIEFLY:
                done = headrace(*words.split(), "-v", cwd=tmp_path, env=env)
                seen[words] = done.stdout + done.stderr
            with httpx.Client(base_url=address, trust_env=False) as stranger:
                headers = {"authorization": f"Bearer {SECRETS['TOKEN']}"}
                described = stranger.get("/openapi.json").json()["paths"]
                for path, methods in described.items():
                    filled = path.replace("{pool}", "llm").replace("{endpoint}", "e").replace("{task}", "nobody")
                    for method in methods:
                        for given in (headers, {}, {"authorization": f"Bearer {SECRETS['KEY']}x"}):
                            answer = stranger.request(method, filled, headers=given, json={})
                            seen[f"{method} {filled}"] = f"{answer.headers}{answer.text}"
                seen["metrics"] = stranger.get("/metrics", headers=headers).text
            assert "headrace_tasks" in seen["metrics"]
            for pid in {*children(worker.pid), *children(serve.pid)}:
                seen[f"command line {pid}"] = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            assert len(children(worker.pid)) > 1
            worker.terminate()
            serve.terminate()
            seen["worker"] = "".join(worker.communicate(timeout=PATIENCE_S))
            seen["serve"] = "".join(serve.communicate(timeout=PATIENCE_S))
        kept = everything(server)
        assert b"rq:job:" in kept
        assert leaked(kept) == []
        assert b"Bearer ***" in kept  # of an endpoint that gives back what it was sent
    assert upstream.seen[-1].headers["authorization"] == f"Bearer {SECRETS['KEY']}"  # it is used, and not shown
    assert {where: names for where, text in seen.items() if (names := leaked(text))} == {}
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert leaked(path.read_bytes()) == [], path
    if form == "text":
        assert "***" in seen["config show"]


def test_failures_tell_no_secret_with_the_traceback_neither(tmp_path: Path) -> None:
    """`-v` shows tracebacks: of a server that is away, a password that is wrong, a file that is broken."""
    wrong = "redis://user:planted-redis-password@127.0.0.1:1/0"
    (tmp_path / "broken.yaml").write_text("redis: {url: 'redis://u:planted-redis-password@h:port'}\npools: [\n")
    (tmp_path / "unknown.yaml").write_text("api: {token: '${TOKEN}', tokn: '${TOKEN}'}\nprocesses: ${KEY}\n")
    with redis_server("valkey") as server:
        server.command("CONFIG", "SET", "requirepass", "other")
        refused = server.url.replace("://", "://:planted-redis-password@")
        for words in (
            f"status --redis {wrong}", f"status --redis {refused}",
            f"worker --endpoint http://127.0.0.1:1 --redis {refused}",
            f"serve --port 0 --redis {refused}", f"enqueue llm --json {{}} --redis {refused}", "status -c broken.yaml",
            "status -c unknown.yaml", f"status --redis {wrong}?decode_responses=1", f"doctor --redis {refused}",
        ):  # fmt: skip
            for verbose in ((), ("-v",)):
                done = headrace(*words.split(), *verbose, cwd=tmp_path, env=dict(SECRETS))
                assert done.returncode in (3, 4), (words, done.stderr)
                assert leaked(done.stdout + done.stderr) == [], (words, done.stderr)


def test_other_users_cannot_read_the_data_folder(tmp_path: Path) -> None:
    """The embedded server's: its socket and files hold every task."""
    write_batch(tmp_path / "in.jsonl", 1)
    assert headrace("enqueue", "llm", "--json", "{}", cwd=tmp_path).returncode == 0
    folder = tmp_path / ".headrace"
    assert folder.stat().st_mode & 0o077 == 0
    assert os.listdir(folder)
