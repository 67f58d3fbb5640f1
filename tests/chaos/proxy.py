"""A TCP proxy before a Redis server that does, by command, what networks do.

    drop(kind)       the next reply of that kind ("": of any) is lost: the server has carried the command out, the
                     client's connection closes. `name` tells the kind of a request
    delay = 0.05     seconds that every reply is late
    blackhole(True)  takes everything, passes nothing, keeps the connections; new ones too
    half_close()     ends the server's side of every connection, as a peer that is gone but for its socket
    reset()          every connection ends with RST
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress


class _Link:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy, self.client, self.server = proxy, client, server
        self.asked = b""
        for source, target, replies in ((client, server, False), (server, client, True)):
            threading.Thread(target=self._pump, args=(source, target, replies), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                if self.proxy.swallows(self):
                    continue
                if not replies:
                    self.asked = data
                elif self.proxy.takes_reply(self.asked):
                    break
                if replies and self.proxy.delay:
                    time.sleep(self.proxy.delay)
                target.sendall(data)
        self.end()

    def end(self, *, hard: bool = False) -> None:
        for each in (self.client, self.server):
            with suppress(OSError):
                if hard:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    each.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                if hard:
                    each.shutdown(socket.SHUT_RD)
                each.close()
        self.proxy.forget(self)


class Proxy:
    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._to_drop: Counter[str] = Counter()
        self.name: Callable[[bytes], str] = lambda asked: ""
        self._hole: set[_Link] | None = None  # links that were swallowed once never speak again
        self._swallowing = False
        self.delay = 0.0
        self.dropped: Counter[str] = Counter()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def drop(self, kind: str = "") -> None:
        """One more reply beyond those that are still to be dropped."""
        with self._lock:
            self._to_drop[kind] += 1

    def pending(self, kind: str | None = None) -> int:
        """Replies still to be dropped, of one kind or of all."""
        with self._lock:
            return self._to_drop.total() if kind is None else self._to_drop[kind]

    def spare(self) -> None:
        with self._lock:
            self._to_drop.clear()

    def blackhole(self, on: bool) -> None:
        """Connections that were open while it was on stay dead: what they said is gone."""
        with self._lock:
            self._swallowing = on
            if on:
                self._hole = set(self._links)

    def half_close(self) -> int:
        links = self._every()
        for link in links:
            with suppress(OSError):
                link.client.shutdown(socket.SHUT_WR)
        return len(links)

    def reset(self) -> int:
        links = self._every()
        for link in links:
            link.end(hard=True)
        return len(links)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self._every():
            link.end()

    # For links

    def takes_reply(self, asked: bytes) -> bool:
        with self._lock:
            if not self._to_drop.total():
                return False
            kind = self.name(asked)
            found = next((each for each in (kind, "") if self._to_drop[each]), None)
            if found is None:
                return False
            self._to_drop[found] -= 1
            self.dropped[kind] += 1
            return True

    def swallows(self, link: _Link) -> bool:
        with self._lock:
            if self._swallowing and self._hole is not None:
                self._hole.add(link)
            return self._hole is not None and link in self._hole

    def forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)
            if self._hole is not None:
                self._hole.discard(link)

    def _every(self) -> list[_Link]:
        with self._lock:
            return list(self._links)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target, timeout=5)
                    server.settimeout(None)
                except OSError:
                    client.close()
                    continue
                link = _Link(self, client, server)
                with self._lock:
                    self._links.add(link)
