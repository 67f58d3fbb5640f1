"""broker.rqjob: what we write, RQ's readers read; what anyone wrote, we read or refuse with one line."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import math
import pickle
import tracemalloc
import zlib
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import rqjob
from broker.errors import InvalidTask, PayloadTooLarge
from broker.rqjob import Decoded, decode_data, encode_work
from broker.task import NPU_TASK_TYPES, NpuTask, Request, Work
from tests.pure.test_safepickle import Canary

LIMIT = 262_144
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 64}

text = st.text(st.characters(codec="utf-8"))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner) | st.dictionaries(text, inner),
    max_leaves=20,
)
timeouts = st.none() | st.floats(0.001, 1e6)
headers = st.dictionaries(st.sampled_from(["accept", "content-type", "x-a"]), st.sampled_from(["", "a", "b; c=d"]))
requests = st.builds(
    Request,
    st.sampled_from(["GET", "POST"]),
    st.sampled_from(["/", "/v1/chat/completions", "/a?b=c%20d"]),
    json=json_values,
    headers=headers,
    timeout=timeouts,
) | st.builds(Request, st.just("POST"), st.just("/x"), body=st.none() | text, headers=headers, timeout=timeouts)
npu_tasks = st.builds(NpuTask, st.sampled_from(NPU_TASK_TYPES), st.dictionaries(text, json_values), timeout=timeouts)
works = requests | npu_tasks


@pytest.fixture(params=["orjson", "json"])
def either_json(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs with orjson and without."""
    if request.param == "json":
        monkeypatch.setattr(rqjob, "orjson", None)
    return str(request.param)


def call(function: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return function, None, args, kwargs


def refusal(value: Any, serializer: Literal["json", "pickle"] = "json") -> str:
    raw = json.dumps(value).encode() if serializer == "json" else pickle.dumps(value)
    return refusal_of_bytes(raw)


def refusal_of_bytes(raw: bytes, limit: int = LIMIT) -> str:
    with pytest.raises(InvalidTask) as caught:
        decode_data(raw, limit)
    message = str(caught.value)
    assert message.startswith("task data: ")
    assert message.isprintable()
    assert len(message) <= 350
    return message


# Our own producers


@given(works)
def test_a_task_comes_back_as_it_was(work: Work) -> None:
    assert decode_data(encode_work(work), LIMIT) == Decoded(work, "json")


@given(works)
def test_a_task_comes_back_without_orjson_too(work: Work) -> None:
    kept, rqjob.orjson = rqjob.orjson, None
    try:
        raw = encode_work(work)
        assert decode_data(raw, LIMIT).work == work
    finally:
        rqjob.orjson = kept
    assert decode_data(raw, LIMIT).work == work


def test_data_is_the_call_that_rq_makes() -> None:
    request = Request("POST", "/v1/x", json=CHAT, headers={"X-A": "b"}, timeout=5)
    args, kwargs = ["POST", "/v1/x", CHAT], {"headers": {"x-a": "b"}, "timeout": 5.0}
    assert json.loads(encode_work(request)) == ["workers.jobs.request", None, args, kwargs]
    assert json.loads(encode_work(Request("GET", "/"))) == ["workers.jobs.request", None, ["GET", "/"], {}]
    text = Request("PUT", "/", body="x")
    assert json.loads(encode_work(text)) == ["workers.jobs.request", None, ["PUT", "/"], {"body": "x"}]
    npu = NpuTask("text_analysis", {"input_text": "x"})
    args = ["text_analysis", {"input_text": "x"}]
    assert json.loads(encode_work(npu)) == ["workers.jobs.npu", None, args, {}]


def test_data_is_compressed_from_2_kib() -> None:
    def of_size(size: int) -> bytes:
        empty = len(encode_work(Request("POST", "/", body="")))
        return encode_work(Request("POST", "/", body="x" * (size - empty)))

    assert len(of_size(rqjob.COMPRESS_FROM - 1)) == rqjob.COMPRESS_FROM - 1
    assert len(zlib.decompress(of_size(rqjob.COMPRESS_FROM))) == rqjob.COMPRESS_FROM


@pytest.mark.usefixtures("either_json")
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (math.nan, "json: nan is no JSON number"),
        ([1, {"a": math.inf}], "json.1.a: inf is no JSON number"),
        ({"a": [0, {1, 2}]}, "json.a.1: set is no JSON value"),
        ({"a": b"x"}, "json.a: bytes is no JSON value"),
        (datetime.date(2026, 1, 1), "json: date is no JSON value"),
        (decimal.Decimal(1), "json: Decimal is no JSON value"),
        ({1: 2}, "json.1: a key of type int; keys must be text"),
        (2**64, "json: an integer beyond 64 bits"),
        (-(2**63) - 1, "json: an integer beyond 64 bits"),
        ("\ud800", "json: text with half a surrogate pair"),
        ({"\ud800": 1}, "text with half a surrogate pair"),
    ],
)
def test_what_json_cannot_carry_is_refused_when_it_is_written(value: Any, why: str) -> None:
    with pytest.raises(InvalidTask) as caught:
        encode_work(Request("POST", "/", json=value))
    assert str(caught.value).startswith(why) or why in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.usefixtures("either_json")
