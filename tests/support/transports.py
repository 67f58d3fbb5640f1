"""What the transport suites share: which transports, on which loops, and how a case is played."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from tests.support.endpoints import BadServer, Peer, Script, bad_server
from workers.errors import AttemptFailed
from workers.transport import Call, Timeouts, Transport, TransportName, make_transport

Scenario = Callable[[BadServer, Transport], Awaitable[None]]
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"Content-Length: 2\r\n\r\nok"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
EVENTS = OK + b"Content-Type: text/event-stream\r\n"
QUICK = Timeouts(connect=0.3, first_byte=0.4, idle=0.3, attempt=1.0)
PATIENT = Timeouts(connect=5, first_byte=5, idle=5, attempt=8)
SURPLUS = "h11 keeps what came after an answer, and takes it for the answer to the next request"
RUNS_ON = "pyreqwest 0.15 runs a canceled request on in its thread, and keeps the connection"

every_loop = pytest.mark.parametrize("loop", LOOPS)
every = pytest.mark.parametrize("name", ["httptools", "aiohttp", "httpx", "pyreqwest"])
every_that_cancels = pytest.mark.parametrize(
    "name", ["httptools", "aiohttp", "httpx", pytest.param("pyreqwest", marks=pytest.mark.xfail(reason=RUNS_ON))]
)
every_that_drops_the_surplus = pytest.mark.parametrize(
    "name", ["httptools", "aiohttp", pytest.param("httpx", marks=pytest.mark.xfail(reason=SURPLUS)), "pyreqwest"]
)


def play(
    name: TransportName,
    loop: str,
    script: Script,
    scenario: Scenario,
    *,
    slots: int = 4,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(10), bad_server(script, tls) as server:
            transport = make_transport(name, slots=slots, **options)
            try:
                await scenario(server, transport)
            finally:
                await transport.aclose()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())


def sends(data: bytes, then: str = "close", again: bool = False) -> Script:
    """Reads a request, sends these bytes, then 'close', 'reset' or 'wait'; `again`: one request after the other."""

    async def script(peer: Peer) -> None:
        while await peer.request() is not None:
            await peer.send(data)
            if not again:
                break
        if then == "reset":
            peer.reset()
        elif then == "wait":
            await peer.closed_by_client()

    return script


def post(server: BadServer, timeouts: Timeouts = QUICK, **fields: Any) -> Call:
    fields = {"method": "POST", "body": b"hello", "max_bytes": 100_000, **fields}
    return Call(url=f"{server.url}/v1/x", timeouts=timeouts, **fields)


async def failure(transport: Transport, call: Call) -> AttemptFailed:
    with pytest.raises(AttemptFailed) as caught:
        await transport.send(call)
    assert "\n" not in str(caught.value)
    return caught.value
