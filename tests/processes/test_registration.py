"""Redis forgets what workers registered there, all of it or a part: whoever serves writes it again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker import Broker, Request
from broker.registered import add_endpoint, endpoint_from
from broker.store import Store
from tests.support.endpoints import SimulatedEndpoint, simulated_endpoints
from tests.support.fleet import ROOT, Fleet, fleet, logged, pool_config, row, until
from tests.support.servers import redis_server

CHAT = Request("POST", "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "hi"}]})
AGAIN = "registered again"
SETTINGS = ("priority", "cap", "on", "capabilities", "gone")


@contextmanager
def headrace_worker(folder: Path, redis_url: str, pool: dict[str, Any]) -> Iterator[Path]:
    with fleet(folder, redis_url, {"llm": pool}) as running:
        yield running.log


@contextmanager
def rq_worker(folder: Path, redis_url: str, pool: dict[str, Any]) -> Iterator[Path]:
    """RQ's own command, with our worker class."""
    file, log = folder / "headrace.yaml", folder / "worker.log"
    file.write_text(yaml.safe_dump({"pools": {"llm": pool}}))
    words = ["rq.cli", "worker", "-u", redis_url, "-w", "workers.rq_worker.EndpointWorker", "llm"]
    with log.open("ab") as output, closing(Store(redis_url)) as store:
        process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=ROOT, stdout=output, stderr=output,
            env=os.environ | {"HEADRACE_CONFIG": str(file)},
        )  # fmt: skip
        try:
            waiting = store.keys.waiting("llm")
            until(lambda: store.raw(lambda client: client.exists(waiting)), f"it waits for work; see {log}")
            yield log
        finally:
            process.terminate()
            process.wait()


WORKERS = [headrace_worker, pytest.param(rq_worker, marks=pytest.mark.rq)]


def registered(store: Store, ids: list[str]) -> list[Any]:
    """All that a worker registers of its pool, and nothing else."""
    keys = store.keys
    policies = ("max_depth", "failures", "cooldown", "spill_after", "check_after", "configured")
    commands: list[tuple[Any, ...]] = [("HMGET", keys.pool("llm"), *policies)]
    commands += [("SISMEMBER", keys.pools(), "llm"), ("SISMEMBER", keys.queues(), keys.queue("llm"))]
    commands += [("SISMEMBER", keys.endpoints("llm"), each) for each in ids]
    found = store.pipelined(commands)
    for each in ids:
        key = keys.endpoint("llm", each)
        if store.pipelined([("TYPE", key)])[0] == b"hash":
            found += store.pipelined([("HMGET", key, *SETTINGS)])
    return found


