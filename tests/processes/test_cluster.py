"""redis+cluster://: a real cluster, a prefix with one {tag}, workers, RQ's own reader, and the slot on another node."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from broker import AsyncBroker, Broker, Request
from broker.errors import BrokerUnsuitable
from broker.store import Store
from tests.support.cluster import Cluster, redis_cluster
from tests.support.commands import headrace
from tests.support.endpoints import simulated_endpoints
from tests.support.fleet import fleet, pool_config, until

PREFIX = "{jobs}:rq"
CHAT = Request("POST", "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "hi"}]})
READER = """
import sys
from redis import Redis
from rq import Queue
queue = Queue("llm", connection=Redis.from_url(sys.argv[1]))
print(queue.count, *queue.get_job_ids())
"""

pytestmark = pytest.mark.xdist_group("cluster")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with redis_cluster() as running:
        yield running


@pytest.fixture
def tagged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RQ_KEY_PREFIX", PREFIX)


def checked(url: str) -> None:
    with closing(Store(url)) as store:
        store.check()


@pytest.mark.usefixtures("tagged")
def test_work_goes_on_when_the_slot_moves_to_another_node(cluster: Cluster, tmp_path: Path) -> None:
    owner = cluster.owner(PREFIX)
    other = next(node for node in cluster.nodes if node is not owner)
    with simulated_endpoints(2, "--latency", "50ms") as endpoints, Broker(cluster.url) as broker:
        pool = pool_config([each.url for each in endpoints], slots=4)
        with fleet(tmp_path, cluster.url, {"llm": pool}, 2):
            assert all(each.ok for each in broker.map("llm", [CHAT] * 20, timeout=60))

            async def under_asyncio() -> bool:
                async with AsyncBroker(cluster.url) as own:
                    return (await (await own.enqueue("llm", CHAT)).result(timeout=60)).ok

            assert asyncio.run(under_asyncio())
            tasks = broker.enqueue_many("llm", [CHAT] * 100)
            cluster.move(PREFIX, other)
            assert all(task.result(timeout=60).ok for task in tasks)
            assert all(each.ok for each in broker.map("llm", [CHAT] * 20, timeout=60))
            hits = [hits for each in endpoints for hits in each.stats()["by_task"].values()]
    assert len(hits) == sum(hits) == 141, "nothing was lost, nothing ran twice"


@pytest.mark.rq
@pytest.mark.usefixtures("tagged")
def test_rq_sees_the_queue_at_the_owner(cluster: Cluster) -> None:
    rq = pytest.importorskip("rq")
    if int(rq.VERSION.partition(".")[0]) < 3:
        pytest.skip("RQ_KEY_PREFIX is read by rq 3")
    with Broker(cluster.url) as broker:
        task = broker.enqueue("unserved", CHAT)
    reader = READER.replace('"llm"', '"unserved"')
    command = [sys.executable, "-c", reader, cluster.owner(PREFIX).url]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ), check=True)
    assert seen.stdout.split() == ["1", task.id]


def test_a_prefix_without_a_tag_is_refused_in_one_line(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(BrokerUnsuitable, match="needs one hash tag in the key prefix, which is 'rq'"):
        checked(cluster.url)
    ended = headrace("status", "--redis", cluster.url, cwd=tmp_path)
    assert ended.returncode == 4
    assert ended.stderr.count("\n") == 1
    assert "RQ_KEY_PREFIX={headrace}" in ended.stderr


@pytest.mark.usefixtures("tagged")
def test_the_url_of_one_node_is_refused_with_what_to_use(cluster: Cluster) -> None:
    for node in cluster.nodes:
        with pytest.raises(BrokerUnsuitable, match=r"node of a Redis Cluster; use redis\+cluster://"):
            checked(node.url)


@pytest.mark.usefixtures("tagged")
def test_a_server_that_is_no_cluster_is_named(redis_url: str) -> None:
    with pytest.raises(BrokerUnsuitable, match="it is no Redis Cluster; use redis://"):
        checked(redis_url.replace("redis://", "redis+cluster://").removesuffix("/0"))


@pytest.mark.usefixtures("tagged")
def test_a_replica_takes_over_under_load_when_its_node_is_killed(tmp_path: Path) -> None:
    """What the replica had is not lost; what it had not, of the moment of the kill, may run once more."""
    with redis_cluster() as cluster:
        owner = cluster.owner(PREFIX)
        replica = cluster.add_replica(owner, tmp_path / "replica")
        with simulated_endpoints(2, "--latency", "50ms") as endpoints, Broker(cluster.url) as broker:
            pool = pool_config([each.url for each in endpoints], slots=4)
            with fleet(tmp_path, cluster.url, {"llm": pool}, 2):
                tasks = broker.enqueue_many("llm", [CHAT] * 400)
                until(lambda: sum(each.stats()["hits"] for each in endpoints) >= 40, "they run")
                assert owner.command("WAIT", "1", "20000") == 1
                owner.kill()
                until(lambda: cluster.owner(PREFIX, replica) is replica, "the replica has taken over", 60)
                first = [task.result(timeout=90) for task in tasks]
                assert all(result.ok for result in first)
                assert all(each.ok for each in broker.map("llm", [CHAT] * 20, timeout=60)), "work goes on"
                again = [task.result(timeout=60) for task in tasks]
            hits = [hits for each in endpoints for hits in each.stats()["by_task"].values()]
    assert again == first, "an outcome does not change"
    assert sum(hits) - 420 <= 2 * 8 + 8, "what ran at the kill, and what ended in the window"
