"""Every transport against answers that break every rule. The cases are the same for all; "auto" must pass them all."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.support.certificates import certificate, server_context
from tests.support.endpoints import BadServer, Peer
from tests.support.transports import (
    CHUNKED,
    EVENTS,
    OK,
    PATIENT,
    QUICK,
    WHOLE,
    every,
    every_loop,
    failure,
    play,
    post,
    sends,
)
from workers import transport as transport_module
from workers.transport import AUTO, Call, Transport, TransportName, make_transport
from workers.transport.aiohttp_ import AiohttpTransport
from workers.transport.answers import stream_is_whole

pytestmark = every_loop
__all__ = ["certificate"]  # a fixture


def test_auto_is_the_first_that_passes(loop: str) -> None:
    assert type(make_transport("auto", slots=1)) is type(make_transport(AUTO[0], slots=1))
    assert "pyreqwest" not in AUTO  # until every_that_cancels passes for it


def test_auto_is_aiohttp_where_httptools_is_not_installed(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "find_spec", lambda name: None if name == "httptools" else object())
    assert isinstance(make_transport(slots=1), AiohttpTransport)


MANY = b"".join(b"X-%d: y\r\n" % number for number in range(50_000))
BROKEN: dict[str, tuple[bytes, str, str]] = {
    "short-body": (OK + b"Content-Length: 20\r\n\r\nok", "close", "cut"),
    "short-body-reset": (OK + b"Content-Length: 20\r\n\r\nok", "reset", "cut"),
    "no-last-chunk": (CHUNKED + b"2\r\nok\r\n", "close", "cut"),
    "half-a-chunk": (CHUNKED + b"20\r\nok", "close", "cut"),
    "chunk-size-no-number": (CHUNKED + b"zz\r\nok\r\n0\r\n\r\n", "wait", "malformed"),
    "chunk-too-long": (CHUNKED + b"2\r\nokXX0\r\n\r\n", "wait", "malformed"),
    "status-line": (b"HTTP/9.x banana\r\n\r\n", "wait", "malformed"),
    "no-http": (b"\x00\x01\x02 hello\r\n\r\n", "wait", "malformed"),
    "closed-unanswered": (b"", "close", "cut"),
    "reset-unanswered": (b"", "reset", "cut"),
    "closed-in-headers": (OK + b"Content-Le", "close", "cut"),
    "length-negative": (OK + b"Content-Length: -2\r\n\r\nok", "wait", "malformed"),
    "lengths-differ": (OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nokx", "wait", "malformed"),
    "length-beyond-64-bit": (OK + b"Content-Length: 99999999999999999999999\r\n\r\n", "wait", "malformed too_large"),
    "length-huge": (OK + b"Content-Length: 5000000000\r\n\r\n", "wait", "too_large"),
    "many-headers": (OK + MANY, "wait", "malformed"),
    "long-header": (OK + b"X-A: " + b"a" * 2_000_000, "wait", "malformed"),
    "switching-protocols": (
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        "wait",
        "malformed",
    ),
    "gzip": (OK + b"Content-Encoding: gzip\r\nContent-Length: 30\r\n\r\nabc", "wait", "malformed"),
    "events-cut": (EVENTS + b"Content-Length: 10\r\n\r\ndata: {}\n\n", "wait", "cut"),
    "events-cut-chunked": (
        EVENTS + b"Transfer-Encoding: chunked\r\n\r\na\r\ndata: {}\n\n\r\n0\r\n\r\n",
        "wait",
        "cut",
    ),
    "events-until-closed": (EVENTS + b"\r\ndata: {}\n\n", "close", "cut"),
}


@every
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_answer_is_a_failure_of_its_kind(name: TransportName, loop: str, case: str) -> None:
    data, then, kinds = BROKEN[case]

    async def scenario(server: BadServer, transport: Transport) -> None:
        assert (await failure(transport, post(server))).kind in kinds.split()
        assert len(server.requests) == 1  # a fresh connection: nothing is sent twice
        if (name, case) != ("pyreqwest", "switching-protocols") and not case.startswith("events"):
            await server.until(lambda server: server.open == 0)

    play(name, loop, sends(data, then), scenario)


WHOLE_ANSWERS: dict[str, tuple[bytes, str, str, int, bytes]] = {
    "ok": (WHOLE, "wait", "POST", 200, b"ok"),
    "chunked": (CHUNKED + b"1\r\no\r\n1;x=y\r\nk\r\n0\r\nX-T: 1\r\n\r\n", "wait", "POST", 200, b"ok"),
    "until-closed": (OK + b"\r\nok", "close", "POST", 200, b"ok"),
    "http-1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", "close", "POST", 200, b"ok"),
    "early-hints": (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + WHOLE, "wait", "POST", 200, b"ok"),
    "continue": (b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE, "wait", "POST", 200, b"ok"),
    "no-content": (b"HTTP/1.1 204 No Content\r\n\r\n", "wait", "POST", 204, b""),
    "not-modified": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n", "wait", "GET", 304, b""),
    "head": (OK + b"Content-Length: 5000000000\r\n\r\n", "wait", "HEAD", 200, b""),
    "empty": (OK + b"Content-Length: 0\r\n\r\n", "wait", "POST", 200, b""),
    "redirect": (
        b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 2\r\n\r\nno", "wait", "POST", 302, b"no",
    ),
    "503": (b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\nno", "wait", "POST", 503, b"no"),
    "error-in-gzip": (
        b"HTTP/1.1 400 Bad\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", "wait", "POST", 400, b"",
    ),
    "length-and-chunked": (
        OK + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", "wait", "POST", 200, b"ok",
    ),
    "events": (EVENTS + b"Content-Length: 24\r\n\r\ndata: {}\n\ndata: [DONE]\r\n", "wait", "POST", 200, b"data: {}"),
}  # fmt: skip


@every
@pytest.mark.parametrize("case", WHOLE_ANSWERS)
def test_a_whole_answer_is_given_back_whatever_its_status(name: TransportName, loop: str, case: str) -> None:
    data, then, method, status, body = WHOLE_ANSWERS[case]
    if case == "length-and-chunked" and name in ("httptools", "aiohttp"):
        pytest.skip(f"{name} refuses it, as RFC 9112 allows")

    async def scenario(server: BadServer, transport: Transport) -> None:
        sent = b"hello" if method == "POST" else b""
        answer = await transport.send(post(server, PATIENT, method=method, body=sent))
        assert (answer.status, answer.body[:8]) == (status, body)
        assert 0 <= answer.first_byte_after <= answer.ended_after < 5
        assert len(server.requests) == 1
        received = server.requests[0]
        assert received.head[0] == f"{method} /v1/x HTTP/1.1"
        assert received.body == sent

    play(name, loop, sends(data, then), scenario)


@every
def test_an_event_stream_is_read_to_its_end(name: TransportName, loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(EVENTS + b"Transfer-Encoding: chunked\r\n\r\n")
        for event in (b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"):
            await peer.send(b"%x\r\n%s\r\n" % (len(event), event))
        await peer.send(b"0\r\n\r\n")
        await peer.closed_by_client()

    async def scenario(server: BadServer, transport: Transport) -> None:
        assert (await transport.send(post(server))).body.endswith(b'{"n": 2}\n\ndata: [DONE]\n\n')

    play(name, loop, script, scenario)


def test_which_events_end_a_stream(loop: str) -> None:
    for whole in (
        b"data: [DONE]",
        b'data: {"a": "data: x"}\r\n\r\ndata: [DONE]\r\n\r\n',
        b"data:[DONE]\n\n: keep-alive\n\n",
        b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n',
    ):
        assert stream_is_whole(whole), whole
    for cut in (
        b"",
        b"data: [DON",
        b'data: {"text": "data: [DONE]"}\n\n',
        b"data: [DONE]\n\ndata: {}\n\n",
        b'event: response.completed\ndata: {"type":"response.completed","resp',
        b'event: message_delta\ndata: {"type": "message_delta"}\n\n',
        b"data: " + b"[" * 200_000 + b"\n\n",
    ):
        assert not stream_is_whole(cut), cut


@every
def test_reading_stops_at_the_cap(name: TransportName, loop: str) -> None:
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(CHUNKED)
        while True:
            await peer.send(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
            sent += 65_536

    async def scenario(server: BadServer, transport: Transport) -> None:
        assert (await failure(transport, post(server, PATIENT))).kind == "too_large"
        await server.until(lambda server: server.open == 0)
        assert sent < 20_000_000  # the cap is 100 kB, the rest are the buffers of the kernel

    play(name, loop, script, scenario)


@every
def test_a_bomb_is_not_inflated(name: TransportName, loop: str) -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    for headers in (b"Content-Encoding: gzip\r\n", b""):
        data = OK + headers + b"Content-Length: %d\r\n\r\n" % len(bomb) + bomb

        async def scenario(server: BadServer, transport: Transport, marked: bool = bool(headers)) -> None:
            call = post(server, PATIENT)
            if marked:
                assert (await failure(transport, call)).kind == "malformed"
            else:
                assert (await transport.send(call)).body == bomb
            assert server.requests[0].header("accept-encoding") == "identity"

        play(name, loop, sends(data, "wait"), scenario)


@every
def test_the_status_counts_more_than_a_body_over_the_cap(name: TransportName, loop: str) -> None:
    data = b"HTTP/1.1 503 Busy\r\nContent-Length: 5000000000\r\n\r\n" + b"x" * 200_000

    async def scenario(server: BadServer, transport: Transport) -> None:
        answer = await transport.send(post(server, PATIENT))
        assert (answer.status, len(answer.body)) == (503, 100_000)
        await server.until(lambda server: server.open == 0)

    play(name, loop, sends(data, "wait"), scenario)


def test_arguments_that_make_no_sense_are_refused(loop: str) -> None:
    with pytest.raises(ValueError, match="must be 'auto'"):
        make_transport("curl", slots=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slots"):
        make_transport(slots=0)


@every
def test_headers_go_out_and_come_in_as_they_are(name: TransportName, loop: str) -> None:
    data = OK + b"X-Two: a\r\nx-two: b\r\nSet-Cookie: k=v\r\nX-U: caf\xc3\xa9\r\nContent-Length: 2\r\n\r\nok"

    async def scenario(server: BadServer, transport: Transport) -> None:
        ours = (("Idempotency-Key", "k1"), ("X-Task-Attempt", "2"), ("Content-Type", "application/json"))
        theirs = (
            ("Accept-Encoding", "gzip"),
            ("Content-Length", "999"),
            ("Host", "elsewhere"),
            ("Expect", "100-continue"),
        )
        for _ in range(2):
            answer = await transport.send(post(server, PATIENT, headers=ours + theirs))
            assert answer.headers["x-two"] == "a, b"
            assert answer.headers.get("x-u", "caf").startswith("caf")  # pyreqwest cannot show it
        for received in server.requests:
            assert [received.header(name) for name, _ in ours] == [value for _, value in ours]
            assert received.header("accept-encoding") == "identity"
            assert received.header("content-length") == "5"
            assert received.header("host") == server.url.removeprefix("http://")
            assert received.header("expect") is received.header("cookie") is None
            assert received.header("user-agent") == "headrace"

    play(name, loop, sends(data, again=True), scenario)


@every
def test_proxies_of_the_environment_are_not_used(
    name: TransportName, loop: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))

    async def scenario(server: BadServer, transport: Transport) -> None:
        assert (await transport.send(post(server, PATIENT))).body == b"ok"
        assert server.requests[0].header("authorization") is None

    play(name, loop, sends(WHOLE), scenario)


@every
def test_an_unknown_certificate_is_refused(name: TransportName, loop: str, certificate: Path) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        assert (await failure(transport, post(server, PATIENT))).kind == "tls"
        assert not server.requests

    play(name, loop, sends(WHOLE), scenario, tls=server_context(certificate))


@every
def test_a_known_certificate_is_taken(name: TransportName, loop: str, certificate: Path) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        assert (await transport.send(post(server, PATIENT))).body == b"ok"

    context = server_context(certificate)
    play(name, loop, sends(WHOLE), scenario, tls=context, ca_file=str(certificate / "cert.pem"))


@every
def test_https_to_a_server_that_speaks_plain_http(name: TransportName, loop: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        call = Call("POST", server.url.replace("http://", "https://") + "/", timeouts=QUICK)
        assert (await failure(transport, call)).kind in ("tls", "connect", "connect_timeout")

    async def script(peer: Peer) -> None:
        await peer.reader.read(10)
        await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    play(name, loop, script, scenario)
