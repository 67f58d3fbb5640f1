"""HttpxTransport over what people bring: a MockTransport, a client with settings of its own."""

from __future__ import annotations

import asyncio
import gzip

import httpx
import pytest

from workers.errors import AttemptFailed
from workers.transport import Answer, Call
from workers.transport.httpx_ import HttpxTransport

CALL = Call("POST", "http://endpoint.test/v1/x?q=a%20b", (("X-Task-Attempt", "1"),), b'{"a": 1}')


def send(over: httpx.AsyncClient | httpx.AsyncBaseTransport, call: Call = CALL) -> Answer:
    async def main() -> Answer:
        transport = HttpxTransport(over)
        try:
            return await transport.send(call)
        finally:
            await transport.aclose()

    return asyncio.run(main())


def test_a_mock_transport_answers() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(201, json={"ok": True}, headers={"X-Id": "7"})

    answer = send(httpx.MockTransport(handler))
    assert (answer.status, answer.body, answer.headers["x-id"]) == (201, b'{"ok":true}', "7")
    assert (str(seen[0].url), seen[0].content) == (CALL.url, CALL.body)
    assert (seen[0].headers["x-task-attempt"], seen[0].headers["accept-encoding"]) == ("1", "identity")


def test_nothing_is_inflated_and_the_cap_holds() -> None:
    bomb = gzip.compress(b"\0" * 10_000_000)
    for headers, kind in (({"Content-Encoding": "gzip"}, "malformed"), ({}, "too_large")):
        over = httpx.MockTransport(lambda _, headers=headers: httpx.Response(200, content=bomb, headers=headers))
        with pytest.raises(AttemptFailed) as caught:
            send(over, Call("GET", CALL.url, max_bytes=1000))
        assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx.ConnectError("refused"), "connect"),
        (httpx.ConnectTimeout("slow"), "connect_timeout"),
        (httpx.ReadTimeout("slow"), "idle_timeout"),
        (httpx.ReadError("reset"), "cut"),
        (httpx.RemoteProtocolError("illegal status line"), "malformed"),
        (httpx.UnsupportedProtocol("ftp"), "task_error"),
    ],
)
def test_what_a_mock_raises_becomes_a_failure(error: httpx.HTTPError, kind: str) -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        raise error

    with pytest.raises(AttemptFailed) as caught:
        send(httpx.MockTransport(handler))
    assert caught.value.kind == kind


def test_a_client_keeps_its_settings_but_follows_nothing_and_sends_no_cookies() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(302, headers={"Location": "http://elsewhere.test/", "Set-Cookie": "k=v"})

    async def main() -> None:
        over = httpx.MockTransport(handler)
        async with httpx.AsyncClient(transport=over, follow_redirects=True, auth=("me", "pw")) as client:
            transport = HttpxTransport(client)
            for _ in range(2):
                assert (await transport.send(CALL)).status == 302
            await transport.aclose()
            assert not client.is_closed

    asyncio.run(main())
    assert len(seen) == 2
    assert all("cookie" not in request.headers and "authorization" in request.headers for request in seen)
