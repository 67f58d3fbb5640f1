"""An endpoint in a process of its own: `python -m bench.endpoint --port P [--delay S] [--stamps]`.

It answers every POST after the delay, notes when the body with `"n"` arrived (monotonic clock, ns: the same for all
processes of a machine) and when it was answered, and tells at GET /stats, /stamps and /answers; GET /reset begins anew.
As lean as it can be: it must not be what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any, cast

from bench.job import ANSWER


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


class Tally:
    """What is told."""

    def __init__(self, delay: float, stamps: bool) -> None:
        self.delay, self.keep = delay, stamps
        self.served = self.open = self.most = 0
        self.stamps: dict[int, int] = {}
        self.answers: list[int] = []

    def reset(self) -> None:
        self.served, self.most = 0, self.open
        self.stamps.clear()
        self.answers.clear()

    def stats(self) -> dict[str, Any]:
        return {"served": self.served, "open": self.open, "most": self.most}

    def arrived(self, body: bytes) -> None:
        self.open += 1
        self.most = max(self.most, self.open)
        if self.keep:
            at = body.find(b'"n":"') + 5
            self.stamps[int(body[at : at + 9])] = time.monotonic_ns()

    def answered(self) -> None:
        self.open -= 1
        self.served += 1
        if self.keep:
            self.answers.append(time.monotonic_ns())


class Connection(asyncio.Protocol):
    """One request after the other."""

    def __init__(self, tally: Tally, loop: asyncio.AbstractEventLoop) -> None:
        self.tally, self.loop = tally, loop
        self.data = b""
        self.done = _answer(ANSWER.encode())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.data += data
        end = self.data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self.data[:end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self.data) < end + 4 + length:
            return
        body, self.data = self.data[end + 4 : end + 4 + length], self.data[end + 4 + length :]
        self._request(head, body)

    def _request(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get /stats "):
            self.transport.write(_answer(json.dumps(self.tally.stats()).encode()))
        elif head.startswith(b"get /stamps "):
            self.transport.write(_answer(json.dumps(self.tally.stamps).encode()))
        elif head.startswith(b"get /answers "):
            self.transport.write(_answer(json.dumps(self.tally.answers).encode()))
        elif head.startswith(b"get /reset "):
            self.tally.reset()
            self.transport.write(_answer(b"{}"))
        elif head.startswith(b"get "):
            self.transport.write(_answer(b"{}"))
        else:
            self.tally.arrived(body)
            if self.tally.delay:
                self.loop.call_later(self.tally.delay, self._finish)
            else:
                self._finish()

    def _finish(self) -> None:
        self.tally.answered()
        if not self.transport.is_closing():
            self.transport.write(self.done)


async def _serve(options: argparse.Namespace) -> None:
    loop, tally = asyncio.get_running_loop(), Tally(options.delay, options.stamps)
    hosts = [f"127.0.0.{number}" for number in range(1, options.hosts + 1)]
    listening = await loop.create_server(lambda: Connection(tally, loop), hosts, options.port, backlog=4096)
    async with listening:
        await listening.serve_forever()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.endpoint")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--hosts", type=int, default=1, help="listen on 127.0.0.1 to 127.0.0.N")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds until the answer")
    parser.add_argument("--stamps", action="store_true", help="note when each body arrived and was answered")
    options = parser.parse_args()
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(options))
    else:
        uvloop.run(_serve(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
