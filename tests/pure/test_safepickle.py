"""broker.safepickle: reads plain values at every protocol; nothing that could run code, nothing that could explode."""

from __future__ import annotations

import datetime
import decimal
import math
import os
import pickle
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import safepickle
from broker.safepickle import UnsafePickle

LIMIT = 262_144
PROTOCOLS = range(safepickle.HIGHEST_PROTOCOL + 1)

scalars = st.none() | st.booleans() | st.integers(-(2**300), 2**300) | st.floats(allow_nan=False) | st.text()
keys = scalars | st.binary()
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(scalars, inner),
    max_leaves=30,
)
new_trees = st.recursive(
    keys,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner) | st.sets(keys),
    max_leaves=30,
)


def refusal(raw: bytes, limit: int = LIMIT) -> str:
    with pytest.raises(UnsafePickle) as caught:
        safepickle.loads(raw, limit)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 300
    return message


def same(left: Any, right: Any) -> bool:
    """Equal in type and sign too: 1, True and 1.0 differ, and so do 0.0 and -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    return bool(left == right) and (not isinstance(left, float) or math.copysign(1, left) == math.copysign(1, right))


@given(value=trees, protocol=st.sampled_from(PROTOCOLS))
def test_reads_what_pickle_wrote(value: Any, protocol: int) -> None:
    assert same(safepickle.loads(pickle.dumps(value, protocol), LIMIT), value)


@given(value=new_trees, protocol=st.sampled_from([4, 5]))
def test_reads_bytes_and_sets_where_the_protocol_has_them(value: Any, protocol: int) -> None:
    assert same(safepickle.loads(pickle.dumps(value, protocol), LIMIT), value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_value_mentioned_twice_is_read_twice(protocol: int) -> None:
    shared = {"role": "user", "content": "hello"}
    assert safepickle.loads(pickle.dumps([shared, shared, "hello"], protocol), LIMIT) == [shared, shared, "hello"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_many_values_are_read_in_order(protocol: int) -> None:
    value = {str(n): list(range(n)) for n in range(60)}
    assert safepickle.loads(pickle.dumps(value, protocol), LIMIT) == value


def test_nan_stays_nan() -> None:
    assert math.isnan(safepickle.loads(pickle.dumps(math.nan), LIMIT))


class Canary:
    """Unpickling it with pickle creates the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str, int], int], tuple[str, int]]:
        return os.open, (str(self.path), os.O_CREAT | os.O_WRONLY)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_canary_does_not_run(protocol: int, tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    raw = pickle.dumps(["fine", {"inside": Canary(canary)}], protocol)
    assert "open" in refusal(raw)
    assert not canary.exists()
    os.close(pickle.loads(raw)[1]["inside"])
    assert canary.exists()  # the canary itself works


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", [decimal.Decimal(1), datetime.date(2026, 1, 1), os.system, Canary, range(3), 1j, ...])
def test_objects_are_refused_by_name(value: Any, protocol: int) -> None:
    assert "names the Python object" in refusal(pickle.dumps(value, protocol))


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "'os.system'"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "'os.system'"),
        (b"\x80\x04]]\x93.", "''"),
        (b"(S'true'\nios\nsystem\n.", "Python 2 string"),
        (b"(ios\nsystem\n.", "an object"),
        (b"Pid\n.", "a persistent id"),
        (b"K\x01Q.", "a persistent id"),
        (b"\x80\x02\x82\x01.", "an extension code"),
        (b"\x80\x02\x83\x01\x00.", "an extension code"),
        (b"\x80\x02\x84\x01\x00\x00\x00.", "an extension code"),
        (b"N)R.", "a call"),
        (b"N)\x81.", "an object"),
        (b"N)}\x92.", "an object"),
        (b"N}b.", "an object's state"),
        (b"\x80\x05\x97.", "an out-of-band buffer"),
        (b"\x80\x05\x96\x01\x00\x00\x00\x00\x00\x00\x00x.", "a bytearray"),
        (b"\x80\x04(\x91.", "a frozenset"),
        (b"N2.", "the unknown instruction 0x32"),
        (b"\xff.", "the unknown instruction 0xff"),
        (b"\x80\x06N.", "a protocol above 5"),
    ],
)
def test_every_instruction_that_is_not_a_plain_value_is_refused(raw: bytes, what: str) -> None:
    assert what in refusal(raw)


