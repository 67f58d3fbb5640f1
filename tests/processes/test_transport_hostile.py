"""Endpoints that attack their client, on every transport: bombs end early with little memory, nothing is followed."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.support.endpoints import BadServer, Peer, bad_server
from tests.support.transports import CHUNKED, EVENTS, OK, PATIENT, WHOLE, every, every_loop, failure, play, post, sends
from workers.transport import Timeouts, Transport, TransportName

pytestmark = every_loop

MEBIBYTE = 1 << 20
MOST_MIB = 48  # an answer may have 100 kB here; the server of the attack lives in this process too
SHORT = Timeouts(connect=2, first_byte=2, idle=2, attempt=3)
LINE = b"X-A: " + b"a" * 1000 + b"\r\n"

# Sent first, then again and again without end.
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "headers": (OK, LINE * 64),
    "one-header": (OK + b"X-A: ", b"a" * 65_536),
    "status-line": (b"HTTP/1.1 200 ", b"a" * 65_536),
    "interim-answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "body-of-5-gb": (OK + b"Content-Length: 5000000000\r\n\r\n", b"a" * 65_536),
    "body-until-closed": (OK + b"\r\n", b"a" * 65_536),
    "chunks": (CHUNKED, b"10000\r\n" + b"x" * 65_536 + b"\r\n"),
    "one-byte-chunks": (CHUNKED, b"1\r\nx\r\n" * 4000),
    "chunk-extension": (CHUNKED + b"1;", b"a" * 65_536),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", LINE * 64),
    "events": (EVENTS + b"\r\n", b"data: {}\n\n" * 6000),
    "error-body": (b"HTTP/1.1 500 No\r\nContent-Length: 5000000000\r\n\r\n", b"a" * 65_536),
}


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory(what: str) -> int:
    """MiB: VmRSS now, VmHWM the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(what))) >> 10


@every
@pytest.mark.parametrize("case", ENDLESS)
def test_what_never_ends_is_ended_with_little_memory(name: TransportName, loop: str, case: str) -> None:
    if loop != "asyncio":
        pytest.skip("the loop makes no difference to what is kept")
    first, rest = ENDLESS[case]

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(first)
        while True:
            await peer.send(rest)

    async def scenario(server: BadServer, transport: Transport) -> None:
        forget_peak()
        before = memory("VmRSS")
        if case == "error-body":
            assert len((await transport.send(post(server, SHORT))).body) == 100_000
        else:
            await failure(transport, post(server, SHORT))
        assert memory("VmHWM") - before < MOST_MIB
        await server.until(lambda server: server.open == 0)

    play(name, loop, script, scenario)


@every
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "gzip, gzip", "x-gzip", "GZIP"])
@pytest.mark.parametrize("status", [200, 400])
def test_no_coding_is_undone(name: TransportName, loop: str, coding: str, status: int) -> None:
    if loop != "asyncio":
        pytest.skip("the loop makes no difference to what is inflated")
    bomb = BOMB
    head = f"HTTP/1.1 {status} X\r\nContent-Encoding: {coding}\r\nContent-Length: {len(bomb)}\r\n\r\n"

    async def scenario(server: BadServer, transport: Transport) -> None:
        forget_peak()
        before = memory("VmRSS")
        call = post(server, PATIENT, max_bytes=MEBIBYTE)
        if status == 200:
            assert (await failure(transport, call)).kind == "malformed"
        else:
            assert (await transport.send(call)).body == b""
        assert memory("VmHWM") - before < MOST_MIB

    play(name, loop, sends(head.encode() + bomb, "wait"), scenario)


BOMB = gzip.compress(bytes(100 * MEBIBYTE))


@every
@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_a_redirect_leads_nowhere(name: TransportName, loop: str, status: int) -> None:
    """Its target hears nothing, so no key can go there; not even the endpoint itself is asked again."""
    target = BadServer()

    async def script(peer: Peer) -> None:
        await peer.request()
        location = f"HTTP/1.1 {status} Go\r\nLocation: {target.url}/x\r\nRefresh: 0; url={target.url}\r\n"
        await peer.send(f"{location}Content-Length: 2\r\n\r\nno".encode())

    async def scenario(server: BadServer, transport: Transport) -> None:
        nonlocal target
        async with bad_server(sends(WHOLE)) as target:
            call = post(server, PATIENT, headers=(("authorization", "Bearer key"),))
            assert (await transport.send(call)).status == status
            assert target.connections == 0
        assert len(server.requests) == 1

    play(name, loop, script, scenario)


SMUGGLED = (
    ("X-A", "a\r\nX-Evil: b"), ("X-A", "a\nX-Evil: b"), ("X-A", "a\rX-Evil: b"), ("X-A", "a\0b"),
    ("X-A\r\nX-Evil", "b"), ("X-A: b\r\nX-Evil", "c"), ("X A", "b"), ("", "b"),
    ("X-A", "a\r\n\r\nGET /evil HTTP/1.1\r\n\r\n"),
)  # fmt: skip


@every
@pytest.mark.parametrize("field", SMUGGLED, ids=range(len(SMUGGLED)))
def test_a_header_cannot_become_two(name: TransportName, loop: str, field: tuple[str, str]) -> None:
    """The last wall, should a check before it fail. The value, which may be a key, is not told."""

    async def scenario(server: BadServer, transport: Transport) -> None:
        call = post(server, PATIENT, headers=(field,))
        failed = await failure(transport, call)
        assert failed.kind == "task_error"
        assert "Evil" not in str(failed) or "Evil" in field[0]
        assert not server.requests

    play(name, loop, sends(WHOLE, again=True), scenario)


@every
def test_nothing_is_remembered_from_one_answer_to_the_next(name: TransportName, loop: str) -> None:
    """No cookie, no permanent redirect, no alternative service, no strict transport."""
    data = (
        b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b; Path=/\r\nAlt-Svc: h2=\"evil.invalid:443\"\r\n"
        b"Strict-Transport-Security: max-age=999\r\nWWW-Authenticate: Basic\r\nContent-Length: 2\r\n\r\nok"
    )  # fmt: skip

    async def scenario(server: BadServer, transport: Transport) -> None:
        for _ in range(3):
            assert (await transport.send(post(server, PATIENT))).body == b"ok"
        for received in server.requests:
            assert received.header("cookie") is received.header("authorization") is None

    play(name, loop, sends(data, again=True), scenario)
