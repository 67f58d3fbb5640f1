from __future__ import annotations

import io
import json
import tracemalloc
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.batch import BadLine, BatchTask, bad_line, parse_line, read_batch, refused, result_line
from broker.errors import InvalidTask, PayloadTooLarge
from broker.task import NpuTask, Request, Result

GOOD: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "Grüße"}]},
}


def line(**changes: Any) -> bytes:
    """GOOD with changes; None removes a key."""
    record = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    return json.dumps(record).encode() + b"\n"


def task(raw: bytes, number: int = 1) -> BatchTask:
    parsed = parse_line(raw, number)
    assert isinstance(parsed, BatchTask), parsed
    return parsed


def bad(raw: bytes, number: int = 7) -> BadLine:
    parsed = parse_line(raw, number)
    assert isinstance(parsed, BadLine), parsed
    return parsed


def read(data: bytes, max_bytes: int = 10_000) -> list[BatchTask | BadLine]:
    return list(read_batch(io.BytesIO(data), max_bytes))


def test_a_line_is_a_request() -> None:
    parsed = task(line(), 3)
    assert parsed.work == Request("POST", "/v1/chat/completions", json=GOOD["body"])
    assert (parsed.number, parsed.custom_id) == (3, "a")
    assert len(parsed.digest) == 64
    assert parsed.line_id == "batch_req_" + parsed.digest[:24]


def test_a_line_is_an_npu_task() -> None:
    parsed = task(b'{"custom_id": "n", "task_type": "text_analysis", "data": {"text": "hi"}}')
    assert parsed.work == NpuTask("text_analysis", {"text": "hi"})


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b" \t\r\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"  "])
def test_line_ends_and_a_bom_change_nothing(start: bytes, end: bytes) -> None:
    assert task(start + line().rstrip() + end) == task(line())


@pytest.mark.parametrize("raw", [b"", b"\n", b"\r\n", b"  \t\n", b"\xef\xbb\xbf\n"])
def test_blank_lines_are_skipped(raw: bytes) -> None:
    assert parse_line(raw, 1) is None


def test_a_get_needs_no_body() -> None:
    assert task(line(method="GET", body=None)).work == Request("GET", "/v1/chat/completions")


def test_the_digest_is_of_the_content_not_of_its_spelling() -> None:
    spelled = b'{"url":"/v1/chat/completions" , "method":"POST", "custom_id":"a", "body":{"messages":[{"content":'
    spelled += '"Grüße","role":"user"}],"model":"m"}}'.encode()
    assert task(spelled, 9).digest == task(line(), 1).digest


@pytest.mark.parametrize("changes", [{"custom_id": "b"}, {"method": "PUT"}, {"url": "/v1/x"}, {"body": {"model": "n"}}])
def test_the_digest_covers(changes: dict[str, Any]) -> None:
    assert task(line(**changes)).digest != task(line()).digest


