"""What an endpoint gives back of its own secrets is masked before it is stored; nothing else is."""

from __future__ import annotations

import json

import pytest

from broker.configmodel import Endpoint
from broker.secret import Secret
from workers.echoes import Echoes
from workers.errors import AttemptFailed
from workers.transport.types import Answer

KEY = "sk-ab/cd-0123456789"


def endpoint(**more: object) -> Endpoint:
    return Endpoint("e", "http://127.0.0.1:1", **more)  # type: ignore[arg-type]


def answer(body: bytes, **headers: str) -> Answer:
    kept = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(200, {"content-type": "application/json", **kept}, body, 0.1, 0.2)


def test_a_key_is_masked_in_body_and_kept_headers_however_json_writes_it() -> None:
    echoes = Echoes(endpoint(api_key=Secret(KEY)))
    slashes = json.dumps({"got": f"Bearer {KEY}"}).replace("/", "\\/").encode()
    for body in (f'{{"got": "Bearer {KEY}"}}'.encode(), slashes):
        found = echoes.answer(answer(body, x_request_id=f"Bearer {KEY}"))
        assert json.loads(found.body) == {"got": "Bearer ***"}
        assert found.headers == {"content-type": "application/json", "x-request-id": "Bearer ***"}
    assert echoes.answer(answer(b"{}", x_request_id=KEY)).headers["x-request-id"] == "***"


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ({"authorization": "Basic dXNlcjpwYXNz"}, "dXNlcjpwYXNz"),
        ({"x-api-key": "planted-value"}, "planted-value"),
        ({"cookie": "sid=0a1b2c3d4e"}, "sid=0a1b2c3d4e"),
        ({"x-tenant": "t-9f8e7d6c5b4a39281706"}, "t-9f8e7d6c5b4a39281706"),  # its name says nothing, its form does
    ],
)
def test_so_are_headers_that_carry_credentials(headers: dict[str, str], shown: str) -> None:
    assert Echoes(endpoint(headers=headers)).answer(answer(f"<{shown}>".encode())).body == b"<***>"


def test_so_is_what_is_said_and_kept_of_a_failure() -> None:
    echoes = Echoes(endpoint(hmac_secret=Secret("hmac-secret"), api_key=Secret(KEY)))
    kept = {"x-request-id": KEY, "server": "s"}
    failure = AttemptFailed("http_4xx", f"is {KEY!r}", status=400, retry_after=1.5, body=b"a hmac-secret", headers=kept)
    found = echoes.failure(failure)
    assert (found.kind, found.detail, found.status, found.retry_after) == ("http_4xx", "is '***'", 400, 1.5)
    assert (found.body, found.headers) == (b"a ***", {"x-request-id": "***", "server": "s"})


def test_of_two_secrets_the_longer_goes_whole() -> None:
    echoes = Echoes(endpoint(api_key=Secret("planted-key"), headers={"x-api-key": "planted-key-of-more"}))
    assert echoes.answer(answer(b"planted-key-of-more, planted-key")).body == b"***, ***"


def test_what_is_no_secret_stays_as_it_is() -> None:
    headers = {"accept": "application/json", "anthropic-version": "2023-06-01", "user-agent": "team/1.0 (research)"}
    body = b'{"accept": "application/json", "v": "2023-06-01", "user-agent": "team/1.0 (research)", "key": "short"}'
    for one in (endpoint(headers=headers, api_key=Secret("short")), endpoint()):
        given = answer(body, x_request_id="short")
        assert Echoes(one).answer(given) is given
