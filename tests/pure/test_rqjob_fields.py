"""broker.rqjob: what stands beside a job's data, and the results that a plain RQ producer reads."""

from __future__ import annotations

import base64
import datetime
import json
import pickle
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import rqjob
from broker.task import NpuTask, Request
from tests.pure.test_rqjob import json_values

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 64}


# The hash


def test_a_description_shows_neither_payload_nor_query() -> None:
    assert rqjob.describe(Request("POST", "/v1/chat/completions?key=secret", json=CHAT)) == "POST /v1/chat/completions"
    assert rqjob.describe(NpuTask("text_analysis", {"input_text": "secret"})) == "npu text_analysis"


def test_a_long_path_makes_a_short_description() -> None:
    assert len(rqjob.describe(Request("GET", "/" + "x" * 4000))) == rqjob.MAX_DESCRIPTION_CHARS


@given(st.floats(0, 4e9))
def test_times_are_in_rqs_format(now: float) -> None:
    parsed = datetime.datetime.strptime(rqjob.utc(now), "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=datetime.UTC)
    assert parsed.timestamp() == pytest.approx(now, abs=2e-6)


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({"x_born": "1"}, False),
        ({b"x_born": b"1"}, False),
        ({"data": "", "x_token": "5"}, True),
        ({b"data": b""}, True),
        ({}, True),
    ],
)
def test_a_plain_job_has_no_mark_of_ours(fields: dict[Any, Any], plain: bool) -> None:
    assert rqjob.is_plain(fields) is plain


# Results


@given(json_values)
def test_return_values_are_in_the_producers_serializer(value: Any) -> None:
    result = {"status_code": 200, "json": value}
    assert json.loads(base64.b64decode(rqjob.rq_return_value("json", result))) == result
    assert pickle.loads(base64.b64decode(rqjob.rq_return_value("pickle", result))) == result


@pytest.mark.parametrize(
    ("content_type", "body", "answer"),
    [
        ("application/json", b'{"a":1}', {"json": {"a": 1}}),
        ("application/problem+json; charset=utf-8", b"[]", {"json": []}),
        ("application/json", b"{", {"body": "{"}),
        ("application/json", b"NaN", {"body": "NaN"}),
        ("application/json", b"[" * 100_000, {"body": "[" * 100_000}),
        ("text/plain", b"\xff{}", {"body": "�{}"}),
        ("", b"", {"body": ""}),
    ],
)
def test_a_result_has_json_or_text(content_type: str, body: bytes, answer: dict[str, Any]) -> None:
    headers = {"content-type": content_type}
    result = rqjob.plain_result(200, {**headers, "set-cookie": "secret"}, body, "vm1", 2)
    assert result == {"status_code": 200, "headers": headers, "endpoint": "vm1", "attempts": 2, **answer}


def test_entries_of_the_result_stream() -> None:
    success = rqjob.rq_success("json", {"status_code": 200}, "w1")
    assert success[:5] == ["type", "1", "worker_name", "w1", "return_value"]
    failure = rqjob.rq_failure("status 400: too long", "w1")
    assert failure[:5] == ["type", "2", "worker_name", "w1", "exc_string"]
    assert zlib.decompress(base64.b64decode(failure[5])) == b"status 400: too long"
