"""A TCP proxy before a Redis server that loses replies on demand."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class ReplyDropper:
    """Forwards everything, except that it may cut a connection when the server has carried out a command.

    proxy.drop(b"...", times=2): the next two requests that contain these bytes reach the server; when its reply comes,
    the connection to the client is closed instead.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._marker, self._times = b"", 0
        self._open: set[socket.socket] = set()
        self.dropped = 0
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def drop(self, marker: bytes, times: int = 1) -> None:
        with self._lock:
            self._marker, self._times = marker, times

    def cut(self) -> None:
        """Closes every connection now."""
        with self._lock:
            doomed = list(self._open)
        for connection in doomed:
            _close(connection)

    def close(self) -> None:
        _close(self._listener)
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                with self._lock:
                    self._open |= {client, server}
                    self.connections += 1
                doom = threading.Event()
                threading.Thread(target=self._requests, args=(client, server, doom), daemon=True).start()
                threading.Thread(target=self._replies, args=(client, server, doom), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, doom: threading.Event) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 20):
                with self._lock:
                    if self._times and self._marker in data:
                        self._times -= 1
                        doom.set()
                server.sendall(data)
        _close(server)

    def _replies(self, client: socket.socket, server: socket.socket, doom: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 20):
                if doom.is_set():
                    self.dropped += 1
                    break
                client.sendall(data)
        _close(client)
        _close(server)
        with self._lock:
            self._open -= {client, server}


def _close(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextmanager
def reply_dropper(port: int) -> Iterator[ReplyDropper]:
    """Before the server on this port of the loopback."""
    proxy = ReplyDropper(port)
    try:
        yield proxy
    finally:
        proxy.close()
