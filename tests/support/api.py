"""The management API on a real socket, served by uvicorn in a thread of the test's process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from broker import Broker, Request
from broker.catalog import Catalog
from broker.config import Config, load_config
from broker.scripts import Claimed, Retry
from broker.secret import Secret
from broker.store import Store
from broker.web.app import ANSWER_WITHIN_S, make_app
from tests.support.player import claim, echo, refuse, settle

POOL = "npu"
FILE = {
    "pools": {
        "npu": {
            "adapter": "npu",
            "endpoints": [
                {"id": "vm1", "url": "http://127.0.0.1:9001/", "priority": 10, "labels": {"room": "b2"}},
                {"id": "vm2", "url": "http://127.0.0.1:9002", "enabled": False},
            ],
        }
    }
}
TOKEN = "s3cret-token"


@contextmanager
def api_server(
    store: Store, config: Config | None = None, *, token: str | None = None, within: float = ANSWER_WITHIN_S
) -> Iterator[httpx.Client]:
    """A client of a running server. With a token it sends it; without one it sends JSON, as a browser's form cannot.

    The server reads the configuration's file again when it changes.
    """
    config = config or Config()
    catalog = Catalog(config, lambda: load_config(config.source, {}))
    app = make_app(store, catalog, Secret(token) if token else None, within=within)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    headers = {"authorization": f"Bearer {token}"} if token else {"x-requested-with": "tests"}
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=20, trust_env=False) as client:
            _until_it_answers(client)
            yield client
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


def _until_it_answers(client: httpx.Client) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            client.get("/livez")
        except httpx.TransportError:
            time.sleep(0.01)
        else:
            return
    raise AssertionError("the server did not start within 10 s")


def ask(n: object = 1) -> Request:
    return Request("POST", "/inference", json={"n": n})


def good(response: httpx.Response, status: int = 200) -> Any:
    assert response.status_code == status, response.text
    return response.json()


def refused(response: httpx.Response, status: int, code: str) -> str:
    """The message, which is one line."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert error["code"] == code
    assert error["message"]
    assert "\n" not in error["message"]
    return str(error["message"])


def rows() -> list[tuple[str, int, int, bool, tuple[str, ...]]]:
    return [("vm1", 10, 4, True, ("llm",)), ("vm2", 5, 4, False, ())]


def in_use(store: Store, broker: Broker) -> dict[str, str]:
    """A pool with a task in every state; ids by state. vm1 has served 1 and failed 2 of 4 slots, 1 is running."""
    store.run(store.scripts.register(POOL, {"max_depth": 50}, rows()))
    tasks = broker.enqueue_many(POOL, [ask(n) for n in range(4)])
    served, dead, failed, running = claim(store, POOL, 4)
    settle(store, POOL, [echo(served), refuse(dead), fail(failed, 60)])
    assert running.lease.endpoint == "vm1"
    waiting = broker.enqueue(POOL, ask(), requires=("vision",))
    canceled = broker.enqueue(POOL, ask())
    assert canceled.cancel()
    found = {"ok": served, "dead": dead, "scheduled": failed, "started": running}
    assert {each.lease.id for each in found.values()} == {task.id for task in tasks}
    return {state: each.lease.id for state, each in found.items()} | {"queued": waiting.id, "canceled": canceled.id}


def fail(claimed: Claimed, delay: float, verdict: Any = "count", pause: float = 0.0) -> Retry:
    return Retry(claimed.lease, delay, verdict, "http_5xx: busy", "{}", pause=pause)


def until(happened: Callable[[], Any], patience: float = 10.0) -> Any:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if found := happened():
            return found
        time.sleep(0.02)
    raise AssertionError("not in time")


@contextmanager
def supervisor(store: Store, pool: str, *, success: bool, message: str, loaded: int) -> Iterator[None]:
    """Answers reloads, as the supervisor of a pool's workers does."""
    over = threading.Event()
    key = store.keys.pool(pool)

    def loop() -> None:
        while not over.wait(0.02):
            asked = int(store.redis.hget(key, "reload_asked") or 0)
            answer = {"success": success, "message": message, "loaded": loaded, "at": time.time(), "asked": asked}
            if asked:
                store.redis.hset(key, "reload_result", json.dumps(answer))

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5)
