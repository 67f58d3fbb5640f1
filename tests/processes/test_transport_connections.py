"""Every transport: limits, cancels, and connections: kept, closed under us, never more than the slots."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.support.endpoints import BadServer, Peer, Script
from tests.support.transports import (
    CHUNKED,
    OK,
    PATIENT,
    QUICK,
    WHOLE,
    Scenario,
    every,
    every_loop,
    every_that_cancels,
    every_that_drops_the_surplus,
    failure,
    play,
    post,
    sends,
)
from workers.transport import Call, Transport, TransportName

pytestmark = every_loop


async def hangs(peer: Peer) -> None:
    await peer.request()
    await peer.closed_by_client()


def drips(headers: bytes) -> Script:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(headers)
        while True:
            await peer.send(b"1\r\nx\r\n")
            await asyncio.sleep(0.05)

    return script


async def drips_headers(peer: Peer) -> None:
    await peer.request()
    await peer.send(OK)
    while True:
        await peer.send(b"X-A: y\r\n")
        await asyncio.sleep(0.05)


async def stalls(peer: Peer) -> None:
    await peer.request()
    await peer.send(OK + b"Content-Length: 20\r\n\r\nok")
    await peer.closed_by_client()


UNANSWERED = {"hang": hangs, "headers-dripping": drips_headers}
IN_THE_BODY = {"stall": stalls, "drip": drips(CHUNKED)}


@every
@pytest.mark.parametrize(
    ("case", "kind", "least", "most"),
    [
        ("hang", "first_byte_timeout", 0.4, 0.9),
        ("headers-dripping", "first_byte_timeout", 0.4, 0.9),
        ("stall", "idle_timeout", 0.3, 0.9),
        ("drip", "attempt_timeout", 1.0, 1.6),
    ],
)
def test_a_limit_that_passes_ends_the_attempt(
    name: TransportName, loop: str, case: str, kind: str, least: float, most: float
) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        now = asyncio.get_running_loop().time
        began = now()
        failed = await failure(transport, post(server))
        assert failed.kind == kind
        assert least - 0.01 <= now() - began < most

    play(name, loop, (UNANSWERED | IN_THE_BODY)[case], scenario)


async def times_out(server: BadServer, transport: Transport) -> None:
    await failure(transport, post(server))
    async with asyncio.timeout(1):
        await server.until(lambda server: server.open == 0)


async def is_canceled(server: BadServer, transport: Transport) -> None:
    task = asyncio.ensure_future(transport.send(post(server, PATIENT)))
    await server.until(lambda server: len(server.requests) == 1)
    await asyncio.wait([task], timeout=0.1)  # into the answer, where there is one
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(1):
        await server.until(lambda server: server.open == 0)


@every_that_cancels
@pytest.mark.parametrize("case", UNANSWERED)
@pytest.mark.parametrize("end", [times_out, is_canceled])
def test_ending_an_unanswered_attempt_closes_the_connection(
    name: TransportName, loop: str, case: str, end: Scenario
) -> None:
    play(name, loop, UNANSWERED[case], end)


@every
@pytest.mark.parametrize("case", IN_THE_BODY)
@pytest.mark.parametrize("end", [times_out, is_canceled])
def test_ending_an_attempt_within_the_body_closes_the_connection(
    name: TransportName, loop: str, case: str, end: Scenario
) -> None:
    play(name, loop, IN_THE_BODY[case], end)


@every
def test_a_connection_that_is_refused_or_never_made(name: TransportName, loop: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        for url in ("http://127.0.0.1:1/", "http://nosuchhost.invalid/"):
            assert (await failure(transport, Call("POST", url, timeouts=QUICK))).kind == "connect"
        with socket.socket() as full:  # nobody accepts, and the queue of those who wait is full
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            waiting = [socket.socket() for _ in range(4)]
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            call = Call("POST", "http://{}:{}/".format(*full.getsockname()), timeouts=QUICK)
            assert (await failure(transport, call)).kind == "connect_timeout"
            for one in waiting:
                one.close()

    play(name, loop, hangs, scenario)


@every
def test_a_half_read_connection_is_never_handed_on(name: TransportName, loop: str) -> None:
    """The first call on each connection is canceled within its body; nobody may get the rest of it as an answer."""

    async def script(peer: Peer) -> None:
        first = await peer.request()
        if first is not None and first.body == b"poison":
            await peer.send(OK + b"Content-Length: 2000\r\n\r\n" + b"x" * 10)
            await peer.server.until(lambda server: len(server.requests) >= 2)
            await peer.send(b"y" * 1990 + WHOLE.replace(b"ok", b"no"))
        else:
            await peer.send(WHOLE)
        await peer.closed_by_client()

    async def scenario(server: BadServer, transport: Transport) -> None:
        task = asyncio.ensure_future(transport.send(post(server, PATIENT, body=b"poison")))
        await server.until(lambda server: len(server.requests) == 1)
        await asyncio.sleep(0.05)  # into the body
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await transport.send(post(server, PATIENT))).body == b"ok"
        assert [received.connection for received in server.requests] == [1, 2]

    play(name, loop, script, scenario)


@every_that_drops_the_surplus
def test_what_comes_after_an_answer_is_nobodys_answer(name: TransportName, loop: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        assert (await transport.send(post(server, PATIENT))).body == b"ok"
        await asyncio.sleep(0.05)
        second = await asyncio.gather(transport.send(post(server, PATIENT)), return_exceptions=True)
        assert getattr(second[0], "kind", "malformed") in ("malformed", "cut")
        assert getattr(second[0], "body", b"ok") in (b"ok", b"")

    play(name, loop, sends(WHOLE + WHOLE.replace(b"ok", b"no"), "wait"), scenario)


def closes_on_reuse(how: str, times: int = 1) -> Script:
    """Keeps the connection after an answer, and closes it when the next request has come: the race, made sure."""
    left = times

    async def script(peer: Peer) -> None:
        nonlocal left
        served = 0
        while await peer.request() is not None:
            if served and left:
                left -= 1
                if how == "reset":
                    peer.reset()
                elif how == "half":
                    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
                return
            await peer.send(WHOLE)
            served += 1

    return script


@every
@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_kept_connection_closed_under_us_costs_one_silent_resend(
    name: TransportName, loop: str, how: str, method: str
) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        for _ in range(2):
            sent = b"hello" if method == "POST" else b""
            assert (await transport.send(post(server, PATIENT, method=method, body=sent))).body == b"ok"
        assert [received.connection for received in server.requests] == [1, 1, 2]

    play(name, loop, closes_on_reuse(how), scenario)


@every
def test_an_answer_that_has_begun_is_not_asked_for_again(name: TransportName, loop: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        await transport.send(post(server, PATIENT))
        assert (await failure(transport, post(server, PATIENT))).kind == "cut"
        assert len(server.requests) == 2

    play(name, loop, closes_on_reuse("half"), scenario)


@every
def test_a_server_that_closes_every_request_is_asked_twice_at_most(name: TransportName, loop: str) -> None:
    async def script(peer: Peer) -> None:
        if await peer.request() is not None and peer.number == 1:
            await peer.send(WHOLE)
            await peer.request()

    async def scenario(server: BadServer, transport: Transport) -> None:
        await transport.send(post(server, PATIENT))
        assert (await failure(transport, post(server, PATIENT))).kind == "cut"
        assert len(server.requests) == 3

    play(name, loop, script, scenario)


@every
def test_connections_the_server_has_closed_are_not_used(name: TransportName, loop: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        for _ in range(3):
            assert (await transport.send(post(server, PATIENT))).body == b"ok"
            await server.until(lambda server: server.open == 0)
        assert len(server.requests) == 3

    play(name, loop, sends(WHOLE), scenario)


@every
def test_connections_are_kept_but_not_beyond_idle_discard(name: TransportName, loop: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        for pause in (0.0, 0.5, 0.0):
            await transport.send(post(server, PATIENT))
            await asyncio.sleep(pause)
        assert [received.connection for received in server.requests] == [1, 1, 2]
        if name != "httpx":  # which closes them when it is next used
            await server.until(lambda server: server.open == 0)

    play(name, loop, sends(WHOLE, "wait", again=True), scenario, idle_discard=0.3)


@every
def test_never_more_connections_than_slots(name: TransportName, loop: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        async def client() -> None:
            for _ in range(40):
                assert (await transport.send(post(server, PATIENT))).body == b"ok"

        await asyncio.gather(*(client() for _ in range(24)))
        assert server.most_open <= 8
        assert len(server.requests) == 24 * 40

    play(name, loop, sends(WHOLE, "wait", again=True), scenario, slots=8)


@every
def test_slots_come_back_from_failures_and_cancels(name: TransportName, loop: str) -> None:
    async def script(peer: Peer) -> None:
        while (received := await peer.request()) is not None:
            if received.body == b"break":
                return
            await peer.send(WHOLE if received.body == b"hello" else b"")

    async def scenario(server: BadServer, transport: Transport) -> None:
        for _ in range(3):
            task = asyncio.ensure_future(transport.send(post(server, body=b"hang")))
            calls = [failure(transport, post(server, body=body)) for body in (b"break", b"hang")]
            await asyncio.wait([task], timeout=0.05)
            task.cancel()
            assert [failed.kind for failed in await asyncio.gather(*calls)] == ["cut", "first_byte_timeout"]
        assert (await transport.send(post(server, PATIENT))).body == b"ok"

    play(name, loop, script, scenario, slots=2)


@every
def test_waiting_for_a_slot_counts_towards_the_limits(name: TransportName, loop: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        failed = await asyncio.gather(*(failure(transport, post(server)) for _ in range(3)))
        assert {one.kind for one in failed} == {"first_byte_timeout"}

    play(name, loop, hangs, scenario, slots=1)


@every
def test_a_large_body_goes_out_whole(name: TransportName, loop: str) -> None:
    async def script(peer: Peer) -> None:
        received = await peer.request()
        assert received is not None
        await peer.send(OK + b"Content-Length: 6\r\n\r\n%06d" % len(received.body))

    async def scenario(server: BadServer, transport: Transport) -> None:
        answer = await transport.send(post(server, PATIENT, body=b"x" * 262_144))
        assert answer.body == b"262144"

    play(name, loop, script, scenario)
