"""Endpoints for a run: nginx for the fast one if it is installed, else ours, which also delays and keeps times."""

from __future__ import annotations

import http.client
import json
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.job import ANSWER
from bench.processes import BenchError, running, until
from bench.servers import free_port

NGINX_PATHS = "/usr/sbin:/usr/local/sbin:/usr/local/bin:/usr/bin:/opt/homebrew/bin"

_NGINX = """\
pid {folder}/nginx.pid;
error_log {folder}/error.log;
worker_processes 1;
daemon off;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  keepalive_requests 100000000;
  keepalive_timeout 300s;
  default_type application/json;
  server {{
    {listen}
    location = /stub {{ stub_status; }}
    location / {{ return 200 '{answer}'; }}
  }}
}}
"""


class Endpoint(ABC):
    """One server that listens on 127.0.0.1, or up to 127.0.0.N, all on one port."""

    def __init__(self, port: int, hosts: int) -> None:
        self.port = port
        self.urls = [f"http://127.0.0.{number}:{port}" for number in range(1, hosts + 1)]
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def _get(self, path: str) -> bytes:
        try:
            self._connection.request("GET", path)
            return self._connection.getresponse().read()
        except (http.client.HTTPException, OSError):
            self._connection.close()
            raise

    @abstractmethod
    def served(self) -> int:
        """Requests answered so far, those that ask for this number excepted."""

    def close(self) -> None:
        self._connection.close()


class Nginx(Endpoint):
    """Counts every request but our own."""

    _asked = 0

    def served(self) -> int:
        told = int(self._get("/stub").split(b"\n")[2].split()[2])
        self._asked += 1
        return told - self._asked


class Own(Endpoint):
    """bench.endpoint."""

    def reset(self) -> None:
        """Counts and times begin here."""
        self._get("/reset")

    def stats(self) -> dict[str, int]:
        """`served`, `open` (in flight now), `most` (in flight at any time since the reset)."""
        return dict(json.loads(self._get("/stats")))

    def served(self) -> int:
        return self.stats()["served"]

    def stamps(self) -> dict[int, int]:
        """By the number in the body: when it arrived, ns of the monotonic clock."""
        return {int(number): ns for number, ns in json.loads(self._get("/stamps")).items()}

    def answers(self) -> list[int]:
        """When each was answered, ns of the same clock, in order."""
        return [int(ns) for ns in json.loads(self._get("/answers"))]


def nginx() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path=NGINX_PATHS)


def fast_name() -> str:
    return "nginx" if nginx() else "bench.endpoint (nginx is not installed)"


@contextmanager
def fast_endpoint(folder: Path, hosts: int = 1) -> Iterator[Endpoint]:
    """Answers at once."""
    program = nginx()
    if program is None:
        with own_endpoint(folder, hosts=hosts) as own:
            yield own
        return
    port, place = free_port(), folder / "nginx"
    place.mkdir(exist_ok=True)
    listen = " ".join(f"listen 127.0.0.{number}:{port} backlog=4096;" for number in range(1, hosts + 1))
    (place / "nginx.conf").write_text(_NGINX.format(folder=place, listen=listen, answer=ANSWER))
    words = [program, "-p", str(place), "-c", str(place / "nginx.conf"), "-e", str(place / "error.log")]
    with _started(words, Nginx(port, hosts), place / "nginx.log") as endpoint:
        yield endpoint


@contextmanager
def own_endpoint(folder: Path, *, delay: float = 0.0, stamps: bool = False, hosts: int = 1) -> Iterator[Own]:
    """Answers after `delay` seconds."""
    port = free_port()
    words = [sys.executable, "-m", "bench.endpoint", "--port", str(port), "--delay", str(delay), "--hosts", str(hosts)]
    if stamps:
        words.append("--stamps")
    with _started(words, Own(port, hosts), folder / "endpoint.log") as endpoint:
        yield endpoint


@contextmanager
def _started(words: list[str], endpoint: Any, log: Path) -> Iterator[Any]:
    with running("server", words, log) as process:

        def answers() -> bool:
            if process.poll() is not None:
                raise BenchError(f"{words[0]} ended: {log.read_text()[-300:]}")
            try:
                endpoint.served()
            except OSError:
                return False
            return True

        until(answers, f"{words[0]} answers")
        try:
            yield endpoint
        finally:
            endpoint.close()