def test_nesting_has_a_limit_on_both_sides() -> None:
    def nested(levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = [value]
        return value

    deepest = Request("POST", "/", json=nested(rqjob.MAX_DEPTH - 1))
    assert decode_data(encode_work(deepest), LIMIT).work == deepest
    with pytest.raises(InvalidTask, match="nests deeper than 100 levels"):
        encode_work(Request("POST", "/", json=nested(rqjob.MAX_DEPTH)))
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(InvalidTask, match="contains itself"):
        encode_work(Request("POST", "/", json=itself))
    for levels in (rqjob.MAX_DEPTH, 900):
        assert "nests deeper" in refusal(call(rqjob.REQUEST_FUNCTION, method="POST", path="/", json=nested(levels)))
    deep = b'["workers.jobs.request",null,[],' + b"[" * 100_000 + b"]" * 100_000 + b"]"
    assert "neither JSON nor a pickle" in refusal_of_bytes(deep)


@pytest.mark.usefixtures("either_json")
def test_values_that_only_look_unusual_are_written() -> None:
    frozen = NpuTask("text_analysis", MappingProxyType({"a": (1, 2), "b": None, "c": "null"}))
    decoded = decode_data(encode_work(frozen), LIMIT).work
    assert decoded == NpuTask("text_analysis", {"a": [1, 2], "b": None, "c": "null"})


# Plain RQ producers


def compressed(value: Any, serializer: str, protocol: int = 5) -> bytes:
    return zlib.compress(json.dumps(value).encode() if serializer == "json" else pickle.dumps(value, protocol))


@given(works, st.sampled_from(range(6)))
def test_a_pickled_call_is_read_at_every_protocol(work: Work, protocol: int) -> None:
    value = json.loads(_inflated(encode_work(work)))
    for raw in (compressed(tuple(value), "pickle", protocol), pickle.dumps(tuple(value), protocol)):
        assert decode_data(raw, LIMIT) == Decoded(work, "pickle")


@given(works)
def test_a_json_call_is_read(work: Work) -> None:
    value = json.loads(_inflated(encode_work(work)))
    assert decode_data(compressed(value, "json"), LIMIT) == Decoded(work, "json")


def _inflated(raw: bytes) -> bytes:
    return zlib.decompress(raw) if raw[:1] == b"x" else raw


@pytest.mark.usefixtures("either_json")
@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.parametrize(
    ("value", "work"),
    [
        (call("workers.jobs.request", "POST", "/v1", CHAT), Request("POST", "/v1", json=CHAT)),
        (call("workers.jobs.request", "POST", "/v1", None, "text"), Request("POST", "/v1", body="text")),
        (call("workers.jobs.request", "POST", path="/v1", timeout=3), Request("POST", "/v1", timeout=3)),
        (call("workers.jobs.request", method="GET", path="/", json=None, headers=None), Request("GET", "/")),
        (
            call("workers.jobs.npu", "embedding_batch", {"texts": ["a"]}, 7),
            NpuTask("embedding_batch", {"texts": ["a"]}, 7),
        ),
        (call("workers.jobs.npu", "embedding_batch", data={}), NpuTask("embedding_batch", {})),
    ],
)
def test_arguments_may_be_positional(value: Any, work: Work, serializer: Any) -> None:
    assert decode_data(compressed(value, serializer), LIMIT) == Decoded(work, serializer)


@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.parametrize(
    ("value", "what"),
    [
        (call("os.system", "true"), "function 'os.system' is not headrace's; enqueue 'workers.jobs.request'"),
        (call("workers.jobs.other"), "function 'workers.jobs.other' is not headrace's"),
        (call("x\n" * 200), "is not headrace's"),
        (call(None), "function NoneType is not headrace's"),
        (call(["workers.jobs.request"]), "function list is not headrace's"),
        (("request", {"a": 1}, [], {}), "a method or callable object; enqueue the function"),
        (("workers.jobs.request", "", [], {"method": "GET", "path": "/"}), "a method or callable object"),
        (["workers.jobs.request", None, []], "not an RQ call"),
        ({"a": 1}, "not an RQ call"),
        ("call", "not an RQ call"),
        (None, "not an RQ call"),
        (["workers.jobs.request", None, "GET", {}], "args must be a list"),
        (["workers.jobs.request", None, [], ["GET"]], "kwargs an object"),
        (call("workers.jobs.request"), "argument 'method' is missing; it takes method, path, json"),
        (call("workers.jobs.request", "GET"), "argument 'path' is missing"),
        (call("workers.jobs.request", "GET", None), "argument 'path' is missing"),
        (call("workers.jobs.npu", "text_analysis"), "argument 'data' is missing"),
        (call("workers.jobs.request", "GET", "/", url="http://x/"), "unknown argument 'url'; it takes method, path"),
        (call("workers.jobs.request", "GET", "/", method="GET"), "argument 'method' is given twice"),
        (call("workers.jobs.request", *"abcdefg"), "7 arguments; it takes method"),
        (call("workers.jobs.request", "GET", "http://elsewhere/"), "give a path, not a URL"),
        (call("workers.jobs.request", "GET", "//elsewhere/"), "give a path, not a URL"),
        (call("workers.jobs.request", "BREW", "/"), "method 'BREW'"),
        (call("workers.jobs.request", {"a": "x" * 5000}, "/"), "method {'a': 'xxx"),
        (call("workers.jobs.request", "GET", "/", headers={"Host": "x"}), "header 'Host'"),
        (call("workers.jobs.request", "GET", "/", headers={"x-a": "a\r\nb: c"}), "without CR or LF"),
        (call("workers.jobs.request", "GET", "/", headers=["x"]), "headers list"),
        (call("workers.jobs.request", "POST", "/", body=5), "body int"),
        (call("workers.jobs.request", "POST", "/", 1, "x"), "json and body: give one of them"),
        (call("workers.jobs.request", "GET", "/", timeout=-1), "timeout -1"),
        (call("workers.jobs.request", "GET", "/", timeout="5"), "timeout '5'"),
        (call("workers.jobs.npu", "text_analysis", [1]), "data list: must be an object"),
        (call("workers.jobs.npu", "paint", {}), "task_type 'paint'"),
    ],
)
def test_any_other_call_is_refused_with_what_to_do(value: Any, what: str, serializer: Any) -> None:
    assert what in refusal(value, serializer)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (call("workers.jobs.request", "POST", "/", body=b"x"), "body: bytes is no JSON value"),
        (call("workers.jobs.request", "POST", "/", json={"a": {1}}), "json.a: set is no JSON value"),
        (call("workers.jobs.request", "POST", "/", json={1: 2}), "keys must be text"),
        (call("workers.jobs.request", "POST", "/", json=math.nan), "nan is no JSON number"),
        (call("workers.jobs.request", "POST", "/", json=2**64), "an integer beyond 64 bits"),
        (call("workers.jobs.request", "POST", "/", json="\ud800"), "surrogate"),
        (("workers.jobs.request", None, (), {b"method": "GET"}), "keys must be text"),
        (call("workers.jobs.request", "POST", "/", json=datetime.date(2026, 1, 1)), "names the Python object"),
        (call("workers.jobs.request", "POST", "/", json=decimal.Decimal(1)), "give the Queue serializer='json'"),
    ],
)
def test_pickled_values_that_are_not_json_are_refused(value: Any, what: str) -> None:
    assert what in refusal(value, "pickle")


