"""What the default transport refuses, though others may forgive it, and how it treats its connections."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.certificates import certificate
from tests.support.endpoints import BadServer, Peer
from tests.support.transports import CHUNKED, OK, PATIENT, WHOLE, every_loop, failure, play, post, sends
from workers.transport import AUTO, Call, Transport

pytestmark = every_loop
NAME = AUTO[0]
__all__ = ["certificate"]  # a fixture

MALFORMED: dict[str, bytes] = {
    "folded": OK + b"X-A: a\r\n b\r\nContent-Length: 2\r\n\r\nok",
    "folded-length": OK + b"Content-Length:\r\n 2\r\n\r\nok",
    "two-equal-lengths": OK + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nok",
    "length-plus": OK + b"Content-Length: +2\r\n\r\nok",
    "length-hex": OK + b"Content-Length: 0x2\r\n\r\nok",
    "length-empty": OK + b"Content-Length:\r\n\r\nok",
    "space-before-colon": OK + b"Content-Length : 2\r\n\r\nok",
    "no-colon": OK + b"X-A\r\nContent-Length: 2\r\n\r\nok",
    "nul": OK + b"X-A: a\0b\r\nContent-Length: 2\r\n\r\nok",
    "line-ends-bare": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    "return-bare": OK + b"X-A: a\rX-B: b\r\nContent-Length: 2\r\n\r\nok",
    "length-and-chunked": OK + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "chunked-and-length": CHUNKED[:-2] + b"Content-Length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "chunked-twice": CHUNKED[:-2] + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "gzip-chunked": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "chunked-gzip": OK + b"Transfer-Encoding: chunked, gzip\r\n\r\nok",
    "coding-unknown": OK + b"Transfer-Encoding: identity\r\n\r\nok",
    "chunked-in-1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "chunk-size-over-64-bit": CHUNKED + b"fffffffffffffffff\r\nok",
    "chunk-size-negative": CHUNKED + b"-2\r\nok",
    "chunk-size-0x": CHUNKED + b"0x2\r\nok\r\n0\r\n\r\n",
    "chunk-size-empty": CHUNKED + b"\r\nok\r\n0\r\n\r\n",
    "chunk-lines-bare": CHUNKED + b"2\nok\n0\n\n",
    "extension-with-bare-line-end": CHUNKED + b"2;a\nb\r\nok\r\n0\r\n\r\n",
    "trailer-with-length": CHUNKED + b"2\r\nok\r\n0\r\nContent-Length: 5\r\n\r\n",
    "http-2": b"HTTP/2.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "http-0.9": b"HTTP/0.9 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "rtsp": b"RTSP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "icy": b"ICY 200 OK\r\n\r\nok",
    "empty-line-first": b"\r\n" + WHOLE,
    "status-000": b"HTTP/1.1 000 OK\r\nContent-Length: 2\r\n\r\nok",
    "status-of-four": b"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\nok",
    "switching-without-headers": b"HTTP/1.1 101 Switching\r\n\r\n",
    "interim-then-nonsense": b"HTTP/1.1 100 Continue\r\n\r\nok",
    "tls-alert": b"\x15\x03\x03\x00\x02\x02\x28",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_framing_in_doubt_is_no_answer(loop: str, case: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        assert (await failure(transport, post(server))).kind == "malformed"
        await server.until(lambda server: server.open == 0)
        assert len(server.requests) == 1

    play(NAME, loop, sends(MALFORMED[case], "wait"), scenario)


@pytest.mark.parametrize("size", [b"ffffffffffffffff", b"7fffffffffffffff", b"100000"])
def test_a_huge_chunk_reserves_nothing(loop: str, size: bytes) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        assert (await failure(transport, post(server))).kind == "cut"

    play(NAME, loop, sends(CHUNKED + size + b"\r\nok", "close"), scenario)


SURPLUS: dict[str, bytes] = {
    "an-answer": WHOLE + WHOLE.replace(b"ok", b"no"),
    "half-an-answer": WHOLE + OK,
    "body-too-long": WHOLE + b"xx",
    "after-chunks": CHUNKED + b"2\r\nok\r\n0\r\n\r\nxx",
    "after-no-content": b"HTTP/1.1 204 No\r\n\r\nxx",
    "after-close": OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200",
}


@pytest.mark.parametrize("case", SURPLUS)
def test_surplus_closes_the_connection_at_once(loop: str, case: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        answer = await transport.send(post(server, PATIENT))
        assert answer.body == (b"" if answer.status == 204 else b"ok")
        await server.until(lambda server: server.open == 0)
        await transport.send(post(server, PATIENT))
        assert [received.connection for received in server.requests] == [1, 2]

    play(NAME, loop, sends(SURPLUS[case], "wait"), scenario)


def test_what_an_idle_connection_says_is_nobodys_answer(loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(WHOLE)
        if peer.number == 1:
            await peer.server.until(lambda server: told.is_set())
            await peer.send(WHOLE.replace(b"ok", b"no"))
        await peer.closed_by_client()

    async def scenario(server: BadServer, transport: Transport) -> None:
        await transport.send(post(server, PATIENT))
        told.set()
        server.changed.set()
        await server.until(lambda server: server.open == 0)
        assert (await transport.send(post(server, PATIENT))).body == b"ok"
        assert [received.connection for received in server.requests] == [1, 2]

    told = asyncio.Event()
    play(NAME, loop, script, scenario)


@pytest.mark.parametrize(
    "head",
    [OK + b"Connection: close\r\n", OK + b"Connection: x, Close\r\n", b"HTTP/1.0 200 OK\r\n"],
    ids=["close", "close-in-a-list", "http-1.0"],
)
def test_a_connection_that_is_not_to_be_kept_is_closed_by_us(loop: str, head: bytes) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        for _ in range(2):
            assert (await transport.send(post(server, PATIENT))).body == b"ok"
            await server.until(lambda server: server.open == 0)

    play(NAME, loop, sends(head + b"Content-Length: 2\r\n\r\nok", "wait"), scenario, slots=1)


def test_http_1_0_may_keep_its_connection(loop: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        for _ in range(2):
            assert (await transport.send(post(server, PATIENT))).body == b"ok"
        assert server.connections == 1

    answer = b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok"
    play(NAME, loop, sends(answer, again=True), scenario)


def test_answers_without_a_body_leave_the_connection_clean(loop: str) -> None:
    async def script(peer: Peer) -> None:
        while (received := await peer.request()) is not None:
            await peer.send(OK + b"Content-Length: 7\r\n\r\n" if received.head[0].startswith("HEAD") else WHOLE)

    async def scenario(server: BadServer, transport: Transport) -> None:
        for method, body in (("HEAD", b""), ("HEAD", b""), ("GET", b"ok"), ("HEAD", b""), ("POST", b"ok")):
            assert (await transport.send(post(server, PATIENT, method=method, body=b""))).body == body
        assert server.connections == 1

    play(NAME, loop, script, scenario)


def test_an_answer_that_comes_before_the_request_is_out(loop: str) -> None:
    """It counts, and the connection, on which the rest of the request is still to come, does not."""

    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await peer.server.until(lambda server: told.is_set())

    async def scenario(server: BadServer, transport: Transport) -> None:
        for _ in range(2):
            answer = await transport.send(post(server, PATIENT, body=b"x" * 30_000_000))
            assert (answer.status, answer.body) == (413, b"no")
        assert server.connections == 2
        told.set()
        server.changed.set()

    told = asyncio.Event()
    play(NAME, loop, script, scenario, slots=2)


@pytest.mark.parametrize("answered", [True, False])
def test_a_server_that_closes_only_its_own_side(loop: str, answered: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        if answered:
            await peer.send(WHOLE)
        peer.writer.write_eof()
        await peer.closed_by_client()

    async def scenario(server: BadServer, transport: Transport) -> None:
        for count in (1, 2):
            if answered:
                assert (await transport.send(post(server, PATIENT))).body == b"ok"
            else:
                assert (await failure(transport, post(server, PATIENT))).kind == "cut"
            await server.until(lambda server: server.open == 0)
            assert server.connections == len(server.requests) == count

    play(NAME, loop, script, scenario)


def test_what_cannot_be_sent_safely_is_not_sent(loop: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        evil = ("X-A", "a\r\nContent-Length: 0\r\n\r\nGET /admin HTTP/1.1\r\nHost: x")
        for call in (
            post(server, PATIENT, headers=(evil,)),
            post(server, PATIENT, headers=(("X-A: b\r\nX-B", "c"),)),
            post(server, PATIENT, method="GET / HTTP/1.1\r\nX:"),
            Call("GET", f"{server.url}/a b", timeouts=PATIENT),
            Call("GET", f"{server.url}/ HTTP/1.1\r\nX: y", timeouts=PATIENT),
        ):
            assert (await failure(transport, call)).kind == "task_error"
        assert (await transport.send(post(server, PATIENT))).body == b"ok"
        assert len(server.requests) == 1

    play(NAME, loop, sends(WHOLE), scenario)
