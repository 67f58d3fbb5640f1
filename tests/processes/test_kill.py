"""kill -9, drain and restart under load: every task gets exactly one outcome. Counted at the endpoints."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from broker import Broker, Request
from broker.scripts import load
from tests.support.endpoints import simulated_endpoints
from tests.support.fleet import Fleet, fleet, in_flight, pool_config, until
from tests.support.proxy import ReplyDropper, reply_dropper
from tests.support.servers import redis_server

CHAT = Request("POST", "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "hi"}]})
LEASE_S = 3  # short, so that the tests are; 30 s by default
QUEUE = {"lease": f"{LEASE_S}s"}


@contextmanager
def losing(proxy: ReplyDropper, marker: bytes, every: float) -> Iterator[None]:
    """One reply to a request that contains `marker` is lost each so many seconds, and its connection with it."""
    over = threading.Event()

    def lose() -> None:
        while not over.wait(every):
            proxy.drop(marker)

    thread = threading.Thread(target=lose)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_killed_process_loses_nothing_and_costs_at_most_its_slots(tmp_path: Path, redis_url: str) -> None:
    """S3, and kill -9 of one of three."""
    with simulated_endpoints(3, "--latency", "200ms") as endpoints, Broker(redis_url) as broker:
        urls = [endpoint.url for endpoint in endpoints]
        with fleet(tmp_path, redis_url, {"llm": pool_config(urls, slots=8, queue=QUEUE)}, 3) as running:
            tasks = broker.enqueue_many("llm", [CHAT] * 400)
            until(lambda: sum(endpoint.stats()["in_flight"] for endpoint in endpoints) == 24, "all slots are in use")
            running.kill_one()
            results = [task.result(timeout=60) for task in tasks]
            until(lambda: in_flight(running.store, "llm") == 0, "no slot is in use")
            until(lambda: len(running.pids) == 3, "the supervisor starts another in its place")
            by_task = Counter[str]()
            for endpoint in endpoints:
                by_task.update(endpoint.stats()["by_task"])
    assert Counter(result.outcome for result in results) == {"ok": 400}
    assert set(by_task) == {task.id for task in tasks}
    assert sum(by_task.values()) - 400 <= 8, "extra hits are at most the slots of the process"


def test_a_claim_that_the_server_forgot_is_not_run_beside_itself(tmp_path: Path) -> None:
    """As after a crash or a failover: the server gives the same process the task it runs, under the same token."""
    with (
        redis_server() as server, simulated_endpoints(1, "--latency", "3s") as (endpoint,),
        Broker(server.url) as broker, fleet(tmp_path, server.url, {"llm": pool_config([endpoint.url], slots=2)}) as one,
    ):  # fmt: skip
        (pid,) = one.pids
        os.kill(pid, signal.SIGSTOP)
        task = broker.enqueue("llm", CHAT)
        assert server.command("SAVE") == b"OK"
        os.kill(pid, signal.SIGCONT)
        until(lambda: endpoint.stats()["in_flight"] == 1, "it runs")
        server.kill()
        server.start()
        assert task.status() == "queued", "the claim is forgotten"
        until(lambda: task.status() == "started", "it is given again")
        assert task.result(timeout=60).ok
        assert endpoint.stats()["by_task"] == {task.id: 1}
        assert all(each.result(timeout=60).ok for each in broker.enqueue_many("llm", [CHAT] * 4))


def test_all_killed_and_one_started_again_finishes_everything(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(2, "--latency", "100ms") as endpoints, Broker(redis_url) as broker:
        pool = {"llm": pool_config([e.url for e in endpoints], slots=4, queue=QUEUE)}
        with fleet(tmp_path, redis_url, pool, 2) as first:
            tasks = broker.enqueue_many("llm", [CHAT] * 100)
            until(lambda: sum(endpoint.stats()["in_flight"] for endpoint in endpoints) == 8, "all slots are in use")
            os.killpg(os.getpgid(first._process.pid), signal.SIGKILL)
            first.wait()
        settled = {task.id for task in tasks if task.status() == "ok"}
        before = Counter[str]()
        for endpoint in endpoints:
            before.update(endpoint.stats()["by_task"])
        with fleet(tmp_path, redis_url, pool, 1):
            results = [task.result(timeout=60) for task in tasks]
        after = Counter[str]()
        for endpoint in endpoints:
            after.update(endpoint.stats()["by_task"])
    assert Counter(result.outcome for result in results) == {"ok": 100}
    assert all(after[task] == before[task] for task in settled), "no outcome is sent twice"
    assert sum(after.values()) - 100 <= 8


def test_a_process_whose_link_breaks_again_and_again_still_finds_what_died(tmp_path: Path) -> None:
    with (
        redis_server("valkey") as server,
        reply_dropper(server.port) as proxy,
        simulated_endpoints(1, "--latency", "600s") as (endpoint,),
        Broker(server.url) as broker,
    ):
        pool = {"llm": pool_config([endpoint.url], slots=4, queue=QUEUE)}
        with fleet(tmp_path, server.url, pool, 1) as first:
            tasks = broker.enqueue_many("llm", [CHAT] * 4)
            until(lambda: endpoint.stats()["in_flight"] == 4, "four run")
            os.killpg(os.getpgid(first._process.pid), signal.SIGKILL)
            first.wait()
        endpoint.control(latency_ms=1)
        with fleet(tmp_path, proxy.url, pool, 1), losing(proxy, load("renew").sha.encode(), LEASE_S / 2):
            results = [task.result(timeout=60) for task in tasks]
    assert Counter(result.outcome for result in results) == {"ok": 4}


def test_a_drain_finishes_what_runs_and_leaves_the_rest(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(1, "--latency", "500ms") as (endpoint,), Broker(redis_url) as broker:
        pool = {"llm": pool_config([endpoint.url], slots=4)}
        with fleet(tmp_path, redis_url, pool, 1) as running:
            tasks = broker.enqueue_many("llm", [CHAT] * 40)
            until(lambda: endpoint.stats()["in_flight"] == 4, "four run")
            running.signal(signal.SIGTERM)
            assert running.wait() == 0
        counts = Counter(task.status() for task in tasks)
        hits = endpoint.stats()["hits"]
    assert counts["ok"] == hits
    assert counts["queued"] == 40 - hits
    assert set(counts) == {"ok", "queued"}


def test_a_second_signal_releases_what_runs_with_no_attempt_counted(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(1, "--latency", "600s") as (endpoint,), Broker(redis_url) as broker:
        pool = {"llm": pool_config([endpoint.url], slots=4)}
        with fleet(tmp_path, redis_url, pool, 1) as running:
            tasks = broker.enqueue_many("llm", [CHAT] * 8)
            until(lambda: endpoint.stats()["in_flight"] == 4, "four run")
            running.signal(signal.SIGTERM)
            until(lambda: not running.ready("llm"), "it claims no more")
            running.signal(signal.SIGTERM)
            assert running.wait() == 0
            assert in_flight(running.store, "llm") == 0
            assert Counter(task.status() for task in tasks) == {"queued": 8}
        endpoint.control(latency_ms=1)
        with fleet(tmp_path, redis_url, pool, 1):
            results = [task.result(timeout=30) for task in tasks]
    assert {result.attempts for result in results} == {1}


def test_processes_end_when_their_supervisor_is_killed(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(1, "--latency", "600s") as (endpoint,), Broker(redis_url) as broker:
        with fleet(tmp_path, redis_url, {"llm": pool_config([endpoint.url], slots=4)}, 1) as running:
            broker.enqueue_many("llm", [CHAT] * 4)
            until(lambda: endpoint.stats()["in_flight"] == 4, "four run")
            (pid,) = running.pids
            running.signal(signal.SIGKILL)
            running.wait()
            until(lambda: not Path(f"/proc/{pid}").exists(), "the worker process ends by itself")
            assert in_flight(running.store, "llm") == 0, "and releases what it held"


def test_a_killed_server_comes_back_and_the_processes_go_on(tmp_path: Path) -> None:
    with (
        redis_server("valkey", config={"appendonly": "yes", "appendfsync": "always"}) as server,
        simulated_endpoints(2, "--latency", "50ms") as endpoints,
    ):
        pool = {"llm": pool_config([e.url for e in endpoints], slots=4, queue=QUEUE)}
        with fleet(tmp_path, server.url, pool, 2), Broker(server.url) as broker:
            tasks = broker.enqueue_many("llm", [CHAT] * 200)
            until(lambda: sum(endpoint.stats()["in_flight"] for endpoint in endpoints) == 8, "all slots are in use")
            server.kill()
            server.start()
            results = [task.result(timeout=60) for task in tasks]
    assert Counter(result.outcome for result in results) == {"ok": 200}


def test_a_drain_does_not_wait_for_a_redis_that_is_gone(tmp_path: Path) -> None:
    with redis_server("valkey") as server, simulated_endpoints(1) as (endpoint,):
        pool = {"llm": pool_config([endpoint.url], drain="1h")}
        with fleet(tmp_path, server.url, pool, 2) as running:
            server.kill()
            until(lambda: "cannot be reached" in running.log.read_text(), "it is noticed")
            running.signal(signal.SIGTERM)
            assert running.wait() == 0
            assert "Traceback" not in running.log.read_text()


def test_a_process_killed_while_it_starts_is_started_again(tmp_path: Path, redis_url: str) -> None:
    with simulated_endpoints(2) as endpoints, Broker(redis_url) as broker:
        pool = {"llm": pool_config([e.url for e in endpoints])}
        with closing(Fleet(tmp_path, redis_url, pool, 2)) as running:
            until(lambda: running.pids, "a process has begun")
            running.kill_one()
            until(lambda: running.ready("llm"), "all are ready all the same")
            assert broker.enqueue("llm", CHAT).result(timeout=30).ok
