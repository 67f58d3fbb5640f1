from __future__ import annotations

import hashlib
import hmac
import json
from email.utils import formatdate
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.configmodel import Endpoint, Pool, QueuePolicy, Timeouts
from broker.errors import InvalidTask
from broker.secret import Secret
from broker.task import NpuTask, Request, Work
from workers.adapters import Adapter, HttpAdapter, NpuAdapter, make_adapter
from workers.errors import AttemptFailed
from workers.transport.types import Answer, Call

NOW = 1_700_000_000.9


def adapter(
    url: str = "http://one:8000", *, kind: str = "http", timeout: Timeouts | None = None, **endpoint: Any
) -> Adapter:
    pool = Pool(
        "p",
        adapter=kind,  # type: ignore[arg-type]
        timeout=timeout or Timeouts(connect=1, first_byte=2, idle=3, attempt=4),
        queue=QueuePolicy(result_limit=1234),
    )
    return make_adapter(Endpoint("one", url, **endpoint), pool, clock=lambda: NOW)


def call(work: Work, url: str = "http://one:8000", **options: Any) -> Call:
    return adapter(url, **options).call(work, "task-1", 2)


def answer(status: int = 200, body: bytes = b"{}", headers: dict[str, str] | None = None) -> Answer:
    return Answer(status, headers or {}, body, 0.1, 0.2)


CHAT = Request("POST", "/v1/chat/completions", json={"model": "m", "n": 1})


def test_a_request_becomes_a_call() -> None:
    made = call(CHAT)
    assert (made.method, made.url, made.body) == (
        "POST",
        "http://one:8000/v1/chat/completions",
        b'{"model":"m","n":1}',
    )
    assert dict(made.headers) == {
        "content-type": "application/json",
        "idempotency-key": "task-1",
        "x-task-attempt": "2",
    }
    assert made.max_bytes == 1234
    timeouts = made.timeouts
    assert (timeouts.connect, timeouts.first_byte, timeouts.idle, timeouts.attempt) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("base", "path", "url"),
    [
        ("http://one", "/a", "http://one/a"),
        ("http://one:80/base", "/a?b=/c", "http://one:80/base/a?b=/c"),
        ("http://one/base/", "/a", "http://one/base/a"),
        ("https://[::1]:8443/x/y", "/a", "https://[::1]:8443/x/y/a"),
        ("http://one/v1", "/v1/chat", "http://one/v1/chat"),
        ("http://one/api/v1", "/v1/chat", "http://one/api/v1/chat"),
        ("http://one/v1", "/v1", "http://one/v1"),
        ("http://one/v1", "/v10/chat", "http://one/v1/v10/chat"),
        ("http://one/v1", "/v2/chat", "http://one/v1/v2/chat"),
        ("http://one/v1", "/health", "http://one/v1/health"),
        ("http://one/api", "/api/chat", "http://one/api/api/chat"),
        ("http://one", "/@two/a", "http://one/@two/a"),
        ("http://one", "/:81/a", "http://one/:81/a"),
    ],
)
def test_urls_are_joined(base: str, path: str, url: str) -> None:
    assert call(Request("GET", path), base).url == url


@given(st.text(alphabet="/@:.%?&=abv1-_~;\\#[]", max_size=30), st.sampled_from(["", "/v1", "/base"]))
def test_no_path_leads_to_another_host_or_out_of_the_base_path(text: str, base: str) -> None:
    try:
        work = Request("GET", "/" + text)
    except InvalidTask:
        return
    parts = urlsplit(call(work, "http://one:8000" + base).url)
    assert (parts.scheme, parts.netloc) == ("http", "one:8000")
    assert parts.path.startswith(base + "/") or parts.path == base


@pytest.mark.parametrize(
    "url", ["ftp://one", "one:8000", "http://", "http://one?x=1", "http://one#f", "http://me:secret@one"]
)
def test_other_addresses_are_refused_without_showing_them(url: str) -> None:
    with pytest.raises(ValueError, match="endpoint url") as caught:
        adapter(url)
    assert "secret" not in str(caught.value)


def test_the_endpoints_headers_and_key_win_over_the_tasks() -> None:
    work = Request("POST", "/a", json={}, headers={"X-Tenant": "mine", "x-other": "kept", "content-type": "text/x"})
    headers = call(work, headers={"X-Tenant": "theirs"}, api_key=Secret("k3y")).headers
    assert dict(headers) == {
        "content-type": "text/x",
        "x-tenant": "theirs",
        "x-other": "kept",
        "authorization": "Bearer k3y",
        "idempotency-key": "task-1",
        "x-task-attempt": "2",
    }
    assert len(headers) == 6


def test_each_endpoint_gets_its_own_key_only() -> None:
    assert dict(call(CHAT, api_key=Secret("one")).headers)["authorization"] == "Bearer one"
    assert "authorization" not in dict(call(CHAT).headers)