def test_no_instruction_is_known_but_those_of_plain_values() -> None:
    harmless = set(
        "PROTO FRAME MARK NONE NEWTRUE NEWFALSE INT LONG BININT BININT1 BININT2 LONG1 LONG4 FLOAT BINFLOAT UNICODE "
        "SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 EMPTY_LIST EMPTY_TUPLE EMPTY_DICT "
        "EMPTY_SET LIST TUPLE DICT TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS ADDITEMS SETITEM SETITEMS MEMOIZE PUT BINPUT "
        "LONG_BINPUT GET BINGET LONG_BINGET".split()
    )
    assert {op.name for op in pickletools.opcodes if ord(op.code) in safepickle._STEPS} == harmless
    assert len(safepickle._STEPS) == len(harmless)


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"\x80\x04\x95" + u64(2**63) + b"N.", "ends too early"),
        (b"\x80\x04\x8d" + u64(2**62) + b"N.", "ends too early"),
        (b"\x80\x04\x8e" + u64(2**64 - 1) + b"N.", "ends too early"),
        (b"X" + u32(2**32 - 1) + b".", "ends too early"),
        (b"Nr" + u32(2**31) + b".", "remembers more than"),
        (b"Np4000000000\n.", "remembers more than"),
        (b"\x8b" + u32(5000) + bytes(5000) + b".", "an integer of more than"),
        (b"L" + b"9" * 5000 + b"L\n.", "a line that is too long"),
        (b"I" + b"9" * 5000 + b"\n.", "a line that is too long"),
        (b"]" * 300_000, "more than 262144"),
        (b"]" * 250_000 + b".", "more than 200000 instructions"),
        (b"]" + b"]" * 5000 + b"a" * 5000 + b".", "nests deeper"),
        (b"]q\x00h\x00a.", "nests deeper"),  # a list in itself
        (b"N", "ends too early"),
        (b"", "ends too early"),
        (b".", "values left over"),
        (b"NN.", "values left over"),
        (b"(N.", "values left over"),
        (b"N.N", "values left over"),
        (b"a.", "too few values"),
        (b"Na.", "damaged"),
        (b"NNa.", "no list to add to"),
        (b"]K\x01K\x02s.", "no dict to add to"),
        (b"](K\x01K\x02u.", "no dict to add to"),
        (b"}(K\x01\x90.", "no set to add to"),
        (b"}(K\x01u.", "damaged"),
        (b"}]Ns.", "a list as a key"),
        (b"})Ns.", "a tuple as a key"),
        (b"\x8f(}\x90.", "a dict as a key or set member"),
        (b"h\x05.", "damaged"),
        (b"t.", "damaged"),
        (b"Ix\n.", "damaged"),
        (b"Fx\n.", "damaged"),
        (b"Vno end", "has no end"),
        (b"\x8c\x02\xff\xff.", "damaged"),
    ],
)
def test_bombs_and_damage_are_refused(raw: bytes, what: str) -> None:
    assert what in refusal(raw)


def test_a_list_that_grows_when_written_out_is_refused() -> None:
    bomb: list[Any] = ["x"]
    for _ in range(40):
        bomb = [bomb, bomb]
    assert "grows to more" in refusal(pickle.dumps(bomb))
    assert "grows to more" in refusal(pickle.dumps([["x"] * 30_000] * 30_000))


def test_text_that_grows_when_written_out_is_refused() -> None:
    text = "x" * 10_000
    assert "262144 bytes" in refusal(pickle.dumps([text] * 100))
    assert "262144 bytes" in refusal(pickle.dumps([{text: 1}] * 100))


def test_numbers_made_to_collide_are_refused() -> None:
    colliding = {n * (2**61 - 1): None for n in range(safepickle.MAX_PLAIN_KEYS + 1)}
    assert "keys or set members that are not text" in refusal(pickle.dumps(colliding))
    assert "keys or set members that are not text" in refusal(pickle.dumps(set(colliding)))


def test_the_size_limit_is_exact() -> None:
    raw = pickle.dumps("x" * 100)
    assert safepickle.loads(raw, len(raw)) == "x" * 100
    assert "more than" in refusal(raw, len(raw) - 1)


@given(value=new_trees, cut=st.floats(0, 1, exclude_max=True))
def test_a_cut_pickle_is_refused(value: Any, cut: float) -> None:
    raw = pickle.dumps(value)
    refusal(raw[: int(len(raw) * cut)])


@given(value=new_trees, where=st.integers(min_value=0), byte=st.integers(0, 255))
def test_a_changed_pickle_gives_plain_values_or_a_refusal(value: Any, where: int, byte: int) -> None:
    raw = bytearray(pickle.dumps(value))
    raw[where % len(raw)] = byte
    check_plain_or_refused(bytes(raw))


@given(st.binary(max_size=300))
def test_noise_gives_plain_values_or_a_refusal(raw: bytes) -> None:
    check_plain_or_refused(raw)


def check_plain_or_refused(raw: bytes) -> None:
    try:
        value = safepickle.loads(raw, LIMIT)
    except UnsafePickle:
        return
    waiting = [value]
    while waiting:
        item = waiting.pop()
        assert type(item) in (type(None), bool, int, float, str, bytes, list, tuple, dict, set)
        if isinstance(item, dict):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple, set)):
            waiting.extend(item)
