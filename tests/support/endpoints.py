"""Endpoints for tests: simulated ones in processes of their own, and servers that misbehave byte by byte."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class SimulatedEndpoint:
    """`python -m workers.simulate` in a process of its own. Options as on its command line.

    with SimulatedEndpoint("--latency", "50ms") as endpoint: endpoint.url, endpoint.stats(), endpoint.control(...)
    """

    def __init__(self, *options: str, port: int = 0) -> None:
        self.options, self.port = options, port
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> SimulatedEndpoint:
        """Start (again, on the same port) and wait until it is ready."""
        command = [sys.executable, "-m", "workers.simulate", "--port", str(self.port), *self.options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the simulated endpoint ended with status {self._process.wait()}")
        self.port = json.loads(line)["port"]
        return self

    def stop(self) -> None:
        """End it at once, as a crash would. `start()` brings it back."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/stats", timeout=10) as answer:
            return dict(json.load(answer))

    def control(self, **settings: Any) -> dict[str, Any]:
        """Change its behaviour; the settings now in force. Names as in workers.simulate.behaviour."""
        request = urllib.request.Request(f"{self.url}/control", json.dumps(settings).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return dict(json.load(answer))

    def __enter__(self) -> SimulatedEndpoint:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


@contextmanager
def simulated_endpoints(count: int, *options: str) -> Iterator[list[SimulatedEndpoint]]:
    """Several with the same options; all end with the block."""
    endpoints = [SimulatedEndpoint(*options) for _ in range(count)]
    try:
        yield [endpoint.start() for endpoint in endpoints]
    finally:
        for endpoint in endpoints:
            endpoint.stop()


@dataclass
class Received:
    """A request as it came: its head with the request line first, its body, and on which connection (from 1)."""

    head: list[str]
    body: bytes
    connection: int

    def header(self, name: str) -> str | None:
        """Its value; None if it did not come, an AssertionError if it came twice."""
        found = [
            line.partition(":")[2].strip() for line in self.head[1:] if line.lower().startswith(f"{name.lower()}:")
        ]
        assert len(found) <= 1, f"{name} came {len(found)} times"
        return found[0] if found else None


@dataclass
class BadServer:
    """What a scripted server saw. `changed` is set whenever something happens."""

    url: str = ""
    requests: list[Received] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    most_open: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, happened: Callable[[BadServer], bool]) -> None:
        """Wait until it holds. Give a time limit around it."""
        while not happened(self):
            self.changed.clear()
            await self.changed.wait()


class Peer:
    """One connection to a BadServer, for its script."""

    def __init__(
        self, server: BadServer, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.server, self.number, self.reader, self.writer = server, number, reader, writer

    async def request(self) -> Received | None:
        """The next request, read to its end; None if the client closed instead."""
        try:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        received = Received(head, b"", self.number)
        received.body = await self.reader.readexactly(int(received.header("content-length") or 0))
        self.server.requests.append(received)
        self.server.changed.set()
        return received

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def closed_by_client(self) -> None:
        """Wait for it, dropping what comes."""
        try:
            while await self.reader.read(65_536):
                pass
        except ConnectionError:
            pass

    def reset(self) -> None:
        """Close with RST."""
        self.writer.transport.abort()


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def bad_server(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[BadServer]:
    """A server in this event loop that runs `script` on each connection and closes it when the script returns."""
    server = BadServer()
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        writers.append(writer)
        server.connections += 1
        server.open += 1
        server.most_open = max(server.most_open, server.open)
        server.changed.set()
        try:
            await script(Peer(server, server.connections, reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # canceled only below; asyncio logs what a connection's task raises
        finally:
            writer.close()
            server.open -= 1
            server.changed.set()
            tasks.discard(task)

    listener = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls, backlog=2048)
    port = listener.sockets[0].getsockname()[1]
    server.url = f"{'https' if tls else 'http'}://{'localhost' if tls else '127.0.0.1'}:{port}"
    try:
        yield server
    finally:
        listener.close()
        for _ in range(5):  # a task canceled before its first step would leave its connection open
            await asyncio.sleep(0)
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A TLS connection says goodbye and waits for the other side to: not beyond the end of the loop.
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