@pytest.mark.parametrize(
    ("work", "body", "content_type"),
    [
        (Request("POST", "/a", json={"ä": "ö"}), '{"ä":"ö"}'.encode(), "application/json"),
        (Request("POST", "/a", json=[]), b"[]", "application/json"),
        (Request("POST", "/a", json=False), b"false", "application/json"),
        (Request("POST", "/a", json=10**30), b"1" + b"0" * 30, "application/json"),
        (Request("POST", "/a", json="\ud800"), b'"\\ud800"', "application/json"),
        (Request("POST", "/a", body="ä"), "ä".encode(), "text/plain; charset=utf-8"),
        (Request("POST", "/a", body=""), b"", "text/plain; charset=utf-8"),
        (Request("GET", "/a"), b"", None),
    ],
)
def test_bodies(work: Request, body: bytes, content_type: str | None) -> None:
    made = call(work)
    assert made.body == body
    assert dict(made.headers).get("content-type") == content_type


@pytest.mark.parametrize("work", [Request("POST", "/a", json={1, 2}), Request("POST", "/a", body="\ud800")])
def test_what_cannot_be_sent_is_the_tasks_fault(work: Request) -> None:
    with pytest.raises(AttemptFailed) as caught:
        call(work)
    assert caught.value.kind == "task_error"


def test_a_task_shortens_its_attempt_and_never_lengthens_it() -> None:
    assert call(Request("GET", "/a", timeout=0.5)).timeouts.attempt == 0.5
    assert call(Request("GET", "/a", timeout=99)).timeouts.attempt == 4
    assert call(Request("GET", "/a", timeout=0.5)).timeouts.first_byte == 2


@pytest.mark.parametrize("kind", ["http", "npu"])
def test_only_a_limit_the_task_chose_is_not_the_endpoints_fault(kind: str) -> None:
    it = adapter(kind=kind)
    late = AttemptFailed("attempt_timeout", "4 s")
    assert it.blame(Request("GET", "/a", timeout=0.5), late).kind == "own_timeout"
    assert it.blame(Request("GET", "/a", timeout=0.5), late).rule.breaker == "ignore"
    assert it.blame(Request("GET", "/a", timeout=4), late) is late
    assert it.blame(Request("GET", "/a"), late) is late
    cut = AttemptFailed("cut", "closed")
    assert it.blame(Request("GET", "/a", timeout=0.5), cut) is cut


@pytest.mark.parametrize("kind", ["http", "npu"])
def test_requests_are_signed_for_an_endpoint_with_a_secret(kind: str) -> None:
    made = call(Request("POST", "/a?b=c", json={"x": 1}), "http://one/base", kind=kind, hmac_secret=Secret("shh"))
    headers = dict(made.headers)
    assert headers["x-timestamp"] == "1700000000"
    signed = b"1700000000" + b"POST" + b"/base/a?b=c" + b'{"x":1}'
    assert headers["x-signature"] == hmac.new(b"shh", signed, hashlib.sha256).hexdigest()


def test_signatures_of_two_calls_do_not_run_into_each_other() -> None:
    it = adapter(hmac_secret=Secret("shh"))
    first = it.call(CHAT, "a", 1)
    it.call(Request("GET", "/x"), "b", 1)
    again = it.call(CHAT, "a", 1)
    assert first.headers == again.headers


def check(work: Work, given: Answer, kind: str = "http") -> AttemptFailed | None:
    try:
        adapter(kind=kind).check_answer(work, given)
    except AttemptFailed as failure:
        return failure
    return None


@pytest.mark.parametrize("status", [200, 201, 202, 204])
def test_a_success_of_any_body_passes(status: int) -> None:
    assert check(CHAT, answer(status, b"not json")) is None


@pytest.mark.parametrize("kind", ["http", "npu"])
@pytest.mark.parametrize(
    ("status", "failure_kind"),
    [(400, "http_4xx"), (401, "auth"), (409, "again"), (429, "rate_limited"), (302, "redirect"), (500, "http_5xx")],
)
def test_other_statuses_are_failed_attempts(kind: str, status: int, failure_kind: str) -> None:
    failure = check(CHAT, answer(status, b"why", {"x-request-id": "r"}), kind)
    assert failure is not None
    assert (failure.kind, failure.status, failure.body, failure.headers) == (
        failure_kind,
        status,
        b"why",
        {"x-request-id": "r"},
    )


def test_a_retry_after_date_is_read_by_the_clock_given() -> None:
    date = formatdate(NOW + 30.1, usegmt=True)
    failure = check(CHAT, answer(429, b"", {"retry-after": date}))
    assert failure is not None
    assert failure.retry_after == pytest.approx(30.1, abs=1)


# NPU


