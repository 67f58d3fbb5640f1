"""Lines of the output: a line that is no success carries an error, and each is strict JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.batch import json_or_text, output_line, result_line
from broker.task import Result
from tests.pure.test_batch import JSON


def ok(status: int = 200, body: bytes = b"{}", **changes: Any) -> Result:
    return Result("t1", changes.pop("outcome", "ok"), status, changes.pop("headers", {}), body, **changes)


def test_a_success() -> None:
    written = result_line("a", "f" * 64, ok(body=b'{"x": 1}', headers={"x-request-id": "r9"}))
    assert written.endswith(b"}\n")
    assert json.loads(written) == {
        "id": "batch_req_" + "f" * 24,
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r9", "body": {"x": 1}},
        "error": None,
    }
    assert json.loads(result_line("a", "f" * 64, ok()))["response"]["request_id"] == "t1"


@pytest.mark.parametrize(
    ("result", "code", "message", "status"),
    [
        (ok(400, b'{"e": 1}', outcome="dead", reason="http_4xx: status 400"), "http_400", "http_4xx: status 400", 400),
        (ok(503, b"", outcome="dead"), "http_503", "status 503", 503),
        (ok(404, b""), "http_404", "status 404", 404),
        (ok(200, b'{"success": false}', outcome="dead", reason="app_error"), "dead_letter", "app_error", 200),
        (Result("t", "dead", reason="connect: refused"), "dead_letter", "connect: refused", None),
        (Result("t", "expired", reason="deadline"), "expired", "deadline", None),
        (Result("t", "canceled"), "canceled", "no answer", None),
        (Result("t", "poison", reason="5 deliveries"), "poison", "5 deliveries", None),
        (Result("t", "ok"), "dead_letter", "no answer", None),
    ],
)
def test_everything_else_carries_an_error(result: Result, code: str, message: str, status: int | None) -> None:
    written = json.loads(result_line("a", "f" * 64, result))
    assert written["error"] == {"code": code, "message": message}
    response = written["response"]
    assert (response and response["status_code"]) == status


def test_a_line_that_is_no_success_cannot_be_written_without_an_error() -> None:
    with pytest.raises(ValueError, match="needs an error"):
        output_line("x", "a", status_code=400)
    with pytest.raises(ValueError, match="needs an error"):
        output_line("x", "a")


@pytest.mark.parametrize(
    ("body", "written"),
    [
        (b'{"a": 1.10, "b": 12345678901234567890}', b'{"a": 1.10, "b": 12345678901234567890}'),
        (b'\r\n{\n  "a": "\\n"\r\n}\n', b'{   "a": "\\n"  }'),
        ('{"a": "x\u2028y\u2029z\u0085"}'.encode(), b'{"a": "x\\u2028y\\u2029z\\u0085"}'),
        (b"null", b"null"),
        (b"plain", b'"plain"'),
        (b"", b'""'),
        (b"\xff", b'"\\ufffd"'),
        (b'{"a": NaN}', b'"{\\"a\\": NaN}"'),
        (b'data: {"a": 1}\n\n', b'"data: {\\"a\\": 1}\\n\\n"'),
        (b'\xef\xbb\xbf{"a": 1}', b'"\\ufeff{\\"a\\": 1}"'),
    ],
)
def test_bodies_stand_as_they_came_or_as_text(body: bytes, written: bytes) -> None:
    assert json_or_text(body) == written


@given(
    st.binary(max_size=100)
    | JSON.map(lambda value: json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8", "replace"))
)
def test_every_body_gives_one_strict_line(body: bytes) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    written = result_line("a\n\u2028", "0" * 64, ok(body=body))
    assert written.count(b"\n") == 1
    assert len(written.decode().splitlines()) == 1
    record = json.loads(written, parse_constant=refuse)
    try:
        expected = json.loads(body.decode(), parse_constant=lambda name: int(name))
    except ValueError:
        expected = body.decode("utf-8", "replace")
    assert record["response"]["body"] == expected


def test_a_body_nested_too_deeply_is_text() -> None:
    body = b"[" * 200_000 + b"]" * 200_000
    assert json_or_text(body) == b'"' + body + b'"'
