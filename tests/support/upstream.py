"""A small HTTP endpoint inside the test's own process, in threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any, NamedTuple


class Seen(NamedTuple):
    """A request as it came; header names lower-cased."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]


class Upstream(ThreadingHTTPServer):
    """Answers `{"answer": 42}`, with the status in the path `/<status>` if there is one, else with `status`, and with
    `retry_after` as its Retry-After if there is one. `/hold` waits for `release`; `/raw` answers what is in `raw`;
    a path that ends in `/echo`, the request's headers, and its Authorization as X-Request-Id.

    `seen` has every request in order; `arrived` gives each as it comes.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[Seen] = []
        self.arrived: SimpleQueue[Seen] = SimpleQueue()
        self.release = threading.Event()
        self.status = 200
        self.retry_after = ""
        self.raw = b""
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Upstream
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        seen = Seen(self.command, self.path, body, {name.lower(): value for name, value in self.headers.items()})
        self.server.seen.append(seen)
        self.server.arrived.put(seen)
        if self.path == "/hold":
            self.server.release.wait(30)
        answer, status = b'{"answer": 42}', self.path[1:4]
        if self.path == "/raw":
            answer = self.server.raw
        if self.path.endswith("/echo"):
            answer = json.dumps(seen.headers).encode()
        try:
            self.send_response(int(status) if status.isdigit() else self.server.status)
            self.send_header("content-type", "application/json")
            if self.path.endswith("/echo"):
                self.send_header("x-request-id", seen.headers.get("authorization", ""))
            if self.server.retry_after:
                self.send_header("retry-after", self.server.retry_after)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
        except ConnectionError:
            self.close_connection = True

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def upstream_server() -> Iterator[Upstream]:
    """A running Upstream."""
    with Upstream() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.release.set()
            server.shutdown()
            thread.join()
