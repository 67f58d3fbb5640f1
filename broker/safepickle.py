"""Reads pickles of plain values, and nothing else.

A pickle is a program. This reader knows only the instructions that build None, bool, int, float, str, bytes, list,
tuple, dict and set; every other one, above all those that name, call or restore a Python object, ends the reading.
There is no way from here to an import or a call, so there is nothing to bypass. Protocols 0 to 5.

What protocols 0-3 write by calling a global is refused too: sets, and in 0-2 also bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

MAX_VALUES = 200_000  # instructions read, and values in the result counted as often as they occur in it
MAX_DEPTH = 100  # levels of nesting
MAX_INT_BYTES = 128
MAX_PLAIN_KEYS = 1000  # keys and set members that are numbers: their hashes can be made to collide, text's cannot
HIGHEST_PROTOCOL = 5

_FORBIDDEN = {
    ord("R"): "a call",
    ord("b"): "an object's state",
    ord("i"): "an object",
    ord("o"): "an object",
    0x81: "an object",
    0x92: "an object",
    ord("P"): "a persistent id",
    ord("Q"): "a persistent id",
    0x82: "an extension code",
    0x83: "an extension code",
    0x84: "an extension code",
    0x91: "a frozenset",
    0x96: "a bytearray",
    0x97: "an out-of-band buffer",
    0x98: "an out-of-band buffer",
    ord("S"): "a Python 2 string",
    ord("T"): "a Python 2 string",
    ord("U"): "a Python 2 string",
}
_FLOAT = struct.Struct(">d")
_MALFORMED = (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error)


class UnsafePickle(ValueError):
    """Not a pickle of plain values within the limits. The message is one phrase and shows none of the values."""


def loads(raw: bytes, max_bytes: int) -> Any:
    """The value of a pickle of at most `max_bytes` bytes, whose text and bytes sum to at most `max_bytes` too.

    Raises UnsafePickle.
    """
    if len(raw) > max_bytes:
        raise UnsafePickle(f"is {len(raw)} bytes, more than {max_bytes}")
    try:
        value = _Reader(raw).read()
    except UnsafePickle:
        raise
    except _MALFORMED as error:
        raise UnsafePickle(f"is damaged ({type(error).__name__})") from None
    _measure(value, max_bytes)
    return value


def _measure(value: Any, max_bytes: int) -> None:
    """Bounds what the value becomes when written out: a pickle may mention one list a million times, or in itself."""
    count = 1
    size = 0
    waiting: list[tuple[Any, int]] = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, (str, bytes)):
            size += len(item)
        elif isinstance(item, (list, tuple, set, dict)):
            count += len(item)
            if depth > MAX_DEPTH:
                raise UnsafePickle(f"nests deeper than {MAX_DEPTH} levels, or contains itself")
        if count > MAX_VALUES or size > max_bytes:
            raise UnsafePickle(f"grows to more than {MAX_VALUES} values or {max_bytes} bytes when written out")
        if isinstance(item, dict):
            size += sum(len(key) for key in item if isinstance(key, (str, bytes)))
            waiting.extend((child, depth + 1) for child in item.values())
        elif isinstance(item, (list, tuple, set)):
            waiting.extend((child, depth + 1) for child in item)


class _Reader:
    """One pass over the bytes. `_stack` is the pickle machine's stack; `_marks` are positions in it."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._plain_keys = 0

    def read(self) -> Any:
        raw, end = self._raw, len(self._raw)
        for _ in range(MAX_VALUES):
            if self._at >= end:
                raise UnsafePickle("ends too early")
            code = raw[self._at]
            self._at += 1
            if code == 0x2E:  # STOP
                return self._stop()
            step = _STEPS.get(code)
            if step is None:
                raise self._refused(code)
            step(self)
        raise UnsafePickle(f"has more than {MAX_VALUES} instructions")

    def _stop(self) -> Any:
        if len(self._stack) != 1 or self._marks or self._at != len(self._raw):
            raise UnsafePickle("is damaged (values left over)")
        return self._stack[0]

    def _refused(self, code: int) -> UnsafePickle:
        if code == ord("c"):
            return UnsafePickle(f"names the Python object {f'{self._line(100)}.{self._line(100)}'!r}")
        if code == 0x93:
            name = ".".join(part[:100] for part in self._stack[-2:] if isinstance(part, str))
            return UnsafePickle(f"names the Python object {name!r}")
        return UnsafePickle(f"contains {_FORBIDDEN.get(code, f'the unknown instruction 0x{code:02x}')}")

    # Reading from the bytes

    def _take(self, count: int) -> bytes:
        start = self._at
        self._at = start + count
        if self._at > len(self._raw):
            raise UnsafePickle("ends too early")
        return self._raw[start : self._at]

    def _size(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _line(self, most: int | None = None) -> str:
        end = self._raw.find(b"\n", self._at, None if most is None else self._at + most + 1)
        if end < 0:
            raise UnsafePickle("has a line that is too long or has no end")
        line = self._raw[self._at : end]
        self._at = end + 1
        return line.decode("ascii", "backslashreplace") if most is not None else line.decode("raw-unicode-escape")

    # Instructions

    def proto(self) -> None:
        if self._take(1)[0] > HIGHEST_PROTOCOL:
            raise UnsafePickle(f"has a protocol above {HIGHEST_PROTOCOL}")

    def frame(self) -> None:
        if self._size(8) > len(self._raw) - self._at:
            raise UnsafePickle("ends too early")

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def none(self) -> None:
        self._stack.append(None)

    def true(self) -> None:
        self._stack.append(True)

    def false(self) -> None:
        self._stack.append(False)

    def int_line(self) -> None:
        line = self._line(MAX_INT_BYTES)
        self._stack.append({"00": False, "01": True}[line] if line in ("00", "01") else int(line))

    def long_line(self) -> None:
        self._stack.append(int(self._line(MAX_INT_BYTES * 3).removesuffix("L")))

    def int4(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def int1(self) -> None:
        self._stack.append(self._take(1)[0])

    def int2(self) -> None:
        self._stack.append(self._size(2))

    def long1(self) -> None:
        self._long(self._size(1))

    def long4(self) -> None:
        self._long(self._size(4))

    def _long(self, width: int) -> None:
        if width > MAX_INT_BYTES:
            raise UnsafePickle(f"has an integer of more than {MAX_INT_BYTES} bytes")
        self._stack.append(int.from_bytes(self._take(width), "little", signed=True))

    def float_line(self) -> None:
        self._stack.append(float(self._line(MAX_INT_BYTES)))

    def float8(self) -> None:
        self._stack.append(_FLOAT.unpack(self._take(8))[0])

    def text_line(self) -> None:
        self._stack.append(self._line())

    def text1(self) -> None:
        self._stack.append(str(self._take(self._size(1)), "utf-8", "surrogatepass"))

    def text4(self) -> None:
        self._stack.append(str(self._take(self._size(4)), "utf-8", "surrogatepass"))

    def text8(self) -> None:
        self._stack.append(str(self._take(self._size(8)), "utf-8", "surrogatepass"))

    def bytes1(self) -> None:
        self._stack.append(self._take(self._size(1)))

    def bytes4(self) -> None:
        self._stack.append(self._take(self._size(4)))

    def bytes8(self) -> None:
        self._stack.append(self._take(self._size(8)))

    def empty_list(self) -> None:
        self._stack.append([])

    def empty_tuple(self) -> None:
        self._stack.append(())

    def empty_dict(self) -> None:
        self._stack.append({})

    def empty_set(self) -> None:
        self._stack.append(set())

    def _since_mark(self) -> list[Any]:
        position = self._marks.pop()
        items = self._stack[position:]
        del self._stack[position:]
        return items

    def list_of(self) -> None:
        self._stack.append(self._since_mark())

    def tuple_of(self) -> None:
        self._stack.append(tuple(self._since_mark()))

    def dict_of(self) -> None:
        items = self._since_mark()
        self._stack.append({})
        self._set_items(items)

    def _last(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise UnsafePickle("is damaged (too few values)")
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def tuple1(self) -> None:
        self._stack.append(tuple(self._last(1)))

    def tuple2(self) -> None:
        self._stack.append(tuple(self._last(2)))

    def tuple3(self) -> None:
        self._stack.append(tuple(self._last(3)))

    def _target(self, kind: type) -> Any:
        target = self._stack[-1]
        if type(target) is not kind:
            raise UnsafePickle(f"is damaged (no {kind.__name__} to add to)")
        return target

    def append(self) -> None:
        items = self._last(1)
        self._target(list).extend(items)

    def appends(self) -> None:
        items = self._since_mark()
        self._target(list).extend(items)

    def add_items(self) -> None:
        items = self._since_mark()
        self._target(set).update(map(self._key, items))

    def set_item(self) -> None:
        self._set_items(self._last(2))

    def set_items(self) -> None:
        self._set_items(self._since_mark())

    def _set_items(self, items: list[Any]) -> None:
        self._target(dict).update(zip(map(self._key, items[::2]), items[1::2], strict=True))

    def _key(self, key: Any) -> Any:
        if not isinstance(key, (str, bytes)):
            if key is not None and not isinstance(key, (bool, int, float)):
                raise UnsafePickle(f"has a {type(key).__name__} as a key or set member")
            self._plain_keys += 1
            if self._plain_keys > MAX_PLAIN_KEYS:
                raise UnsafePickle(f"has more than {MAX_PLAIN_KEYS} keys or set members that are not text")
        return key

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put_line(self) -> None:
        self._put(int(self._line(10)))

    def put1(self) -> None:
        self._put(self._size(1))

    def put4(self) -> None:
        self._put(self._size(4))

    def _put(self, index: int) -> None:
        if index > MAX_VALUES:
            raise UnsafePickle(f"remembers more than {MAX_VALUES} values")
        self._memo[index] = self._stack[-1]

    def get_line(self) -> None:
        self._stack.append(self._memo[int(self._line(10))])

    def get1(self) -> None:
        self._stack.append(self._memo[self._size(1)])

    def get4(self) -> None:
        self._stack.append(self._memo[self._size(4)])


_STEPS: dict[int, Callable[[_Reader], None]] = {
    0x80: _Reader.proto,
    0x95: _Reader.frame,
    ord("("): _Reader.mark,
    ord("N"): _Reader.none,
    0x88: _Reader.true,
    0x89: _Reader.false,
    ord("I"): _Reader.int_line,
    ord("L"): _Reader.long_line,
    ord("J"): _Reader.int4,
    ord("K"): _Reader.int1,
    ord("M"): _Reader.int2,
    0x8A: _Reader.long1,
    0x8B: _Reader.long4,
    ord("F"): _Reader.float_line,
    ord("G"): _Reader.float8,
    ord("V"): _Reader.text_line,
    0x8C: _Reader.text1,
    ord("X"): _Reader.text4,
    0x8D: _Reader.text8,
    ord("C"): _Reader.bytes1,
    ord("B"): _Reader.bytes4,
    0x8E: _Reader.bytes8,
    ord("]"): _Reader.empty_list,
    ord(")"): _Reader.empty_tuple,
    ord("}"): _Reader.empty_dict,
    0x8F: _Reader.empty_set,
    ord("l"): _Reader.list_of,
    ord("t"): _Reader.tuple_of,
    ord("d"): _Reader.dict_of,
    0x85: _Reader.tuple1,
    0x86: _Reader.tuple2,
    0x87: _Reader.tuple3,
    ord("a"): _Reader.append,
    ord("e"): _Reader.appends,
    0x90: _Reader.add_items,
    ord("s"): _Reader.set_item,
    ord("u"): _Reader.set_items,
    0x94: _Reader.memoize,
    ord("p"): _Reader.put_line,
    ord("q"): _Reader.put1,
    ord("r"): _Reader.put4,
    ord("g"): _Reader.get_line,
    ord("h"): _Reader.get1,
    ord("j"): _Reader.get4,
}