def losses(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    keys = store.keys
    return {
        "all of it": [("FLUSHALL",)],
        "an endpoint, a policy": [
            ("DEL", keys.endpoint("llm", "e0")),
            ("HDEL", keys.pool("llm"), "cooldown"),
        ],
        "a setting, a place in the index, a key overwritten": [
            ("HDEL", keys.endpoint("llm", "e1"), "cap"),
            ("SREM", keys.endpoints("llm"), "e1"),
            ("SREM", keys.pools(), "llm"),
            ("SET", keys.endpoint("llm", "e0"), "x"),
        ],
        "the pool": [("DEL", keys.pool("llm"))],
    }


@pytest.mark.parametrize("worker", WORKERS)
def test_whatever_is_lost_of_a_registration_is_written_again(
    worker: Callable[..., Any], tmp_path: Path, redis_url: str
) -> None:
    with simulated_endpoints(2) as endpoints, Broker(redis_url) as broker, closing(Store(redis_url)) as store:
        with worker(tmp_path, redis_url, pool_config([each.url for each in endpoints], slots=1)) as log:
            whole = registered(store, ["e0", "e1"])
            for count, (what, commands) in enumerate(losses(store).items(), start=1):
                store.pipelined(commands)
                until(lambda: registered(store, ["e0", "e1"]) == whole, f"again: {what}", 20)
                until(lambda count=count: log.read_text().count(AGAIN) == count, f"{what}: one line is logged", 20)
            before = [each.stats()["hits"] for each in endpoints]
            assert all(result.ok for result in broker.map("llm", [CHAT] * 10, timeout=30))
            assert all(each.stats()["hits"] > count for each, count in zip(endpoints, before, strict=True))


def test_a_backup_of_before_the_last_change_of_the_file_makes_no_difference(tmp_path: Path) -> None:
    with redis_server(config={"appendonly": "yes", "appendfsync": "always"}) as server:
        data = server.folder / "appendonlydir"
        with simulated_endpoints(2) as endpoints, Broker(server.url) as broker:
            with fleet(tmp_path, server.url, {"llm": pool_config([endpoints[0].url])}) as running:
                shutil.copytree(data, tmp_path / "backup")
                text = yaml.safe_load(running.file.read_text())
                text["pools"]["llm"] = pool_config([each.url for each in endpoints], slots=1)
                running.file.write_text(yaml.safe_dump(text))
                logged(running, "endpoint e1 added")
                server.stop()
                shutil.rmtree(data)
                shutil.copytree(tmp_path / "backup", data)
                server.start()
                logged(running, AGAIN)
                assert row(running, "e0")["cap"] == "1"
                assert all(result.ok for result in broker.map("llm", [CHAT] * 10, timeout=30))
                assert endpoints[1].stats()["hits"] > 0


def test_what_operators_set_at_run_time_is_not_forgotten(tmp_path: Path, redis_url: str) -> None:
    """Drained stays drained, and what was added stays, where all else is gone too."""
    with simulated_endpoints(3) as endpoints, Broker(redis_url) as broker:
        pool = pool_config([each.url for each in endpoints[:2]], slots=1)
        with fleet(tmp_path, redis_url, {"llm": pool}) as running:
            store = running.store
            assert store.run(store.scripts.drain("llm", "e0", True)) == "done"
            add_endpoint(store, "llm", endpoint_from("llm", {"id": "late", "url": endpoints[2].url}))
            logged(running, "endpoint late added")
            store.pipelined([("DEL", store.keys.endpoint("llm", "e1"))])
            logged(running, AGAIN)  # who wrote it again has read what is drained
            store.pipelined([("FLUSHALL",)])
            until(lambda: row(running, "e0") and row(running, "late"), "both are known again", 20)
            assert row(running, "e0")["drain"] == "1"
            assert all(result.ok for result in broker.map("llm", [CHAT] * 10, timeout=30))
            assert endpoints[0].stats()["hits"] == 0
            assert endpoints[2].stats()["hits"] > 0
            logged(running, "Redis had forgotten endpoints added or removed at run time: late")


def test_a_worker_with_an_older_configuration_leaves_the_newer_one_alone(tmp_path: Path, redis_url: str) -> None:
    """As in a rolling reload. Whatever is lost, and whoever starts a process again, the newer one stands."""
    with simulated_endpoints(2) as endpoints:
        with _two_fleets(tmp_path, redis_url, endpoints) as (old, new):
            store = new.store

            def in_force() -> bytes:
                return bytes(store.pipelined([("HGET", store.keys.pool("llm"), "configured")])[0] or b"")

            def waits(pids: set[int]) -> bool:
                names = [name.decode() for name in store.pipelined([("HKEYS", store.keys.waiting("llm"))])[0]]
                return pids <= {int(name.split("-")[-2]) for name in names}

            def again(running: Fleet) -> int:
                return running.log.read_text().count(AGAIN)

            def mended_after(*command: str) -> None:
                said = again(new)
                store.pipelined([command])
                mended = "the newer one is in force"
                until(lambda: in_force() == newest and row(new, "e0").get("cap") == "7", mended, 20)
                until(lambda: again(new) == said + 1, "it says so")

            until(lambda: row(new, "e0")["cap"] == "7", "the newer one is in force")
            newest = in_force()
            logged(old, "another worker has a newer configuration")
            pids = set(old.pids)
            old.kill_one()
            until(lambda: set(old.pids) - pids and waits(set(old.pids)), "the old one's process is there again")
            assert in_force() == newest
            mended_after("FLUSHALL")
            lost = ("DEL", store.keys.endpoint("llm", "e0"))
            mended_after(*lost)  # whatever the other one wrote while there was nothing, and said of it, is past then
            silent = again(old)
            mended_after(*lost)
            assert again(old) == silent
            assert in_force() == newest


@contextmanager
def _two_fleets(
    folder: Path, redis_url: str, endpoints: list[SimulatedEndpoint]
) -> Iterator[tuple[Fleet, Fleet]]:
    folders = [folder / name for name in ("old", "new")]
    for each in folders:
        each.mkdir()
    urls = [each.url for each in endpoints]
    with fleet(folders[0], redis_url, {"llm": pool_config(urls[:1], slots=3)}) as old:
        with fleet(folders[1], redis_url, {"llm": pool_config(urls, slots=7)}) as new:
            yield old, new