@pytest.mark.parametrize(
    ("task_type", "data", "path", "sent"),
    [
        (
            "text_analysis",
            {"text": "hi", "model_id": "m", "max_tokens": 5, "temperature": 0, "top_p": 0.9, "note": "mine"},
            "/inference",
            {"model_id": "m", "input_text": "hi", "max_tokens": 5, "temperature": 0, "top_p": 0.9},
        ),
        ("text_analysis", {"prompt": "hi", "model": "m"}, "/inference", {"model_id": "m", "input_text": "hi"}),
        ("knowledge_processing", {"query": "hi"}, "/inference", {"input_text": "hi"}),
        ("knowledge_processing", {"content": "hi", "top_p": None}, "/inference", {"input_text": "hi"}),
        ("text_analysis", {"input_text": "a", "text": "b"}, "/inference", {"input_text": "a"}),
        ("embedding_batch", {"texts": ["a", "b"], "model": "m"}, "/embeddings", {"model_id": "m", "texts": ["a", "b"]}),
        ("embedding_batch", {"inputs": ["a"], "max_tokens": 5}, "/embeddings", {"texts": ["a"]}),
        ("embedding_batch", {"text": "a"}, "/embeddings", {"texts": ["a"]}),
    ],
)
def test_npu_tasks_become_requests(task_type: str, data: dict[str, Any], path: str, sent: dict[str, Any]) -> None:
    made = call(NpuTask(task_type, data, timeout=1), kind="npu", api_key=Secret("k"))
    assert (made.method, made.url) == ("POST", "http://one:8000" + path)
    assert json.loads(made.body) == sent
    assert made.timeouts.attempt == 1
    headers = dict(made.headers)
    assert headers["content-type"] == "application/json"
    assert headers["authorization"] == "Bearer k"
    assert headers["idempotency-key"] == "task-1"


@pytest.mark.parametrize(
    ("task_type", "data"),
    [
        ("text_analysis", {}),
        ("text_analysis", {"text": ""}),
        ("text_analysis", {"text": ["a"]}),
        ("embedding_batch", {"texts": []}),
        ("embedding_batch", {"texts": ["a", 1]}),
        ("embedding_batch", {"model": "m"}),
    ],
)
def test_an_npu_task_without_text_is_its_own_fault(task_type: str, data: dict[str, Any]) -> None:
    with pytest.raises(AttemptFailed) as caught:
        call(NpuTask(task_type, data), kind="npu")
    assert caught.value.kind == "task_error"


def test_a_plain_request_on_an_npu_pool_goes_out_as_it_is() -> None:
    assert call(CHAT, kind="npu") == call(CHAT)
    assert check(CHAT, answer(200, b'{"error": "no"}'), "npu") is None


def test_an_npu_task_on_an_http_pool_is_refused_with_the_remedy() -> None:
    with pytest.raises(AttemptFailed, match="adapter: npu"):
        call(NpuTask("text_analysis", {"text": "a"}))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"success": true, "result": 1}', None),
        (b'{"result": 1}', None),
        (b'{"result": 1, "error": null}', None),
        (b'{"result": 1, "error": ""}', None),
        (b'{"success": false}', "app_error"),
        (b'{"success": false, "error": "my private text"}', "app_error"),
        (b'{"error": {"message": "my private text"}}', "app_error"),
        (b"<html>", "malformed"),
        (b"[]", "malformed"),
        (b"", "malformed"),
        (b"\xff", "malformed"),
    ],
)
def test_npu_answers(body: bytes, kind: str | None) -> None:
    failure = check(NpuTask("text_analysis", {"text": "a"}), answer(200, body), "npu")
    assert (failure and failure.kind) == kind
    if failure is not None:
        assert (failure.status, failure.body) == (200, body)
        assert "private" not in str(failure)


def test_an_app_error_is_tried_elsewhere_and_does_not_count() -> None:
    failure = check(NpuTask("text_analysis", {"text": "a"}), answer(200, b'{"success": false}'), "npu")
    assert failure is not None
    assert str(failure) == "app_error: status 200, but the answer says success: false"
    assert (failure.rule.action, failure.rule.breaker) == ("retry", "ignore")


def test_the_pool_names_the_adapter() -> None:
    assert isinstance(adapter(), HttpAdapter)
    assert isinstance(adapter(kind="npu"), NpuAdapter)


@pytest.mark.parametrize("media_type", ["application/json", "application/json; charset=utf-8", "application/ld+json"])
def test_an_answer_that_calls_itself_json_and_is_not_is_malformed(media_type: str) -> None:
    adapter = HttpAdapter(Endpoint("e", "http://e"), Pool("p"))
    work = Request("POST", "/v1/chat/completions", json={})
    adapter.check_answer(work, Answer(200, {"content-type": media_type}, b'{"choices": []}', 0.0, 0.0))
    adapter.check_answer(work, Answer(200, {"content-type": "text/plain"}, b'{"choices": [', 0.0, 0.0))
    adapter.check_answer(work, Answer(204, {"content-type": media_type}, b"", 0.0, 0.0))
    with pytest.raises(AttemptFailed) as failed:
        adapter.check_answer(work, Answer(200, {"content-type": media_type}, b'{"choices": [', 0.0, 0.0))
    assert failed.value.kind == "malformed"