MALFORMED: list[tuple[bytes, str, str | None, str]] = [
    (b"{", "invalid_json", None, "not JSON"),
    (b'{"custom_id": "a"} {}', "invalid_json", None, "Extra data"),
    (b"custom_id,body", "invalid_json", None, "not JSON"),
    (b"[1]", "not_an_object", None, "must be an object"),
    (
        b'{"custom_id": "a", "method": "POST", "url": "/x", "body": {}, "url": "/y"}',
        "duplicate_key",
        None,
        "the key 'url' stands twice in one object; keep one",
    ),
    (b'{"custom_id": "a", "custom_id": "a"}', "duplicate_key", None, "'custom_id' stands twice"),
    (
        b'{"custom_id": "a", "method": "POST", "url": "/x", "body": {"m": [{"role": 1, "\\u0072ole": 1}]}}',
        "duplicate_key",
        None,
        "'role' stands twice",
    ),
    (b"null", "not_an_object", None, "must be an object"),
    (b'"text"', "not_an_object", None, "must be an object"),
    (b'{"custom_id": "\xff"}', "invalid_encoding", None, "UTF-8"),
    ("{}".encode("utf-16"), "invalid_encoding", None, "UTF-16"),
    (b'{"custom_id": "a", "method": "POST", "url": "/x", "body": {"n": NaN}}', "invalid_json", None, "NaN"),
    (b'{"custom_id": "a", "method": "POST", "url": "/x", "body": {"n": -Infinity}}', "invalid_json", None, "Infinity"),
    (b'{"custom_id": "a", "method": "POST", "url": "/x", "body": {"n": 1e999}}', "invalid_json", "a", "too large"),
    (b'{"custom_id": ' + b"1" * 5000 + b"}", "invalid_json", None, "too many digits"),
    (b'{"custom_id": ' + b"[" * 200_000, "invalid_json", None, "nested too deeply"),
    (line(custom_id=None), "missing_custom_id", None, "custom_id is missing"),
    (line(custom_id=17), "invalid_custom_id", None, "must be a string"),
    (line(custom_id=""), "invalid_custom_id", None, "1 to 512"),
    (line(custom_id="x" * 513), "invalid_custom_id", None, "1 to 512"),
    (line(url=None), "missing_url", "a", "/v1/chat/completions"),
    (line(url=5), "invalid_url", "a", "url 5"),
    (line(url="v1/x"), "invalid_url", "a", "must start with '/'"),
    (line(url="/v1/../admin"), "invalid_url", "a", "'..'"),
    (line(url="//evil/x"), "invalid_url", "a", "not a URL"),
    (line(url="/a b"), "invalid_url", "a", "percent-encode"),
    (
        line(url="https://me:secret@api.example/v1/x?k=1"),
        "invalid_url",
        "a",
        "'/v1/x', and name the server with --endpoint",
    ),
    (line(url="https://api.example"), "invalid_url", "a", "give the path only"),
    (line(url="http://[bad"), "invalid_url", "a", "give the path only"),
    (line(method=None), "missing_method", "a", '"method": "POST"'),
    (line(method="post"), "invalid_method", "a", "in capitals"),
    (line(method=["POST"]), "invalid_method", "a", "one of DELETE"),
    (line(body=None), "missing_body", "a", "body is missing"),
    (line(body="{}"), "invalid_body", "a", "not a string"),
    (line(body=[1]), "invalid_body", "a", "not a list"),
    (line(headers={"x-a": "b"}), "unknown_field", "a", "'headers' is no field here; a line has custom_id, method, url"),
    (line(**{"n" * 99 + "\n": 1}), "unknown_field", "a", f"'{'n' * 39}…' is no field"),
    (
        b'{"custom_id": "a", "task_type": "text_analysis", "data": {"text": "x"}, "method": "POST"}',
        "unknown_field",
        "a",
        "'method' is no field here; a line has custom_id, task_type, data",
    ),
    (line(task_type="text_analysis"), "ambiguous", "a", "both url and task_type"),
    (b'{"custom_id": "a", "task_type": "dance", "data": {}}', "invalid_task", "a", "must be one of"),
    (b'{"custom_id": "a", "task_type": "text_analysis"}', "invalid_task", "a", "must be an object"),
    (b'{"custom_id": "a", "task_type": ["x"], "data": {}}', "invalid_task", "a", "must be one of"),
]


@pytest.mark.parametrize(("raw", "code", "custom_id", "says"), MALFORMED)
def test_malformed_lines(raw: bytes, code: str, custom_id: str | None, says: str) -> None:
    parsed = bad(raw)
    assert (parsed.number, parsed.code, parsed.custom_id) == (7, code, custom_id)
    assert parsed.message.startswith("line 7: ")
    assert says in parsed.message
    assert "\n" not in parsed.message
    assert len(parsed.message) <= 400
    assert "secret" not in parsed.message
    written = json.loads(bad_line(parsed))
    assert written["error"] == {"code": code, "message": parsed.message}
    assert (written["custom_id"], written["response"]) == (custom_id, None)


def test_a_field_that_is_null_is_none() -> None:
    given = json.loads(line())
    assert task(json.dumps({**given, "headers": None, "task_type": None}).encode()) == task(line())


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_no_bytes_make_it_raise(raw: bytes) -> None:
    parsed = parse_line(raw, 1)
    assert parsed is None or isinstance(parsed, BadLine)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(("custom_id", "method", "url", "body", "task_type", "data"), JSON))
)
def test_no_object_makes_it_raise(record: dict[str, Any]) -> None:
    parsed = parse_line(json.dumps(record).encode(), 1)
    assert parsed is not None
    if isinstance(parsed, BadLine):
        assert json.loads(bad_line(parsed))["error"]["code"] == parsed.code


def test_lone_surrogates_survive() -> None:
    raw = b'{"custom_id": "\\ud800", "method": "POST", "url": "/x", "body": {"t": "\\udfff"}}'
    parsed = task(raw)
    result = Result("t1", "ok", 200, {}, b"{}")
    assert json.loads(result_line(parsed.custom_id, parsed.digest, result))["custom_id"] == "\ud800"
    assert [item.custom_id for item in read(raw)] == ["\ud800"]


def test_reading_numbers_lines_as_an_editor_does() -> None:
    parsed = read(b"\n" + line() + b"\r\n{\r\n" + line(custom_id="b").rstrip())
    assert [(item.number, type(item)) for item in parsed] == [(2, BatchTask), (4, BadLine), (5, BatchTask)]


