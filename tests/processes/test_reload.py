"""The configuration changes while tasks run: all of it is taken or nothing, and what runs finishes where it is."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker import Broker, Request, admin
from tests.support.endpoints import SimulatedEndpoint, simulated_endpoints
from tests.support.fleet import Fleet, done, fleet, logged, pool_config, row, until

CHAT = Request("POST", "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "hi"}]})


def write(running: Fleet, pools: dict[str, Any], processes: int = 1) -> None:
    """The file anew, in one go."""
    settings = {"redis": {"url": running.store.url}, "processes": processes, "pools": pools}
    fresh = running.file.with_suffix(".new")
    fresh.write_text(yaml.safe_dump(settings))
    fresh.replace(running.file)


# What takes effect


def test_more_slots_are_used_at_once_and_what_runs_goes_on(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(1, "--latency", "1500ms") as (endpoint,), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url], slots=2)}) as running:
            pids = running.pids
            tasks = broker.enqueue_many("llm", [CHAT] * 10)
            until(lambda: endpoint.stats()["in_flight"] == 2, "two run")
            write(running, {"llm": pool_config([endpoint.url], slots=8)})
            until(lambda: endpoint.stats()["in_flight"] == 8, "eight run")
            assert done(tasks) == {"ok": 10}
            assert running.pids == pids
            assert "e0 max_concurrent 2 -> 8" in logged(running, "INFO supervisor: configuration file changed")
        stats = endpoint.stats()
    assert stats["max_in_flight"] == 8
    assert set(stats["by_task"].values()) == {1}


def test_fewer_slots_hold_for_new_tasks(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(1, "--latency", "700ms") as (endpoint,), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url], slots=6)}) as running:
            tasks = broker.enqueue_many("llm", [CHAT] * 24)
            until(lambda: endpoint.stats()["in_flight"] == 6, "six run")
            write(running, {"llm": pool_config([endpoint.url], slots=1)})
            logged(running, "e0 max_concurrent 6 -> 1")
            until(lambda: endpoint.stats()["in_flight"] <= 1, "what ran has ended")
            endpoint.control(latency_ms=20)
            seen = {endpoint.stats()["in_flight"] for _ in range(20)}
            assert done(tasks) == {"ok": 24}
    assert max(seen) <= 1


def test_a_changed_url_sends_new_tasks_there_while_old_ones_finish_at_the_old(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(2, "--latency", "3s") as (old, new), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([old.url], slots=4)}) as running:
            first = broker.enqueue_many("llm", [CHAT] * 4)
            until(lambda: old.stats()["in_flight"] == 4, "four run")
            write(running, {"llm": pool_config([new.url], slots=4)})
            logged(running, f"e0 url {old.url} -> {new.url}")
            new.control(latency_ms=10)
            second = broker.enqueue_many("llm", [CHAT] * 8)
            assert done(first) == {"ok": 4}
            assert done(second) == {"ok": 8}
        assert set(old.stats()["by_task"]) == {task.id for task in first}
        assert set(new.stats()["by_task"]) == {task.id for task in second}


def test_a_server_that_moved_is_not_judged_by_the_old_address(tmp_path: Path, redis_url: str) -> None:
    """The old one is dead and its breaker open for a minute: the new one is used at once."""
    with SimulatedEndpoint() as endpoint, Broker(redis_url) as broker:
        dead = pool_config(
            ["http://127.0.0.1:9"], breaker={"failures": 1}, retry={"max_attempts": 10}, health={"enabled": False}
        )
        with fleet(tmp_path, redis_url, {"llm": dead}) as running:
            tasks = broker.enqueue_many("llm", [CHAT] * 4)
            until(lambda: row(running, "e0").get("state") == "open", "its breaker is open")
            write(running, {"llm": {**dead, "endpoints": pool_config([endpoint.url])["endpoints"]}})
            assert done(tasks) == {"ok": 4}


def test_a_disabled_endpoint_finishes_what_runs_and_gets_no_more_until_it_is_enabled(
    tmp_path: Path, redis_url: str
) -> None:
    with simulated_endpoints(2, "--latency", "800ms") as (kept, other), Broker(redis_url) as broker:
        both = pool_config([kept.url, other.url], slots=2)
        one = {"endpoints": [both["endpoints"][0], {**both["endpoints"][1], "enabled": False}]}
        with fleet(tmp_path, redis_url, {"llm": both}) as running:
            tasks = broker.enqueue_many("llm", [CHAT] * 12)
            until(lambda: other.stats()["in_flight"] == 2, "two run on it")
            write(running, {"llm": one})
            logged(running, "endpoint e1 disabled")
            until(lambda: other.stats()["in_flight"] == 0, "they ended")
            hits = other.stats()["hits"]
            assert done(tasks) == {"ok": 12}
            assert other.stats()["hits"] == hits
            write(running, {"llm": both})
            logged(running, "endpoint e1 enabled")
            assert done(broker.enqueue_many("llm", [CHAT] * 4)) == {"ok": 4}
            assert other.stats()["hits"] == hits + 2


def test_a_removed_endpoint_drains_and_is_then_gone(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(2, "--latency", "2s") as (kept, other), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([kept.url, other.url], slots=2)}) as running:
            tasks = broker.enqueue_many("llm", [CHAT] * 4)
            until(lambda: other.stats()["in_flight"] == 2, "two run on it")
            write(running, {"llm": pool_config([kept.url], slots=2)})
            logged(running, "endpoint e1 removed")
            assert row(running, "e1")["gone"] == "1"
            assert other.stats()["in_flight"] == 2
            assert done(tasks) == {"ok": 4}
            until(lambda: not row(running, "e1"), "its record is gone")
            known = running.store.raw(lambda client: client.smembers(running.store.keys.endpoints("llm")))
            assert known == {b"e0"}
            until(lambda: other.stats()["connections"] == 0, "and its connections closed")
        assert other.stats()["hits"] == 2


def test_policies_take_effect(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(1, "--latency", "20s") as (endpoint,), Broker(redis_url) as broker:
        pool = pool_config([endpoint.url])
        with fleet(tmp_path, redis_url, {"llm": pool}) as running:
            write(
                running,
                {
                    "llm": {
                        **pool,
                        "timeout": {"attempt": "200ms"},
                        "retry": {"max_attempts": 1},
                        "breaker": {"failures": 9},
                    }
                },
            )
            line = logged(running, "timeout.attempt 300 -> 0.2")
            assert "retry.max_attempts 3 -> 1" in line
            task = broker.enqueue("llm", CHAT)
            result = until(lambda: task.status() == "dead", "given up at once", 10)
            assert result
            key = running.store.keys.pool("llm")
            told = running.store.raw(lambda client: client.hmget(key, ["failures", "max_attempts"]))
            assert told == [b"9", b"1"]


def test_pools_come_and_go(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(1) as (endpoint,), Broker(redis_url) as broker:
        llm, npu = pool_config([endpoint.url]), pool_config([endpoint.url], adapter="http")
        npu["endpoints"][0]["id"] = "n0"
        with fleet(tmp_path, redis_url, {"llm": llm}) as running:
            write(running, {"llm": llm, "npu": npu})
            logged(running, "pool npu added with n0")
            assert done(broker.enqueue_many("npu", [CHAT] * 3)) == {"ok": 3}
            picky = broker.enqueue("llm", CHAT, requires=["vision"])
            write(running, {"npu": npu})
            logged(running, "1 task waits in pool llm; nobody serves it")
            logged(running, "pool llm removed")
            assert picky.cancel()
            waits = broker.enqueue("llm", CHAT)
            assert done(broker.enqueue_many("npu", [CHAT] * 3)) == {"ok": 3}
            assert waits.status() == "queued"
            until(lambda: not row(running, "e0"), "its endpoint is gone")
            write(running, {"llm": llm, "npu": npu})
            assert done([waits]) == {"ok": 1}


def test_a_pool_that_left_the_file_is_forgotten(tmp_path: Path, redis_url: str) -> None:
    """By the processes that are left, once it holds nothing and nobody was heard of."""
    with simulated_endpoints(1) as (endpoint,), Broker(redis_url) as broker:
        scripts = broker.store.scripts
        broker.store.run_many([scripts.register("old", {}, []), scripts.register("full", {}, [])])
        broker.enqueue("full", CHAT)
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url])}):
            until(lambda: admin.pools(broker.store) == ["full", "llm"], "what is empty and unserved is gone")


@pytest.mark.slow
def test_the_number_of_processes_follows_and_no_task_is_lost_or_sent_twice(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(2, "--latency", "100ms") as endpoints, Broker(redis_url) as broker:
        pool = {"llm": pool_config([each.url for each in endpoints], slots=4)}
        with fleet(tmp_path, redis_url, pool, 1) as running:
            tasks = broker.enqueue_many("llm", [CHAT] * 400)
            for count in (3, 1, 2):
                write(running, pool, count)
                until(lambda count=count: len(running.pids) == count, f"{count} run")
            assert done(tasks) == {"ok": 400}
        by_task = Counter[str]()
        for endpoint in endpoints:
            by_task.update(endpoint.stats()["by_task"])
    assert set(by_task.values()) == {1}
    assert len(by_task) == 400


def test_all_may_be_disabled_and_enabled_again(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(1) as (endpoint,), Broker(redis_url) as broker:
        on = pool_config([endpoint.url])
        with fleet(tmp_path, redis_url, {"llm": on}) as running:
            write(running, {"llm": pool_config([endpoint.url], each={"enabled": False})})
            until(lambda: not running.pids, "no process is needed")
            task = broker.enqueue("llm", CHAT)
            write(running, {"llm": on})
            assert task.result(timeout=20).ok


# All or nothing


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("pools:\n  llm:\n    endpoints: [{id: a\n", "headrace.yaml:"),
        (
            "pools:\n  llm:\n    endpoints:\n      - {id: e0, url: 'http://127.0.0.1:1', priority: 11}\n",
            "headrace.yaml:4: ",
        ),
        ("pools: {}\n", "names no pool"),
        (None, "no such file"),
    ],
)
def test_a_broken_file_changes_nothing_and_says_why(
    tmp_path: Path, redis_url: str, broken: str | None, said: str
) -> None:
    with simulated_endpoints(1) as (endpoint,), Broker(redis_url) as broker:
        pool = {"llm": pool_config([endpoint.url], slots=3)}
        with fleet(tmp_path, redis_url, pool) as running:
            before = row(running, "e0")
            if broken is None:
                running.file.unlink()
            else:
                running.file.write_text(broken)
            line = logged(running, "nothing changed")
            assert " ERROR " in line
            assert said in line
            assert {**row(running, "e0"), "seen": before["seen"]}.items() >= {
                "cap": "3",
                "on": "1",
                "gone": "0",
            }.items()
            assert done(broker.enqueue_many("llm", [CHAT] * 4)) == {"ok": 4}
            write(running, {"llm": pool_config([endpoint.url], slots=5)})
            until(lambda: row(running, "e0")["cap"] == "5", "the repaired file is taken")
            assert running.log.read_text().count("nothing changed") == 1, "said once, not at every look"


def test_one_bad_key_keeps_the_good_changes_out_too(tmp_path: Path, redis_url: str) -> None:
    with (
        simulated_endpoints(1) as (endpoint,),
        fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url], slots=3)}) as running,
    ):
        write(running, {"llm": {**pool_config([endpoint.url], slots=5), "retry": {"max_attempts": 0}}})
        line = logged(running, "nothing changed")
        assert "pools.llm.retry.max_attempts" in line
        assert row(running, "e0")["cap"] == "3"


def test_a_file_that_is_being_written_is_not_taken(tmp_path: Path, redis_url: str) -> None:
    """It grows for a while, and is valid before it is whole: the second endpoint must not come and go."""
    with simulated_endpoints(2) as (one, two):
        pool = pool_config([one.url, two.url])
        with fleet(tmp_path, redis_url, {"llm": pool}) as running:
            text = running.file.read_text()
            whole = text + "".join(f"# line {i}\n" for i in range(40))
            head = whole.index("- id: e1")
            cuts = iter(range(head, len(whole), (len(whole) - head) // 30))

            def grow() -> bool:
                at = next(cuts, None)
                running.file.write_text(whole[:at])
                running.signal(signal.SIGHUP)  # it is looked at in the middle of this
                return at is None

            until(grow, "it is whole", 20)
            logged(running, "SIGHUP: ")
            said = running.log.read_text()
            assert "removed" not in said
            assert "ERROR" not in said
            assert row(running, "e1")["gone"] == "0"


# Who asks


def test_sighup_reads_the_file_now(tmp_path: Path, redis_url: str) -> None:
    with (
        simulated_endpoints(1) as (endpoint,),
        fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url])}) as running,
    ):
        running.signal(signal.SIGHUP)
        assert logged(running, "SIGHUP: ").endswith("nothing changed")
        for pid in running.pids:
            os.kill(pid, signal.SIGHUP)
        write(running, {"llm": pool_config([endpoint.url], slots=3)})
        running.signal(signal.SIGHUP)
        until(lambda: row(running, "e0")["cap"] == "3", "taken")
        assert "ended with" not in running.log.read_text(), "a terminal that closes signals the processes too"


def ask(running: Fleet) -> dict[str, Any]:
    """As the management API does."""
    key = running.store.keys.pool("llm")
    asked = running.store.raw(lambda client: client.hincrby(key, "reload_asked", 1))

    def answer() -> dict[str, Any] | None:
        told = json.loads(running.store.raw(lambda client: client.hget(key, "reload_result")) or "{}")
        return told if told.get("asked") == asked else None

    return dict(until(answer, "an answer", 10))


def test_a_reload_can_be_asked_for_through_redis(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(2) as (one, two), fleet(tmp_path, redis_url, {"llm": pool_config([one.url])}) as running:
        write(running, {"llm": pool_config([one.url, two.url])})
        told = ask(running)
        assert told["success"] is True
        assert told["loaded"] == 2
        running.file.write_text("pools: [")
        told = ask(running)
        assert told["success"] is False
        assert "headrace.yaml:1" in told["message"]
        assert told["at"] > 1_600_000_000