@pytest.mark.parametrize("protocol", range(6))
def test_a_callable_object_is_refused_and_does_not_run(protocol: int, tmp_path: Path) -> None:
    canary = Canary(tmp_path / "ran")
    values: list[tuple[Any, ...]] = [
        ("__call__", canary, (), {}),
        ("workers.jobs.request", canary, (), {"method": "GET", "path": "/"}),
        ("workers.jobs.request", None, (canary,), {}),
        (canary, None, (), {}),
    ]
    for value in values:
        assert "names the Python object" in refusal_of_bytes(compressed(value, "pickle", protocol))
    assert not (tmp_path / "ran").exists()


# Damage and size


@pytest.mark.usefixtures("either_json")
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"hello",
        b"\x84\xa1a",
        b'["workers.jobs.request",null,[],{',
        b"[NaN]",
        b"[1e999",
    ],
)
def test_noise_is_refused(raw: bytes) -> None:
    assert "neither JSON nor a pickle" in refusal_of_bytes(raw)


@given(st.binary(max_size=200), st.sampled_from([b"", b"[", b"\x80\x05", b"(", b"x\x9c"]))
def test_any_bytes_are_a_task_or_a_refusal(raw: bytes, head: bytes) -> None:
    for data in (head + raw, zlib.compress(head + raw)):
        with contextlib.suppress(InvalidTask):
            decode_data(data, LIMIT)


