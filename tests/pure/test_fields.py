"""What others may have written into Redis is read as what it is, or as unset; reading never fails."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import fields
from broker.outcome import FIELDS, decode_answer, encode_answer, read_result
from broker.taskview import read_history

MANGLED: tuple[bytes, ...] = (
    b"", b"\xff\xfe\x00", b"{", b"[1, 2]", b"null", b'"text"', b"NaN", b"-1", b"1e999", b"9" * 5000, b"0x10",
    b"[" * 5000,
    b'{"at": "x", "started": [], "attempt": {}, "status": "x", "headers": 3, "endpoint": {}}', b'{"at": 1e308}',
    b'{"status": [], "headers": {"content-type": 5}, "endpoint": 7, "started": "x"}', b'{"status": 1e999, "at": NaN}',
)  # fmt: skip
anything = st.one_of(st.sampled_from(MANGLED), st.binary(max_size=50), st.none())


@given(st.lists(anything, min_size=len(FIELDS), max_size=len(FIELDS)), st.sampled_from([b"ok", b"dead", None]))
def test_a_result_is_read_whatever_stands_there(values: list[bytes | None], outcome: bytes | None) -> None:
    values[1] = outcome
    result = read_result("t", values)
    if result is not None:
        assert isinstance(result.status_code, int | None)
        assert isinstance(result.attempts, int)
        assert all(isinstance(each, float | int) for each in (result.started_at, result.ended_at))
        assert all(isinstance(text, str) for text in result.headers.values())


@pytest.mark.parametrize("status", [200, None])
@pytest.mark.parametrize("body", [b"", b"{}", b"\n\n[1]\n", b"\xff\x00"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "application/json"},
        {"content-type": "application/json; charset=utf-8"},
        {"content-type": ""},
        {"content-type": "application/json", "x-request-id": "a\nb\u20ac"},
        {"retry-after": "5"},
        {"content-type": "text/plain", "retry-after": "", "x-request-id": "7"},
    ],
)
def test_an_answer_is_read_as_it_was(status: int | None, headers: dict[str, str], body: bytes) -> None:
    line = encode_answer(status, {**headers, "x-else": "not kept"}, "e1")
    assert decode_answer(line.encode() + b"\n" + body) == (status, "e1", headers, body)


@pytest.mark.parametrize("line", MANGLED, ids=range(len(MANGLED)))
def test_a_history_is_read_whatever_stands_there(line: bytes) -> None:
    good = json.dumps({"attempt": 1, "endpoint": "e", "kind": "cut", "status": 503, "started": 1.0, "ended": 2.0})
    found = read_history(f"{fields.as_text(line)}\n{good}")
    assert (found[-1].number, found[-1].status_code, found[-1].ended_at) == (1, 503, 2.0)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (fields.as_int, "5", 5),
        (fields.as_int, b"-5", -5),
        (fields.as_int, "", None),
        (fields.as_int, "x", None),
        (fields.as_int, "9" * 5000, None),
        (fields.as_count, "x", 0),
        (fields.as_count, None, 0),
        (fields.as_seconds, "1500", 1.5),
        (fields.as_seconds, b"1500", 1.5),
        (fields.as_seconds, "0", None),
        (fields.as_seconds, "inf", None),
        (fields.as_seconds, "nan", None),
        (fields.as_seconds, "1e300", None),
        (fields.as_seconds, "9" * 20, None),
        (fields.as_seconds, "-5", None),
        (fields.as_seconds, "253402300799000", 253_402_300_799.0),
        (fields.as_seconds, "x", None),
        (fields.as_date, "2026-01-31T12:34:56.789Z", 1_769_862_896.789),
        (fields.as_date, b"2026-01-31T12:34:56.789012Z", 1_769_862_896.789012),
        (fields.as_date, "2026-01-31T12:34:56Z", 1_769_862_896.0),
        (fields.as_date, "", None),
        (fields.as_date, None, None),
        (fields.as_date, "2026-01-31T12:34:56", None),
        (fields.as_date, "9999-12-31T23:59:59-12:00", None),
        (fields.as_date, "0001-01-01T00:00:00Z", None),
        (fields.as_date, "2026-02-30T00:00:00Z", None),
        (fields.as_date, "2026-W05-6", None),
        (fields.as_date, b"\xff", None),
        (fields.as_array, b"[1]", [1]),
        (fields.as_array, b"{}", []),
        (fields.as_object, b'{"a": 1}', {"a": 1}),
        (fields.as_object, b"[1]", {}),
        (fields.as_object, b"\xff", {}),
        (fields.as_object, "[" * 100_000, {}),
        (fields.as_number, True, None),
        (fields.as_number, float("nan"), None),
        (fields.as_number, 1.5, 1.5),
        (fields.as_status, 200, 200),
        (fields.as_status, "200", None),
        (fields.as_status, 10, None),
        (fields.as_headers, {"a": "b", "c": 1}, {"a": "b"}),
        (fields.as_headers, "x", {}),
    ],
)
def test_readers(read: Any, text: Any, value: Any) -> None:
    assert read(text) == value
