"""A primary, a replica and three Sentinels, all real: Debian's redis-sentinel, or the bundled server as one."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from broker.keeper import Reply, call, connect
from broker.launch import free_port
from tests.support.fleet import until
from tests.support.servers import Kind, RealServer, server_path

SERVICE = "queues"
# Not less than 5 s: so long after a failover a Sentinel takes what the others said of the old primary for their word on
# the new one. With 1 s, one Sentinel that was starved for that second began another failover, back to the old primary.
DOWN_AFTER_MS = 6000
STAMP = r"\d+ \w{3} \d{4} \d\d:\d\d:\d\d"
PROMOTED = r"\+promoted-slave slave \S+ \S+ (\d+) @ \S+ \S+ (\d+)"  # one line, by the Sentinel that led the failover
SYNCED = r"REPLICA sync: Finished with success|Successful partial resynchronization"
DEMOTED = r"REPLICAOF \S+ enabled"


@dataclass(frozen=True, order=True)
class Failover:
    """That has been: `new` took over from `old` at this Unix time."""

    at: float
    old: int  # ports
    new: int


class KeptServer(RealServer):
    """Its settings are in a file, as operators have it, in which Sentinels make it write down whose replica it is.

    So it comes back as what it was last made; a primary that was killed, as a primary.
    """

    def _settings(self) -> list[str]:
        file = self.folder / "server.conf"
        if not file.exists():
            empty = '""'
            file.write_text("".join(f"{name} {value or empty}\n" for name, value in self.config.items()))
        return [str(file)]

    def moments(self, event: str) -> list[float]:
        """When its log says so, in Unix time."""
        return [at for at, _ in _logged(self.log, event)]


def _logged(log: Path, event: str) -> list[tuple[float, re.Match[str]]]:
    line = re.compile(rf"^\S+ ({STAMP})\.(\d+) . .*?(?:{event})", re.MULTILINE)
    found = line.finditer(log.read_text(errors="replace")) if log.exists() else ()
    return [(time.mktime(time.strptime(each[1], "%d %b %Y %H:%M:%S")) + int(each[2]) / 1000, each) for each in found]


class Sentinel:
    """One Sentinel process. It keeps its port, and what it learned, when it is started again."""

    def __init__(self, folder: Path, settings: str, password: str = "") -> None:
        self.folder, self.port, self._password = folder, free_port(), password
        self.log = folder / "log"
        folder.mkdir()
        self._file = folder / "sentinel.conf"
        self._file.write_text(f"bind 127.0.0.1\nport {self.port}\ndir {folder}\nunixsocket {folder}/s.sock\n{settings}")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        own = shutil.which("redis-sentinel")
        words = [own, str(self._file)] if own else [server_path("valkey"), str(self._file), "--sentinel"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(self._answers, f"the Sentinel answers; see {self.log}", 15)

    def _answers(self) -> bool:
        with suppress(OSError):
            return self.command("PING") == b"PONG"
        return False

    def command(self, *words: str) -> Reply:
        with connect(str(self.folder / "s.sock"), 10) as connection:
            if self._password:
                call(connection, "AUTH", self._password)
            return call(connection, *words)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Trio:
    """`servers[0]` begins as the primary. `url` is what headrace is given."""

    def __init__(
        self, folder: Path, kind: Kind, config: Mapping[str, str], password: str = "", sentinel_password: str = ""
    ) -> None:
        self.password, self.sentinel_password = password, sentinel_password
        secret = {"requirepass": password, "masterauth": password} if password else {}
        config = {"repl-diskless-sync-delay": "0", **config, **secret}
        for name in ("one", "two"):
            (folder / name).mkdir()
        first = KeptServer(kind, folder / "one", config)
        more = {"replicaof": f"127.0.0.1 {first.port}"}
        self.servers = [first, KeptServer(kind, folder / "two", {**config, **more})]
        settings = (
            f"sentinel monitor {SERVICE} 127.0.0.1 {first.port} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} 6000\n"
        )
        settings += f"sentinel auth-pass {SERVICE} {password}\n" if password else ""
        settings += f"requirepass {sentinel_password}\n" if sentinel_password else ""
        self.sentinels = [Sentinel(folder / f"sentinel{i}", settings, sentinel_password) for i in range(3)]

    @property
    def hosts(self) -> str:
        return ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)

    @property
    def url(self) -> str:
        user = f":{self.password}@" if self.password else ""
        query = f"?sentinel_password={self.sentinel_password}" if self.sentinel_password else ""
        return f"redis+sentinel://{user}{self.hosts}/{SERVICE}/0{query}"

    def start(self) -> None:
        for server in self.servers:
            server.start()
        until(lambda: self.in_step(self.servers[1]), "the replica follows", 30)
        for sentinel in self.sentinels:
            sentinel.start()
        self.settled()

    def in_step(self, replica: RealServer) -> bool:
        return b"master_link_status:up" in self.info(replica)

    def info(self, server: RealServer) -> bytes:
        reply = server.command("INFO", "replication")
        return reply if isinstance(reply, bytes) else b""

    def settled(self) -> None:
        """Every Sentinel knows the others, and a replica that is in step: a failover can be."""
        until(lambda: all(self._knows(each) for each in self.sentinels), "the Sentinels know each other", 60)

    def _knows(self, sentinel: Sentinel) -> bool:
        row = _row(sentinel.command("SENTINEL", "MASTER", SERVICE))
        if row["num-other-sentinels"] != "2" or row["flags"] != "master":
            return False
        replicas = sentinel.command("SENTINEL", "REPLICAS", SERVICE)
        rows = [_row(each) for each in replicas] if isinstance(replicas, list) else []
        return [(each["flags"], each["master-link-status"]) for each in rows] == [("slave", "ok")]

    @property
    def named(self) -> list[KeptServer]:
        """The primary, as each Sentinel has it."""
        ports = [_row(each.command("SENTINEL", "MASTER", SERVICE))["port"] for each in self.sentinels]
        return [server for port in ports for server in self.servers if str(server.port) == port]

    @property
    def primary(self) -> KeptServer:
        """The one that most Sentinels name."""
        named = self.named
        return max(named, key=named.count)

    def order(self) -> None:
        """SENTINEL FAILOVER: the replica becomes the primary, soon; the old one lives on."""
        reply = self.sentinels[0].command("SENTINEL", "FAILOVER", SERVICE)
        assert reply == b"OK", reply

    def replica(self) -> KeptServer:
        primary = self.primary
        return next(each for each in self.servers if each is not primary)

    def failovers(self) -> list[Failover]:
        """All that have been, first to last, asked for or not; from the Sentinels' logs."""
        found = [each for sentinel in self.sentinels for each in _logged(sentinel.log, PROMOTED)]
        return sorted(Failover(at, int(match[4]), int(match[3])) for at, match in found)

    def server(self, port: int) -> KeptServer:
        return next(each for each in self.servers if each.port == port)

    def keep_logs(self, folder: Path) -> None:
        for number, server in enumerate(self.servers, 1):
            shutil.copy(server.log, folder / f"server{number}-{server.port}.log")
        for number, sentinel in enumerate(self.sentinels, 1):
            shutil.copy(sentinel.log, folder / f"sentinel{number}-{sentinel.port}.log")

    def close(self) -> None:
        for sentinel in self.sentinels:
            sentinel.kill()
        for server in self.servers:
            server.kill()


def _row(reply: Reply) -> dict[str, str]:
    if not isinstance(reply, list):
        return dict.fromkeys(("num-other-sentinels", "flags", "port", "master-link-status"), "")
    flat = iter([each.decode() if isinstance(each, bytes) else str(each) for each in reply])
    return dict(zip(flat, flat, strict=True))


@contextmanager
def sentinel_trio(
    config: Mapping[str, str] | None = None,
    *,
    password: str = "",
    sentinel_password: str = "",
    logs: Path | None = None,
) -> Iterator[Trio]:
    """Running, in a temporary folder, gone afterwards but for its logs. Debian's servers where they are. Raises
    MissingServer.
    """
    kind: Kind = "redis" if shutil.which("redis-server") else "valkey"
    server_path(kind)
    folder = Path(tempfile.mkdtemp(prefix="hr-"))
    trio = Trio(folder, kind, config or {}, password, sentinel_password)
    try:
        trio.start()
        yield trio
    finally:
        trio.close()
        if logs is not None:
            with suppress(FileNotFoundError):  # it did not start
                trio.keep_logs(logs)
        shutil.rmtree(folder, ignore_errors=True)