def test_a_zlib_stream_must_be_whole_and_alone() -> None:
    whole = compressed(call("workers.jobs.request", "GET", "/"), "json")
    decode_data(whole, LIMIT)
    assert "cut short or followed by more" in refusal_of_bytes(whole[:-1])
    assert "cut short or followed by more" in refusal_of_bytes(whole + b"x")
    assert "damaged zlib stream" in refusal_of_bytes(whole[:5] + b"\xff\xff\xff" + whole[8:])
    assert "neither JSON nor a pickle" in refusal_of_bytes(zlib.compress(whole))  # only one layer


def test_nothing_is_inflated_past_the_limit() -> None:
    def of_size(size: int) -> bytes:
        empty = len(json.dumps(call("workers.jobs.request", "POST", "/", body="")))
        return compressed(call("workers.jobs.request", "POST", "/", body="x" * (size - empty)), "json")

    decode_data(of_size(10_000), 10_000)
    with pytest.raises(PayloadTooLarge, match="more than 10000 bytes inflated; send less, or raise payload_limit"):
        decode_data(of_size(10_001), 10_000)
    bomb = zlib.compress(bytes(50_000_000))
    tracemalloc.start()
    with pytest.raises(PayloadTooLarge, match="more than 262144 bytes inflated"):
        decode_data(bomb, LIMIT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * LIMIT


def test_size_limits_are_exact() -> None:
    request = Request("POST", "/", body="x" * 3000)
    size = len(_inflated(encode_work(request)))
    assert decode_data(encode_work(request, size), size).work == request
    with pytest.raises(PayloadTooLarge, match=f"{size} bytes, more than {size - 1}; send less"):
        encode_work(request, size - 1)
    small = encode_work(Request("GET", "/"))
    with pytest.raises(PayloadTooLarge, match=f"{len(small)} bytes, more than"):
        decode_data(small, len(small) - 1)
