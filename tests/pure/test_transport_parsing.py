"""The reading of answers, byte by byte: how they are cut into pieces changes nothing, and no garbage gets through."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from workers.errors import AttemptFailed
from workers.transport.connection import MAX_HEAD_BYTES, MAX_HEADERS, Connection
from workers.transport.lean import Stale
from workers.transport.types import Answer, Call

MAX_BYTES = 5_000


class Wire(asyncio.Transport):
    """Takes what is written; nothing goes anywhere."""

    written = b""
    aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.aborted = True

    def get_write_buffer_size(self) -> int:
        return 0


@dataclass(frozen=True)
class Read:
    """What became of a call: its answer or failure, and whether the connection may serve another."""

    answer: tuple[int, dict[str, str], bytes] | None
    failure: str
    usable: bool


def read(pieces: Sequence[bytes], method: str = "POST", *, ends: bool = True) -> Read | None:
    """Feed the pieces to a new connection, then its end. None: still waiting for more (only if not `ends`)."""

    async def main() -> Read | None:
        wire, gone = Wire(), list[Connection]()
        connection = Connection(asyncio.get_running_loop(), gone.append)
        connection.connection_made(wire)
        future = connection.send(Call(method, "http://h/", max_bytes=MAX_BYTES), b"head", connection.loop.time())
        for piece in pieces:
            if not connection.closed:
                connection.data_received(piece)
        usable = connection.usable
        assert wire.aborted is connection.closed
        if not ends and not future.done():
            return None
        connection.eof_received()
        connection.connection_lost(None)
        assert gone == [connection]
        assert wire.aborted
        error = future.exception()
        if error is None:
            answer = future.result()
            assert isinstance(answer, Answer)
            return Read((answer.status, answer.headers, answer.body), "", usable)
        assert isinstance(error, (AttemptFailed, Stale)), error
        return Read(None, error.kind if isinstance(error, AttemptFailed) else "stale", usable)

    return asyncio.run(main())


@dataclass(frozen=True)
class Sent:
    """An answer a server may send: `wire`, and what must be understood. `framed`: its end shows without closing."""

    wire: bytes
    status: int
    body: bytes
    framed: bool
    headers: dict[str, str] = field(default_factory=dict)


names = st.from_regex(r"X-[A-Za-z0-9-]{1,8}", fullmatch=True)
values = st.from_regex(r"[!-~]([ -~]{0,12}[!-~])?", fullmatch=True)


@st.composite
def answers(draw: st.DrawFn) -> Sent:
    status = draw(st.sampled_from([200, 201, 204, 304, 400, 404, 429, 500, 503]))
    fields = draw(st.dictionaries(names.map(str.lower), values, max_size=4))
    body = draw(st.binary(max_size=200))
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * draw(st.integers(0, 2))
    head = f"HTTP/1.1 {status} Reason\r\n" + "".join(f"{name.upper()}: {value}\r\n" for name, value in fields.items())
    if status in (204, 304):
        return Sent(interim + head.encode() + b"\r\n", status, b"", True, fields)
    if framing == "length":
        fields["content-length"] = str(len(body))
        wire = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    elif framing == "chunked":
        fields["transfer-encoding"] = "chunked"
        wire = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + draw(chunked(body))
    else:
        wire = f"{head}\r\n".encode() + body
    return Sent(interim + wire, status, body, framing != "close", fields)


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    wire = b""
    while body:
        size = draw(st.integers(1, len(body)))
        extension = draw(st.sampled_from([b"", b";a", b";a=b", b';a="x;y"']))
        zeros = b"0" * draw(st.integers(0, 3))
        wire += zeros + b"%X%s\r\n%s\r\n" % (size, extension, body[:size])
        body = body[size:]
    return wire + b"0\r\n" + draw(st.sampled_from([b"", b"X-Trailer: 1\r\n", b"X-T:\r\nY: 2\r\n"])) + b"\r\n"


def cut(wire: bytes, places: Sequence[int]) -> list[bytes]:
    at = sorted({place % len(wire) for place in places} - {0})
    return [wire[start:end] for start, end in zip([0, *at], [*at, len(wire)], strict=True)]


@given(answers(), st.lists(st.integers(0, 2_000), max_size=12))
def test_the_pieces_it_comes_in_change_nothing(sent: Sent, places: list[int]) -> None:
    expected = Read((sent.status, sent.headers, sent.body), "", sent.framed)
    assert read([sent.wire]) == expected
    assert read(cut(sent.wire, places)) == expected


@given(answers())
def test_every_single_byte_may_come_alone(sent: Sent) -> None:
    pieces = [sent.wire[place : place + 1] for place in range(len(sent.wire))]
    assert read(pieces) == Read((sent.status, sent.headers, sent.body), "", sent.framed)


@given(answers(), st.integers(0, 2_000))
def test_a_part_of_an_answer_is_none(sent: Sent, place: int) -> None:
    part = sent.wire[: place % len(sent.wire)]
    told = read([part] if part else [])
    assert told is not None
    if sent.framed or told.answer is None:
        assert told.failure == ("cut" if part else "stale")
    assert not part or not told.usable or told.answer is None


@given(answers(), st.binary(min_size=1, max_size=40).filter(lambda extra: extra.strip(b"\r\n") != b""))
@example(Sent(b"HTTP/1.1 204 No\r\n\r\n", 204, b"", True), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno")
@example(Sent(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", True, {"content-length": "2"}), b"H")
def test_what_follows_an_answer_costs_the_connection_and_nothing_else(sent: Sent, extra: bytes) -> None:
    if sent.framed:
        expected = Read((sent.status, sent.headers, sent.body), "", usable=False)
        assert read([sent.wire + extra]) == expected
        assert read([sent.wire, extra]) == expected


@given(answers(), st.lists(st.tuples(st.integers(0, 2_000), st.binary(max_size=3)), min_size=1, max_size=4))
def test_an_answer_with_bytes_changed_is_an_answer_or_a_failure(sent: Sent, changes: list[tuple[int, bytes]]) -> None:
    wire = sent.wire
    for place, put in changes:
        at = place % len(wire)
        wire = wire[:at] + put + wire[at + len(put) :]
    told = read([wire])
    assert told is not None
    assert told.failure in ("", "cut", "malformed", "too_large", "stale")


@given(st.lists(st.one_of(st.binary(min_size=1, max_size=60), st.sampled_from([
    b"HTTP/1.1 ", b"200 OK\r\n", b"\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"3\r\n", b"abc",
    b"0\r\n\r\n", b"HTTP/1.1 100 C\r\n\r\n", b"HTTP/1.1 101 S\r\n\r\n", b"Connection: close\r\n", b":", b"ffffffff\r\n",
])), max_size=12), st.sampled_from(["POST", "HEAD"]))  # fmt: skip
def test_garbage_is_a_failure_or_by_chance_an_answer(pieces: list[bytes], method: str) -> None:
    assert read(pieces, method) is not None


def test_nothing_without_end_is_read_to_the_end() -> None:
    ok = b"HTTP/1.1 200 OK\r\n"
    endless = {
        "headers": [ok, *[b"X-A: y\r\n"] * (MAX_HEADERS + 2)],
        "one header": [ok + b"X-A: ", *[b"y" * 1_000] * 40],
        "one piece": [ok + b"X-A: " + b"y" * (MAX_HEAD_BYTES + 10)],
        "the reason": [b"HTTP/1.1 200 ", *[b"y" * 1_000] * 40],
        "interim answers": [b"HTTP/1.1 100 Continue\r\n\r\n"] * 2_000,
        "an extension": [ok + b"Transfer-Encoding: chunked\r\n\r\n1;", *[b"y" * 1_000] * 40],
        "a trailer": [ok + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX: ", *[b"y" * 1_000] * 40],
        "trailers": [ok + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", *[b"X: y\r\n"] * 200],
        "zeros of a size": [ok + b"Transfer-Encoding: chunked\r\n\r\n", *[b"0" * 1_000] * 40],
    }
    for what, pieces in endless.items():
        told = read(pieces, ends=False)
        assert told is not None, what
        assert told.failure == "malformed", what
        assert not told.usable


def test_a_head_answer_leaves_the_connection_to_the_next() -> None:
    told = read([b"HTTP/1.1 200 OK\r\nContent-Length: 5000000000\r\n\r\n"], "HEAD", ends=False)
    assert told == Read((200, {"content-length": "5000000000"}, b""), "", usable=True)
    told = read([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"], "HEAD", ends=False)
    assert told is not None
    assert not told.usable
