"""A Sentinel that says what a test wants it to: one that has not heard of a failover, or that changes its mind."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast


class StubSentinel:
    """Names `port` as the primary; `asked` counts how often."""

    def __init__(self, port: int, epoch: int = 0, flags: str = "master") -> None:
        self.primary, self.epoch, self.flags, self.asked = port, epoch, flags, 0
        stub = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while words := _command(cast(BinaryIO, self.rfile)):
                    self.wfile.write(stub._reply(words))

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def _reply(self, words: list[bytes]) -> bytes:
        if words[:2] != [b"SENTINEL", b"MASTER"]:
            return b"+OK\r\n"
        self.asked += 1
        fields = {"ip": "127.0.0.1", "port": self.primary, "config-epoch": self.epoch, "flags": self.flags}
        flat = [str(part).encode() for pair in fields.items() for part in pair]
        return b"*%d\r\n" % len(flat) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in flat)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _command(stream: BinaryIO) -> list[bytes]:
    """Empty at the end."""
    count = stream.readline()
    words = []
    for _ in range(int(count[1:] or 0)):
        size = int(stream.readline()[1:])
        words.append(stream.read(size + 2)[:-2])
    return words


@contextmanager
def stub_sentinel(port: int, epoch: int = 0, flags: str = "master") -> Iterator[StubSentinel]:
    stub = StubSentinel(port, epoch, flags)
    try:
        yield stub
    finally:
        stub.close()
