"""Redis refuses whom it served: a password is changed, rules are loaded late. Who runs waits, and nothing is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis

from broker import Broker, Request
from tests.support.fleet import fleet, pool_config, until
from tests.support.servers import redis_server
from tests.support.upstream import upstream_server

TASKS = 6


def password_set(client: Any) -> None:
    client.config_set("requirepass", "new")
    client.client_kill_filter(_type="normal", skipme=True)


def password_taken_back(client: Any) -> None:
    client.config_set("requirepass", "")


def rights_taken(client: Any) -> None:
    client.execute_command("ACL", "SETUSER", "default", "-@all", "+acl")


def rights_given(client: Any) -> None:
    client.execute_command("ACL", "SETUSER", "default", "+@all")


@pytest.mark.parametrize(
    ("refuse", "serve", "said"),
    [(password_set, password_taken_back, "wants a password"), (rights_taken, rights_given, "refuses us")],
    ids=["password", "rights"],
)
def test_what_runs_is_settled_once_redis_serves_again(tmp_path: Path, refuse: Any, serve: Any, said: str) -> None:
    with redis_server() as server, upstream_server() as upstream, Broker(server.url) as broker:
        pool = pool_config([upstream.url], health={"enabled": False})
        with redis.Redis.from_url(server.url) as operator, fleet(tmp_path, server.url, {"llm": pool}, 1) as workers:
            processes = workers.pids
            tasks = broker.enqueue_many("llm", [Request("POST", "/hold", json={"n": n}) for n in range(TASKS)])
            for _ in tasks:
                upstream.arrived.get(timeout=30)
            refuse(operator)
            before = len(workers.log.read_text())
            upstream.release.set()  # the answers come while Redis takes none
            until(lambda: said in workers.log.read_text()[before:], "the worker says what it waits for")
            serve(operator)
            results = [task.result(timeout=30) for task in tasks]
            assert workers.pids == processes
            assert broker.enqueue("llm", Request("POST", "/200", json={})).result(timeout=30).ok
        assert Counter(result.outcome for result in results) == {"ok": TASKS}
        assert len(upstream.seen) == TASKS + 1, "no answer was thrown away"
