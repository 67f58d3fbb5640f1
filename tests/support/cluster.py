"""A Redis Cluster for tests: real nodes of one kind, each with its share of the slots."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker.launch import free_port
from tests.support.fleet import until
from tests.support.servers import RealServer, server_path

SLOTS = 16384


class Cluster:
    """`nodes` own the slots in equal shares. `url` is what headrace is given."""

    def __init__(self, folder: Path, count: int) -> None:
        self.nodes = [self._node(folder, number) for number in range(count)]

    def _node(self, folder: Path, number: int) -> RealServer:
        place = folder / str(number)
        place.mkdir()
        config = {
            "cluster-enabled": "yes", "cluster-config-file": "nodes.conf", "cluster-node-timeout": "2000",
            "cluster-port": str(free_port()),
        }  # fmt: skip
        return RealServer("valkey", place, config)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        share = SLOTS // len(self.nodes) + 1
        for number, node in enumerate(self.nodes):
            node.start()
            first, last = number * share, min(SLOTS, (number + 1) * share) - 1
            assert node.command("CLUSTER", "ADDSLOTSRANGE", str(first), str(last)) == b"OK"
            assert node.command("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1)) == b"OK"
        first_node = self.nodes[0]
        for node in self.nodes[1:]:
            words = ("127.0.0.1", str(node.port), node.config["cluster-port"])
            assert first_node.command("CLUSTER", "MEET", *words) == b"OK"
        until(lambda: all(self._whole(node) for node in self.nodes), "every node sees the whole cluster", 60)

    def _whole(self, node: RealServer) -> bool:
        told = _text(node.command("CLUSTER", "INFO"))
        return "cluster_state:ok" in told and f"cluster_known_nodes:{len(self.nodes)}" in told

    def add_replica(self, of: RealServer, folder: Path) -> RealServer:
        """Follows `of`, and takes its slots over when it dies."""
        folder.mkdir()
        replica = self._node(folder, len(self.nodes))
        replica.start()
        self.nodes.append(replica)
        words = ("127.0.0.1", str(replica.port), replica.config["cluster-port"])
        assert of.command("CLUSTER", "MEET", *words) == b"OK"
        until(lambda: all(self._whole(node) for node in self.nodes), "every node sees the replica", 60)
        assert replica.command("CLUSTER", "REPLICATE", _text(of.command("CLUSTER", "MYID"))) == b"OK"
        up = "master_link_status:up"
        until(lambda: up in _text(replica.command("INFO", "replication")), "the replica has caught up", 60)
        return replica

    def owner(self, key: str, asked: RealServer | None = None) -> RealServer:
        """Of the slot of a key, as one node tells."""
        asked = asked or self.nodes[0]
        slot = asked.command("CLUSTER", "KEYSLOT", key)
        rows: Any = asked.command("CLUSTER", "SLOTS")
        assert isinstance(slot, int)
        port = next(row[2][1] for row in rows if row[0] <= slot <= row[1])
        return next(node for node in self.nodes if node.port == port)

    def move(self, key: str, to: RealServer) -> None:
        """The slot of a key, with all that is in it, at once (CLUSTER MIGRATESLOTS)."""
        slot = str(self.nodes[0].command("CLUSTER", "KEYSLOT", key))
        name = _text(to.command("CLUSTER", "MYID"))
        reply = self.owner(key).command("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", name)
        assert reply == b"OK", reply
        until(lambda: self.owner(key) is to, "the slot has moved", 60)

    def close(self) -> None:
        for node in self.nodes:
            node.kill()


def _text(reply: object) -> str:
    return reply.decode() if isinstance(reply, bytes) else ""


@contextmanager
def redis_cluster(count: int = 3) -> Iterator[Cluster]:
    """Running, of the bundled server, in a temporary folder, gone afterwards. Raises MissingServer."""
    server_path("valkey")
    folder = Path(tempfile.mkdtemp(prefix="hr-"))
    cluster = Cluster(folder, count)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
