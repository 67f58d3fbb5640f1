"""The simulated endpoint, as a process of its own and asked over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.endpoints import ROOT, SimulatedEndpoint, simulated_endpoints
from workers.errors import AttemptFailed
from workers.simulate.answers import answer_text, embedding
from workers.simulate.behaviour import Asked, Behaviour, Fate, Moment, fate
from workers.transport import Answer, Call, Timeouts, make_transport

QUICK = Timeouts(connect=5, first_byte=2.0, idle=2.0, attempt=4.0)


@pytest.fixture(scope="module")
def running() -> Iterator[SimulatedEndpoint]:
    with SimulatedEndpoint() as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(running: SimulatedEndpoint) -> SimulatedEndpoint:
    """At its defaults, with nothing seen."""
    running.control(mode="ok", latency=0, slots=0, fail_first=0, fail_for=0, retry_after=0, health="ok", max_prompt=0)
    running.control(mode="ok", api_key="", status=503, knee=0, jitter=0, fail_rate=1)
    running.control(mode="ok", reset_stats=True)
    return running


def ask(endpoint: SimulatedEndpoint, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(endpoint.url + path, json=body, headers=headers, timeout=10, trust_env=False)


def chat(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}], **more}


def test_every_kind_of_question_has_its_answer(endpoint: SimulatedEndpoint) -> None:
    prompt = "why is the sky blü"
    said = answer_text(prompt)
    assert ask(endpoint, "/v1/chat/completions", chat(prompt)).json()["choices"][0]["message"]["content"] == said
    assert ask(endpoint, "/v1/completions", {"prompt": prompt}).json()["choices"][0]["text"] == said
    vectors = ask(endpoint, "/v1/embeddings", {"input": ["a", "b"]}).json()["data"]
    assert [vector["embedding"] for vector in vectors] == [embedding("a"), embedding("b")]
    npu = ask(endpoint, "/inference", {"model_id": "m", "input_text": prompt}).json()
    assert (npu["success"], npu["result"]) == (True, said)
    assert ask(endpoint, "/embeddings", {"texts": ["a"]}).json()["embeddings"] == [embedding("a")]
    assert answer_text("other")[:16] != said[:16]


def test_a_stream_says_the_same(endpoint: SimulatedEndpoint) -> None:
    answer = ask(endpoint, "/v1/chat/completions", chat("hi there", stream=True))
    assert answer.headers["content-type"] == "text/event-stream"
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["delta"]["content"] for event in events) == answer_text("hi there")


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"x_sim": {"mode": "status"}}], ids=["ok", "stream", "failure"])
def test_an_answer_gives_back_the_request_id(endpoint: SimulatedEndpoint, more: dict[str, Any]) -> None:
    path = "/v1/chat/completions"
    named = [ask(endpoint, path, chat("hi", **more), **{"X-Request-Id": name}).headers for name in ("r1", "r2")]
    assert [headers.get("x-request-id") for headers in named] == ["r1", "r2"]
    assert "x-request-id" not in ask(endpoint, path, chat("hi", **more)).headers


def test_what_is_no_question_is_refused(endpoint: SimulatedEndpoint) -> None:
    bodies: list[Any] = [
        {},
        {"messages": []},
        {"messages": "x"},
        {"messages": [1]},
        [1],
        chat("x", x_sim={"mode": "nope"}),
    ]
    for body in bodies:
        assert ask(endpoint, "/v1/chat/completions", body).status_code == 400
    assert ask(endpoint, "/nowhere", {}).status_code == 404
    assert httpx.get(endpoint.url + "/inference", trust_env=False).status_code == 405
    assert endpoint.stats()["in_flight"] == 0


def test_statistics_by_task_and_status(endpoint: SimulatedEndpoint) -> None:
    for attempt in (1, 2):
        task = {"Idempotency-Key": "t1", "X-Task-Attempt": str(attempt)}
        ask(endpoint, "/inference", {"input_text": "x", "x_sim": {"fail_first": 1}}, **task)
    httpx.get(endpoint.url + "/health", trust_env=False)
    stats = endpoint.stats()
    assert (stats["hits"], stats["by_task"], stats["attempts"]) == (2, {"t1": 2}, {"t1": [1, 2]})
    assert stats["by_status"] == {"503": 1, "200": 1}
    assert (stats["in_flight"], stats["max_in_flight"], stats["open_now"]) == (0, 1, [])
    assert (stats["max_connections"], stats["total_connections"]) == (1, 2)


def test_control_says_what_is_wrong_and_changes_nothing(endpoint: SimulatedEndpoint) -> None:
    before = endpoint.control()
    for settings in ({"lateny": 1}, {"latency": "5 parsecs"}, {"mode": "nope"}, {"slots": -1}, {"slots": True}):
        answer = ask(endpoint, "/control", {"status": 500, **settings})
        assert answer.status_code == 400
        assert next(iter(settings)) in answer.json()["error"]["message"]
    assert endpoint.control() == before


@pytest.mark.parametrize("status", [400, 401, 429, 500, 503])
def test_a_status_on_demand(endpoint: SimulatedEndpoint, status: int) -> None:
    endpoint.control(mode="status", status=status, retry_after="7s")
    answer = ask(endpoint, "/v1/chat/completions", chat("x"))
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "7")
    assert httpx.get(endpoint.url + "/health", trust_env=False).status_code == 200


def test_health_on_demand(endpoint: SimulatedEndpoint) -> None:
    endpoint.control(health="fail")
    assert httpx.get(endpoint.url + "/health", trust_env=False).status_code == 503
    assert ask(endpoint, "/inference", {"input_text": "x"}).status_code == 200
    endpoint.control(health="hang")
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(endpoint.url + "/health", timeout=0.3, trust_env=False)


def send(endpoint: SimulatedEndpoint, body: dict[str, Any], path: str = "/v1/chat/completions") -> Answer:
    async def main() -> Answer:
        transport = make_transport(slots=1)
        try:
            call = Call("POST", endpoint.url + path, body=json.dumps(body).encode(), timeouts=QUICK)
            return await transport.send(call)
        finally:
            await transport.aclose()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("hang", "first_byte_timeout"),
        ("drip", "attempt_timeout"),
        ("reset", "cut"),
        ("close", "cut"),
        ("cut", "cut"),
        ("malformed", "malformed"),
        ("gzip_bomb", "malformed"),
        ("huge", "too_large"),
        ("events_cut", "cut"),
    ],
)
def test_every_way_to_fail_is_seen_as_what_it_is(endpoint: SimulatedEndpoint, mode: str, kind: str) -> None:
    endpoint.control(mode=mode)
    for stream in (False, True):
        with pytest.raises(AttemptFailed) as caught:
            send(endpoint, chat("a longer prompt, so that it takes its time", stream=stream))
        assert caught.value.kind == kind
    stats = endpoint.stats()
    assert (stats["hits"], stats["in_flight"]) == (2, 0)


def test_answers_that_are_bad_only_inside(endpoint: SimulatedEndpoint) -> None:
    endpoint.control(mode="bad_json")
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(send(endpoint, chat("x")).body)
    endpoint.control(mode="unsuccessful")
    assert json.loads(send(endpoint, {"input_text": "x"}, "/inference").body)["success"] is False


def test_a_body_decides_for_itself(endpoint: SimulatedEndpoint) -> None:
    assert ask(endpoint, "/v1/completions", {"prompt": "x", "x_sim": {"status": 400}}).status_code == 400
    assert ask(endpoint, "/v1/completions", {"prompt": "x"}).status_code == 200
    endpoint.control(mode="status")
    assert (
        ask(endpoint, "/v1/completions", {"prompt": "x", "x_sim": {"mode": "ok", "latency_ms": 1}}).status_code == 200
    )


def test_failing_first_and_for_a_time(endpoint: SimulatedEndpoint) -> None:
    endpoint.control(fail_first=2)
    codes = [ask(endpoint, "/inference", {"input_text": "x"}).status_code for _ in range(4)]
    assert codes == [503, 503, 200, 200]
    endpoint.control(mode="ok", fail_first=0)
    endpoint.control(mode="status", fail_for="150ms", latency="200ms")  # decided when it comes, not when it is answered
    codes = [ask(endpoint, "/inference", {"input_text": "x"}).status_code for _ in range(2)]
    assert codes == [503, 200]


def test_the_cap_answers_429_and_a_canceled_request_frees_its_place(endpoint: SimulatedEndpoint) -> None:
    endpoint.control(slots=1, latency="5s", retry_after=2)
    host, port = "127.0.0.1", endpoint.port
    with socket.create_connection((host, port)) as first:
        body = b'{"input_text": "x"}'
        head = b"POST /inference HTTP/1.1\r\nIdempotency-Key: held\r\nContent-Length: %d\r\n\r\n" % len(body)
        first.sendall(head + body)
        while endpoint.stats()["open_now"] != ["held"]:
            pass
        refused = ask(endpoint, "/inference", {"input_text": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
    while endpoint.stats()["in_flight"]:
        pass
    assert endpoint.stats()["aborted"] == 1
    endpoint.control(latency=0)
    assert ask(endpoint, "/inference", {"input_text": "x"}).status_code == 200


def test_keys_and_long_prompts(endpoint: SimulatedEndpoint) -> None:
    endpoint.control(api_key="s3cret", max_prompt=10)
    key = {"Authorization": "Bearer s3cret"}
    assert ask(endpoint, "/inference", {"input_text": "x"}).status_code == 401
    assert ask(endpoint, "/inference", {"input_text": "x"}, **key).status_code == 200
    assert ask(endpoint, "/inference", {"input_text": "x" * 11}, **key).status_code == 400


def test_pipelined_and_split_requests_are_answered_in_order(endpoint: SimulatedEndpoint) -> None:
    body = b'{"input_text": "%d"}'
    one = b"POST /inference HTTP/1.1\r\nContent-Length: 19\r\n\r\n"
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=5) as raw:
        raw.sendall(one + body % 1 + one + (body % 2)[:7])
        raw.sendall((body % 2)[7:])
        answers = b""
        while answers.count(b'"tokens"') < 2:
            answers += raw.recv(65_536)
    assert answers.index(answer_text("1").encode()) < answers.index(answer_text("2").encode())


def test_many_connections_at_once(endpoint: SimulatedEndpoint) -> None:
    """1,500, each with a request that waits."""
    endpoint.control(latency="500ms")

    async def main() -> None:
        transport = make_transport(slots=1500)
        body = json.dumps({"input_text": "x"}).encode()
        call = Call("POST", endpoint.url + "/inference", body=body)
        answers = await asyncio.gather(*(transport.send(call) for _ in range(1500)))
        assert {answer.status for answer in answers} == {200}
        await transport.aclose()

    asyncio.run(main())
    assert endpoint.stats()["hits"] == 1500
    assert endpoint.stats()["max_connections"] <= 1500


def test_it_comes_back_on_its_port_and_records(tmp_path: Path) -> None:
    record = tmp_path / "hits.jsonl"
    with simulated_endpoints(1, "--record", str(record)) as (one,):
        port = one.port
        ask(one, "/inference", {"input_text": "x"}, **{"Idempotency-Key": "a"})
        one.stop()
        with pytest.raises(httpx.ConnectError):
            ask(one, "/inference", {"input_text": "x"})
        one.start()
        assert one.port == port
        ask(one, "/inference", {"input_text": "x"}, **{"Idempotency-Key": "b"})
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["task"], line["outcome"]) for line in lines] == [("a", "200"), ("b", "200")]


def test_bad_options_are_one_line() -> None:
    command = [sys.executable, "-m", "workers.simulate", "--port", "0", "--latency", "soon"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "latency 'soon'" in ended.stderr


def moment(in_flight: int = 1, since: float = 0.0, earlier: int = 0, chance: float = 0.5) -> Moment:
    return Moment(since, earlier, in_flight, chance, chance)


def test_the_fate_of_a_request_is_a_table() -> None:
    plain = Asked(5, "", {}, 1)
    assert fate(Behaviour(latency=1, jitter=0.5), plain, moment(chance=1.0)) == Fate(1.5, "ok", 200, 0)
    assert fate(Behaviour(latency=1, knee=4), plain, moment(in_flight=8)).delay == 2
    assert fate(Behaviour(latency=1, knee=4), plain, moment(in_flight=3)).delay == 1
    half = Behaviour(mode="status", status=500, fail_rate=0.5)
    assert [fate(half, plain, moment(chance=chance)).status for chance in (0.4, 0.6)] == [500, 200]
    wish = Asked(5, "", {"fail_first": 2, "status": 500}, 2)
    assert fate(Behaviour(), wish, moment()).status == 500
    assert fate(Behaviour(), Asked(5, "", wish.wishes, 3), moment()).mode == "ok"


def test_it_ends_with_whoever_holds_its_input() -> None:
    words = [sys.executable, "-m", "workers.simulate", "--port", "0", "--until-eof"]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        assert httpx.get(url + "/health", trust_env=False).status_code == 200
        process.stdin.close()
        assert process.wait(10) == 0
