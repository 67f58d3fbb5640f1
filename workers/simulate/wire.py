"""HTTP/1.1 by hand, one connection each: fast enough to be no bottleneck, and free to break the rules."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Final, cast

from workers.simulate.answers import WORK_PATHS, Question, answer, bomb, error, events
from workers.simulate.behaviour import Fate
from workers.simulate.endpoint import Endpoint, Incoming

MAX_HEAD: Final = 65_536
MAX_BODY: Final = 64 * 1024 * 1024
_PIECE: Final = b"x" * 65_536
_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}


class BadRequest(Exception):
    """Not HTTP as it is spoken here; the message says why."""


class Connection(asyncio.Protocol):
    """Reads one request after the other, asks the endpoint, and does what it decided."""

    def __init__(self, endpoint: Endpoint, open_connections: set[Connection]) -> None:
        self._endpoint, self._all = endpoint, open_connections
        self._buffer = bytearray()
        self._request: Incoming | None = None  # the work that is going on
        self._began = 0.0
        self._echo = ""  # header line for its answer
        self._busy = self._carried_work = self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0  # bytes of a huge body yet to be sent

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self._all.add(self)
        self._endpoint.stats.socket(+1)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._busy:
            self._next()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._pour()

    def connection_lost(self, problem: Exception | None) -> None:
        self._all.discard(self)
        self._left = 0
        if self._timer is not None:
            self._timer.cancel()
        self._over("aborted")
        self._endpoint.stats.socket(-1)
        if self._carried_work:
            self._endpoint.stats.connection(-1)

    # Reading

    def _next(self) -> None:
        """Begin the next request, if it is here as a whole."""
        try:
            request = self._parse()
        except BadRequest as problem:
            self._reply(400, json.dumps(error(400, str(problem))).encode(), close=True)
            return
        if request is None:
            return
        self._busy = True
        if request.method == "POST" and request.path in WORK_PATHS:
            self._work(request)
            return
        plain = self._endpoint.plain(request)
        if plain is not None:
            self._reply(plain[0], json.dumps(plain[1]).encode(), head_only=request.method == "HEAD")

    def _parse(self) -> Incoming | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise BadRequest("the headers are too long")
            return None
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not length.isdigit() or int(length) > MAX_BODY:
            raise BadRequest("send the body with a Content-Length of at most 64 MiB")
        whole = end + 4 + int(length)
        if len(self._buffer) < whole:
            return None
        try:
            method, target, _version = first.split(" ")
        except ValueError:
            raise BadRequest("the request line is not HTTP") from None
        body = bytes(self._buffer[end + 4 : whole])
        del self._buffer[:whole]
        return Incoming(method, target.partition("?")[0], headers, body)

    # Working

    def _work(self, request: Incoming) -> None:
        stats = self._endpoint.stats
        if not self._carried_work:
            self._carried_work = True
            stats.connection(+1)
        self._request, self._echo = request, request.echo
        self._began = stats.began(request.path, request.task, request.attempt)
        fate, question, complaint = self._endpoint.decide(request)
        if fate.delay > 0:
            self._timer = self._loop.call_later(fate.delay, self._act, fate, question, complaint)
        else:
            self._act(fate, question, complaint)

    def _act(self, fate: Fate, question: Question | None, complaint: str) -> None:
        self._timer = None
        mode = fate.mode
        if mode == "status" or question is None:
            self._over(str(fate.status))
            headers = f"Retry-After: {fate.retry_after:g}\r\n" if fate.retry_after else ""
            self._reply(fate.status, json.dumps(error(fate.status, complaint)).encode(), self._echo + headers)
        elif mode == "hang":
            return  # until the client goes
        elif mode == "drip":
            self._drip(_message(200, json.dumps(answer(question)).encode(), self._echo))
        elif mode == "huge":
            self._left = self._endpoint.behaviour.huge_bytes
            self._transport.write(_head(200, self._left))
            self._pour()
        else:
            self._over("200" if mode == "ok" else mode)
            self._send(mode, question)

    def _send(self, mode: str, question: Question) -> None:
        """The answer, or what stands in its place, all at once."""
        if mode == "reset":
            self._transport.abort()
        elif mode == "close":
            self._transport.close()
        elif mode == "malformed":
            self._close_after(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nno chunk\r\n")
        elif mode == "gzip_bomb":
            self._reply(200, bomb(), "Content-Encoding: gzip\r\n")
        elif mode == "bad_json":
            self._reply(200, b'{"choices": [{"mess')
        elif mode == "unsuccessful":
            self._reply(200, b'{"success": false, "error": "simulated failure"}')
        elif mode == "cut":
            message = _stream(question) if question.stream else _message(200, json.dumps(answer(question)).encode())
            self._close_after(message[: -len(message) // 4])
        elif mode == "events_cut":
            self._write(_stream(question, whole=False))
        elif question.stream:
            self._write(_stream(question, self._echo))
        else:
            self._reply(200, json.dumps(answer(question)).encode(), self._echo)

    def _over(self, outcome: str) -> None:
        """The work is done with, once."""
        request, self._request = self._request, None
        if request is not None:
            self._endpoint.stats.ended(request.path, request.task, request.attempt, outcome, self._began)

    def _drip(self, rest: bytes) -> None:
        now = rest.find(b"\r\n\r\n") + 4 if rest.startswith(b"HTTP/") else 1  # the headers at once, then by bytes
        self._transport.write(rest[:now])
        if len(rest) > now:
            self._timer = self._loop.call_later(self._endpoint.behaviour.drip_interval, self._drip, rest[now:])
        else:
            self._over("drip")
            self._write(b"")

    def _pour(self) -> None:
        """Go on with a huge body for as long as the client takes it."""
        while self._left > 0 and not self._paused and not self._transport.is_closing():
            piece = _PIECE[: self._left]
            self._left -= len(piece)
            self._transport.write(piece)
            if self._left == 0:
                self._over("huge")
                self._write(b"")

    # Writing

    def _reply(self, status: int, body: bytes, headers: str = "", close: bool = False, head_only: bool = False) -> None:
        message = _message(status, body, headers + ("Connection: close\r\n" if close else ""))
        if head_only:
            message = message[: len(message) - len(body)]
        if close:
            self._close_after(message)
        else:
            self._write(message)

    def _write(self, message: bytes) -> None:
        """The last bytes of an answer; then the next request may begin."""
        if message:
            self._transport.write(message)
        self._busy = False
        if self._buffer:
            self._loop.call_soon(self._next_if_idle)

    def _next_if_idle(self) -> None:
        if not self._busy and not self._transport.is_closing():
            self._next()

    def _close_after(self, message: bytes) -> None:
        self._transport.write(message)
        self._transport.close()

    def drop(self) -> None:
        self._transport.abort()


def _head(status: int, length: int, headers: str = "") -> bytes:
    reason = _REASONS.get(status, "Simulated")
    start = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
    return f"{start}{headers}\r\n".encode("latin-1")


def _message(status: int, body: bytes, headers: str = "") -> bytes:
    return _head(status, len(body), headers) + body


def _stream(question: Question, headers: str = "", whole: bool = True) -> bytes:
    chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events(question, whole)]
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    return f"{head}{headers}\r\n".encode("latin-1") + b"".join(chunks) + b"0\r\n\r\n"
