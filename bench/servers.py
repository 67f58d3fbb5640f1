"""The Redis or Valkey server of a run: a process of its own on a free port, its data in a temporary folder.

Set as the embedded server and docker-compose.yml set it; every system gets the same.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from bench.processes import BenchError, running, until
from broker.serverbinary import find_server_binary


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def binary(kind: str) -> str:
    """`bundled` is what `headrace` would start; `redis` is redis-server on PATH; else a path. Raises BenchError."""
    if kind == "bundled":
        return find_server_binary().path
    found = shutil.which("redis-server" if kind == "redis" else kind)
    if found is None:
        raise BenchError(f"--server {kind}: there is no such program")
    return found


class Server:
    """`url` for the systems, `redis` for looking."""

    def __init__(self, port: int, path: str, aof: bool) -> None:
        self.url = f"redis://127.0.0.1:{port}/0"
        self.redis: redis.Redis = redis.Redis(port=port)
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.split()
        name = "Valkey" if "valkey" in said[0].lower() else "Redis"
        version = next((word[2:] for word in said if word.startswith("v=")), "?")
        self.shown = f"{name} {version}, AOF {'everysec' if aof else 'off'}"

    def clear(self) -> None:
        """Empty, with statistics at zero. SYNC: Valkey frees in the background, which `used` would see."""
        self.redis.execute_command("FLUSHALL", "SYNC")  # type: ignore[no-untyped-call]  # redis-py's has no types
        self.redis.config_resetstat()

    def info(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = self.redis.info(section)
        return found

    def used(self) -> int:
        """Bytes of data and overhead."""
        return int(self.info("memory")["used_memory"])

    def cpu_us(self) -> float:
        """Microseconds of CPU that the server has used, waiting for a core not among them."""
        told = self.info("cpu")
        return (float(told["used_cpu_user"]) + float(told["used_cpu_sys"])) * 1e6


@contextmanager
def server(kind: str, folder: Path, aof: bool) -> Iterator[Server]:
    """It ends with the block."""
    path, port = binary(kind), free_port()
    words = [
        path, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--maxmemory-policy",
        "noeviction", "--hash-max-listpack-value", "4096", "--appendonly", "yes" if aof else "no", "--appendfsync",
        "everysec",
    ]  # fmt: skip
    with running("server", words, folder / "server.log") as process:
        found = Server(port, path, aof)

        def answers() -> bool:
            if process.poll() is not None:
                raise BenchError(f"{path} ended: {(folder / 'server.log').read_text()[-300:]}")
            try:
                return bool(found.redis.ping())
            except redis.ConnectionError:
                return False

        until(answers, f"{path} answers")
        yield found
        found.redis.close()