def test_a_repeated_custom_id_is_an_error_line() -> None:
    first, second, third, fourth = read(line() + line(body={"x": 1}) + line(custom_id="b") + line())
    assert isinstance(first, BatchTask)
    assert isinstance(third, BatchTask)
    for repeated, number in ((second, 2), (fourth, 4)):
        assert isinstance(repeated, BadLine)
        assert (repeated.code, repeated.custom_id, repeated.number) == ("duplicate_custom_id", "a", number)
    assert len({item.line_id for item in (first, second, third, fourth)}) == 4


def test_a_custom_id_of_a_bad_line_is_taken_too() -> None:
    first, second = read(line(url=None) + line())
    assert isinstance(first, BadLine)
    assert isinstance(second, BadLine)
    assert (first.code, second.code) == ("missing_url", "duplicate_custom_id")


def test_the_same_broken_line_twice_is_two_lines() -> None:
    one, two = read(b"{\n{\n")
    assert one.line_id != two.line_id
    assert [item.line_id for item in read(b"{\r\n{")] == [one.line_id, two.line_id]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
@pytest.mark.parametrize("over", [0, 1, 2, 3, 100, 70_000, 200_000])
def test_the_limit_is_exact_and_what_follows_is_read(over: int, end: bytes) -> None:
    limit = 500
    fill = limit + over - len(line(body={"note": ""}).rstrip())
    long = line(body={"note": "x" * fill}).rstrip()
    assert len(long) == limit + over
    parsed = read(long + end + (line(custom_id="next") if end else b""), limit)
    assert isinstance(parsed[0], BatchTask if over == 0 else BadLine)
    assert [(item.custom_id, item.number) for item in parsed[1:]] == ([("next", 2)] if end else [])
    if isinstance(parsed[0], BadLine):
        assert parsed[0].code == "line_too_long"
        assert "at most 500" in parsed[0].message


def test_too_long_lines_are_told_apart_by_all_their_bytes() -> None:
    ids = {read(b"x" * 200_000 + last + b"\n", 500)[0].line_id for last in (b"a", b"b")}
    assert len(ids) == 2
    assert read(b"x" * 200_000 + b"a", 500)[0].line_id == read(b"x" * 200_000 + b"a\r\n", 500)[0].line_id


class Endless(io.RawIOBase):
    """One line of `size` bytes that exists nowhere."""

    def __init__(self, size: int) -> None:
        self.left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self.left)
        buffer[:count] = b"x" * count
        self.left -= count
        return count


def test_a_too_long_line_never_stands_in_memory() -> None:
    tracemalloc.start()
    (parsed,) = read_batch(io.BufferedReader(Endless(50_000_000)), 10_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(parsed, BadLine)
    assert "50000000 bytes" in parsed.message
    assert peak < 1_000_000


def test_what_is_kept_of_each_line_is_small() -> None:
    lines = 20_000
    data = b"".join(line(custom_id=f"{i:0100d}", body={"pad": "x" * 400}) for i in range(lines))
    tracemalloc.start()
    count = sum(1 for _ in read_batch(io.BytesIO(data), 10_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == lines
    assert peak < 250 * lines  # a line has 600 bytes


def test_ten_thousand_lines_of_which_37_are_malformed() -> None:
    broken = [raw for raw, *_ in MALFORMED if len(raw) < 10_000 and b"\n" not in raw.rstrip(b"\n")]
    bad_at = {i * 269 + 11: broken[i % len(broken)].rstrip(b"\n") for i in range(36)}
    data = [bad_at.get(i, line(custom_id=f"task-{i}").rstrip()) for i in range(10_000)]
    data[9_999] = line(custom_id="task-0").rstrip()
    parsed = read(b"\n".join(data))
    kinds = Counter(type(item) for item in parsed)
    assert kinds == {BatchTask: 9_963, BadLine: 37}
    assert len({item.line_id for item in parsed}) == 10_000
    assert [item.number for item in parsed] == list(range(1, 10_001))
    assert all(isinstance(item, BatchTask) or item.message for item in parsed)


def test_a_task_that_cannot_be_enqueued_becomes_a_bad_line() -> None:
    parsed = task(line(), 4)
    refusal = refused(parsed, PayloadTooLarge("task of 9 bytes: at most 8"))
    assert (refusal.code, refusal.message) == ("too_large", "line 4: task of 9 bytes: at most 8")
    assert refused(parsed, InvalidTask("no")).code == "invalid_task"
    assert refusal.line_id != parsed.line_id
