"""A stand-in for Redis servers that cannot be had: it answers every command, INFO with the lines it was given."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while (line := self.rfile.readline()) and line.startswith(b"*"):
            words = []
            for _ in range(int(line[1:])):
                size = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(size + 2)[:-2].upper())
            self.wfile.write(self._reply(words))

    def _reply(self, words: list[bytes]) -> bytes:
        if words[0] == b"INFO":
            assert isinstance(self.server, _Server)
            return b"$%d\r\n%s\r\n" % (len(self.server.info), self.server.info)
        if words[0] == b"HELLO":
            assert isinstance(self.server, _Server)
            known = b"redis_version:5" not in self.server.info  # servers before 6 do not know it
            return b"%1\r\n$5\r\nproto\r\n:3\r\n" if known else b"-ERR unknown command `HELLO`, with args\r\n"
        return b"+OK\r\n"


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    info = b""


@contextmanager
def stand_in(*info: str) -> Iterator[str]:
    """Its URL. `info`: lines such as `redis_version:6.2.14`."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.info = "\r\n".join(("# Server", *info, "")).encode()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"redis://127.0.0.1:{server.server_address[1]}/0"
        finally:
            server.shutdown()
            thread.join()
