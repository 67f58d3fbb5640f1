"""How the default transport treats its connections: which is used, given up, closed, and over TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.support.certificates import certificate, server_context
from tests.support.endpoints import BadServer, Peer
from tests.support.transports import OK, PATIENT, WHOLE, every_loop, failure, play, post, sends
from workers.errors import AttemptFailed
from workers.transport import AUTO, Call, Timeouts, Transport

pytestmark = every_loop
NAME = AUTO[0]
__all__ = ["certificate"]  # a fixture


def test_the_connection_used_last_is_used_next(loop: str) -> None:
    """So that those a burst opened lie idle, and are closed."""

    async def scenario(server: BadServer, transport: Transport) -> None:
        await asyncio.gather(*(transport.send(post(server, PATIENT)) for _ in range(4)))
        assert server.most_open == 4
        async with asyncio.timeout(3):
            while server.open > 1:
                await transport.send(post(server, PATIENT))
        assert len({received.connection for received in server.requests[4:]}) == 1

    async def script(peer: Peer) -> None:
        while await peer.request() is not None:
            await peer.server.until(lambda server: len(server.requests) >= 4)
            await peer.send(WHOLE)

    play(NAME, loop, script, scenario, slots=8, idle_discard=0.3)


@pytest.mark.parametrize("at_once", [1, 4])
def test_when_a_server_was_restarted_every_call_still_gets_its_answer(loop: str, at_once: int) -> None:
    """All kept connections are stale then: the resend must not run into the next of them."""

    async def scenario(server: BadServer, transport: Transport) -> None:
        for count in (4, at_once):
            answers = await asyncio.gather(*(transport.send(post(server, PATIENT)) for _ in range(count)))
            assert [answer.body for answer in answers] == [b"ok"] * count
        assert len(server.requests) == 4 + 2 * at_once
        assert server.connections == 4 + at_once

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.server.until(lambda server: len(server.requests) >= 4)
        await peer.send(WHOLE)
        await peer.request()

    play(NAME, loop, script, scenario, slots=4)


def test_a_resend_has_no_more_time_than_is_left(loop: str) -> None:
    """Not for the answer, and not for a slot either, if another call is first."""

    async def script(peer: Peer) -> None:
        await peer.request()
        if peer.number == 1:
            await peer.send(WHOLE)
            await peer.request()
            await asyncio.sleep(0.25)
        else:
            await peer.closed_by_client()

    async def scenario(server: BadServer, transport: Transport, others: int) -> None:
        await transport.send(post(server, PATIENT))
        now = asyncio.get_running_loop().time
        began = now()
        call = asyncio.ensure_future(failure(transport, post(server)))
        await asyncio.sleep(0)
        first = [asyncio.ensure_future(transport.send(post(server, PATIENT))) for _ in range(others)]
        assert (await call).kind == "first_byte_timeout"
        assert 0.39 < now() - began < 0.6  # the limit is 0.4, of which 0.25 passed before the resend
        for one in first:
            one.cancel()
        await asyncio.gather(*first, return_exceptions=True)

    for others in (0, 1):
        play(NAME, loop, script, partial(scenario, others=others), slots=1)


async def hangs(peer: Peer) -> None:
    await peer.request()
    await peer.closed_by_client()


def test_giving_up_while_waiting_costs_no_slot(loop: str) -> None:
    """Canceled while waiting, in the very moment of getting a connection or a slot, and while opening."""

    async def scenario(server: BadServer, transport: Transport) -> None:
        async def leads(body: bytes, turns: int) -> None:
            with suppress(AttemptFailed):
                await transport.send(post(server, PATIENT, body=body))
            for _ in range(turns):
                await asyncio.sleep(0)
            waits.cancel()

        for body in (b"keep", b"break"):
            for turns in range(8):
                leader = asyncio.ensure_future(leads(body, turns))
                await asyncio.sleep(0)  # so that this comes first
                waits = asyncio.ensure_future(transport.send(post(server, PATIENT)))
                await asyncio.sleep(0)  # and this second
                assert (await transport.send(post(server, PATIENT))).body == b"ok"
                await asyncio.gather(leader, waits, return_exceptions=True)

    async def script(peer: Peer) -> None:
        while (received := await peer.request()) is not None:
            if received.body == b"break":
                await peer.send(OK)
                return
            await peer.send(WHOLE)

    play(NAME, loop, script, scenario, slots=1)


def test_closing_fails_those_in_flight_and_those_who_wait(loop: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        calls = [asyncio.ensure_future(transport.send(post(server, PATIENT))) for _ in range(3)]
        await server.until(lambda server: len(server.requests) == 1)
        await transport.aclose()
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert [getattr(one, "kind", one) for one in failed] == ["cut"] * 3
        await server.until(lambda server: server.open == 0)
        assert (await failure(transport, post(server))).kind == "cut"

    play(NAME, loop, hangs, scenario, slots=1)


def test_a_body_nobody_reads_ends_at_the_limit(loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.server.until(lambda server: told.is_set())

    async def scenario(server: BadServer, transport: Transport) -> None:
        assert (await failure(transport, post(server, body=b"x" * 30_000_000))).kind == "first_byte_timeout"
        told.set()
        server.changed.set()

    told = asyncio.Event()
    play(NAME, loop, script, scenario)


def test_connections_over_tls_are_kept_and_bounded(loop: str, certificate: Path) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        for _ in range(3):
            answers = await asyncio.gather(
                *(transport.send(post(server, PATIENT, body=b"x" * 100_000)) for _ in range(4))
            )
            assert [answer.body for answer in answers] == [b"ok"] * 4
        assert server.connections <= 2

    context, trusted = server_context(certificate), str(certificate / "cert.pem")
    play(NAME, loop, sends(WHOLE, again=True), scenario, slots=2, tls=context, ca_file=trusted)


def test_a_certificate_for_another_name_is_refused(loop: str, certificate: Path) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        call = Call("GET", server.url.replace("localhost", "127.0.0.1") + "/", timeouts=PATIENT)
        assert (await failure(transport, call)).kind == "tls"
        assert not server.requests

    context, trusted = server_context(certificate), str(certificate / "cert.pem")
    play(NAME, loop, sends(WHOLE), scenario, tls=context, ca_file=trusted)


def test_a_handshake_that_never_ends_is_a_connect_timeout(loop: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        call = Call("GET", server.url.replace("http:", "https:") + "/", timeouts=Timeouts(0.3, 5.0, 5.0, 5.0))
        assert (await failure(transport, call)).kind == "connect_timeout"
        await server.until(lambda server: server.open == 0)

    async def script(peer: Peer) -> None:
        await peer.closed_by_client()

    play(NAME, loop, script, scenario)


def test_the_other_family_is_tried_where_one_refuses(loop: str) -> None:
    """`localhost` is ::1 and 127.0.0.1 on most machines, and the server listens on the latter."""
    if len({info[0] for info in socket.getaddrinfo("localhost", 80)}) < 2:
        pytest.skip("localhost has one family here")

    async def scenario(server: BadServer, transport: Transport) -> None:
        call = Call("GET", server.url.replace("127.0.0.1", "localhost") + "/", timeouts=PATIENT)
        assert (await transport.send(call)).body == b"ok"

    play(NAME, loop, sends(WHOLE), scenario)


def test_a_timeout_of_one_call_is_not_that_of_the_next(loop: str) -> None:
    """One timer serves a connection for life; it must neither ring for the former call nor sleep for the next."""

    async def script(peer: Peer) -> None:
        while (received := await peer.request()) is not None:
            if received.body == b"hang":
                await peer.closed_by_client()
                return
            await asyncio.sleep(0.4 if received.body == b"slow" else 0)
            await peer.send(WHOLE)

    async def scenario(server: BadServer, transport: Transport) -> None:
        now = asyncio.get_running_loop().time
        await transport.send(post(server, Timeouts(first_byte=0.2)))
        await transport.send(post(server, PATIENT, body=b"slow"))
        began = now()
        with pytest.raises(AttemptFailed, match="first_byte_timeout"):
            await transport.send(post(server, Timeouts(first_byte=0.2), body=b"hang"))
        assert 0.19 <= now() - began < 0.5
        assert server.connections == 1

    play(NAME, loop, script, scenario)


def test_tls_broken_after_the_handshake_is_told_as_such(loop: str, certificate: Path) -> None:
    """A server that wants a certificate of ours says so only after the handshake (TLS 1.3)."""

    async def scenario(server: BadServer, transport: Transport) -> None:
        assert (await failure(transport, post(server, PATIENT))).kind in ("tls", "cut")

    context = server_context(certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(str(certificate / "cert.pem"))
    play(NAME, loop, sends(WHOLE), scenario, tls=context, ca_file=str(certificate / "cert.pem"))
