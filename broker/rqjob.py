"""The RQ job hash: how a task is written so that RQ reads it, and how a task is read, whoever wrote it.

RQ keeps the call in the hash field `data`: `(function name, instance, args, kwargs)` in the producer's serializer,
perhaps inside zlib. Ours is JSON, `["workers.jobs.request", null, ["POST", "/path", ...], {}]`, plain below 2 KiB and
zlib level 1 from there on. A producer that uses RQ alone sends zlib around pickle (RQ's default) or JSON. rq itself is
never imported.
"""

from __future__ import annotations

import json as jsonlib
import math
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pickle import dumps as pickle_dumps  # of plain values only; what others pickled is read by safepickle
from typing import Any, Final, Literal, NamedTuple, cast

from broker import safepickle
from broker.errors import InvalidTask, PayloadTooLarge
from broker.outcome import KEPT_HEADERS
from broker.task import NpuTask, Request, Work

orjson: Any
try:
    import orjson
except ImportError:  # json does the same, only slower
    orjson = None

Serializer = Literal["json", "pickle"]

REQUEST_FUNCTION: Final = "workers.jobs.request"
NPU_FUNCTION: Final = "workers.jobs.npu"
OWN_FIELD: Final = "x_born"  # in the hash of every task that lua/enqueue.lua wrote, and in no other
COMPRESS_FROM: Final = 2048  # bytes
MAX_DEPTH: Final = 100  # levels of nesting in a task's JSON
MAX_REASON_CHARS: Final = 300
MAX_DESCRIPTION_CHARS: Final = 120
MAX_EXC_BYTES: Final = 1 << 20  # of a traceback, inflated

_REQUEST_NAMES: Final = ("method", "path", "json", "body", "headers", "timeout")
_NPU_NAMES: Final = ("task_type", "data", "timeout")
_REQUEST_HEAD: Final = b'["workers.jobs.request",null,'
_NPU_HEAD: Final = b'["workers.jobs.npu",null,'
_STRICT: Final = orjson and orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_PICKLE_STARTS: Final = (b"\x80", b"(")


class Decoded(NamedTuple):
    """A task read from `data`, and the serializer its producer uses (its result goes back in the same)."""

    work: Work
    serializer: Serializer


# Writing


def encode_work(work: Work, limit: int | None = None) -> bytes:
    """The bytes of the field `data`. `limit` is the most bytes the task may have before compression.

    Raises PayloadTooLarge over the limit, InvalidTask for what JSON cannot carry.
    """
    names: Sequence[str]
    args: list[Any]
    kwargs: dict[str, Any] = {}
    if isinstance(work, Request):
        head = _REQUEST_HEAD
        names, args = _REQUEST_NAMES, [work.method, work.path]
        if work.json is not None:
            args.append(work.json)
        if work.body is not None:
            kwargs["body"] = work.body
        if work.headers:
            kwargs["headers"] = work.headers
    else:
        head = _NPU_HEAD
        names, args = _NPU_NAMES, [work.task_type, work.data]
    if work.timeout is not None:
        kwargs["timeout"] = work.timeout
    raw = head + _dump_json(args, kwargs, names)[1:]
    size = len(raw)
    if limit is not None and size > limit:
        raise _too_large(size, limit)
    return raw if size < COMPRESS_FROM else zlib.compress(raw, 1)


def describe(work: Work) -> str:
    """A few words for lists of jobs, without payload or query: `POST /v1/chat/completions`, `npu text_analysis`."""
    if isinstance(work, Request):
        return f"{work.method} {work.path.partition('?')[0]}"[:MAX_DESCRIPTION_CHARS]
    return f"npu {work.task_type}"


def utc(now: float) -> str:
    """Unix seconds in RQ's format, `2026-01-31T12:34:56.789012Z`."""
    micros = int(now * 1_000_000)
    return f"{_utc_second(micros // 1_000_000)}.{micros % 1_000_000:06d}Z"


@lru_cache(maxsize=8)
def _utc_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


# Reading


def decode_data(raw: bytes, limit: int) -> Decoded:
    """The task in the field `data`. `limit` is the most bytes it may have, as stored and inflated.

    Runs and imports nothing that the data names. Raises InvalidTask (PayloadTooLarge over the limit) with one line that
    says what was found and what to do.
    """
    if len(raw) > limit:
        raise _too_large(len(raw), limit)
    if raw[:1] == b"x":  # the first byte of every zlib stream; neither JSON nor a pickle starts so
        raw = _inflate(raw, limit)
    serializer: Serializer
    if raw[:1] in _PICKLE_STARTS:
        serializer, call, trusted = "pickle", _load_pickle(raw, limit), False
    else:
        serializer, call, trusted = "json", _load_json(raw), orjson is not None and not _may_be_deep(raw)
    try:
        return Decoded(_work(call, trusted), serializer)
    except InvalidTask as error:
        raise InvalidTask(_short(f"task data: {error}")) from None


def is_plain(fields: Mapping[str, Any] | Mapping[bytes, Any]) -> bool:
    """Whether the job hash was written by a producer that uses RQ alone (so RQ's result stream is owed)."""
    return not any(name in fields for name in (OWN_FIELD, OWN_FIELD.encode()))


def _inflate(raw: bytes, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(raw, limit + 1)
    except zlib.error:
        raise InvalidTask("task data: damaged zlib stream; enqueue the task again") from None
    if len(data) > limit:
        raise PayloadTooLarge(f"task data: more than {limit} bytes inflated; send less, or raise payload_limit")
    if not inflater.eof or inflater.unused_data:
        raise InvalidTask("task data: zlib stream cut short or followed by more; enqueue the task again")
    return data


def _load_pickle(raw: bytes, limit: int) -> Any:
    try:
        return safepickle.loads(raw, limit)
    except safepickle.UnsafePickle as error:
        reason = f"{error}; headrace loads plain values only: pass those, or give the Queue serializer='json'"
        raise InvalidTask(_short(f"task data: the pickle {reason}")) from None


def _load_json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw) if orjson is not None else jsonlib.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = f"neither JSON nor a pickle ({_short(str(error), 80)}); use RQ's default serializer or 'json'"
        raise InvalidTask(f"task data: {reason}") from None


def _work(call: Any, trusted: bool) -> Work:
    """`trusted`: the values are known to be JSON of bounded depth."""
    if not isinstance(call, (list, tuple)) or len(call) != 4:
        raise InvalidTask("not an RQ call of (function, instance, args, kwargs); enqueue it with RQ or headrace")
    function, instance, args, kwargs = cast("tuple[Any, Any, Any, Any]", call)
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, dict):
        raise InvalidTask("args must be a list and kwargs an object; enqueue it with RQ or headrace")
    if instance is not None:
        raise InvalidTask(f"a method or callable object; enqueue the function {REQUEST_FUNCTION!r} instead")
    if not isinstance(function, str) or function not in (REQUEST_FUNCTION, NPU_FUNCTION):
        name = _short(repr(function), 100) if isinstance(function, str) else type(function).__name__
        raise InvalidTask(f"function {name} is not headrace's; enqueue {REQUEST_FUNCTION!r} or {NPU_FUNCTION!r}")
    if not trusted:
        _check_json(args)
        _check_json(kwargs)
    if function == REQUEST_FUNCTION:
        return Request(**_bind(REQUEST_FUNCTION, _REQUEST_NAMES, args, kwargs))
    return NpuTask(**_bind(NPU_FUNCTION, _NPU_NAMES, args, kwargs))


def _bind(function: str, names: tuple[str, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name. The first two names are required; None is the same as left out."""
    if len(args) > len(names):
        raise InvalidTask(f"{function}: {len(args)} arguments; it takes {', '.join(names)}")
    bound = dict(zip(names, args, strict=False))
    if kwargs:
        if twice := bound.keys() & kwargs.keys():
            raise InvalidTask(f"{function}: argument {min(twice)!r} is given twice; give it once")
        for name in kwargs.keys() - names:
            raise InvalidTask(f"{function}: unknown argument {_short(repr(name), 80)}; it takes {', '.join(names)}")
        bound |= kwargs
    for name in names[:2]:
        if bound.get(name) is None:
            raise InvalidTask(f"{function}: argument {name!r} is missing; it takes {', '.join(names)}")
    return bound


# Results for RQ's own readers


def plain_result(
    status_code: int, headers: Mapping[str, str], body: bytes, endpoint: str, attempts: int
) -> dict[str, Any]:
    """What `job.return_value()` gives a producer that uses RQ alone.

    `status_code`, `headers` (as few as a Result has), `endpoint`, `attempts`, and the answer: `json` if it says it is
    JSON and is, nesting no deeper than a task may, else `body`, text. `headers` with lower-cased names.
    """
    kept = {name: headers[name] for name in KEPT_HEADERS if name in headers}
    result: dict[str, Any] = {"status_code": status_code, "headers": kept, "endpoint": endpoint, "attempts": attempts}
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type == "application/json" or media_type.endswith("+json"):
        try:
            value = jsonlib.loads(body, parse_constant=_no_constant)
            if not (_may_be_deep(body) and _is_deep(value)):  # neither pickle nor every reader takes that
                result["json"] = value
                return result
        except (ValueError, RecursionError):
            pass
    result["body"] = body.decode("utf-8", "replace")
    return result


def rq_return_value(serializer: Serializer, result: Mapping[str, Any]) -> str:
    """`return_value` in RQ's result stream: base64 of the result in the producer's serializer."""
    plain = dict(result)
    raw = pickle_dumps(plain, 4) if serializer == "pickle" else jsonlib.dumps(plain, separators=(",", ":")).encode()
    return b64encode(raw).decode("ascii")


def rq_exc_string(text: str) -> str:
    """`exc_string` in RQ's result stream: base64 of zlib of the text."""
    return b64encode(zlib.compress(text.encode("utf-8", "replace"))).decode("ascii")


def rq_why(exc_string: bytes) -> str:
    """The last line of such a text, which names the error; "" for what is none, or too long."""
    try:
        text = _inflate(b64decode(exc_string), MAX_EXC_BYTES).decode("utf-8", "replace")
    except (InvalidTask, ValueError):
        return ""
    return "".join(text.strip().splitlines()[-1:])


def rq_success(serializer: Serializer, result: Mapping[str, Any], worker: str) -> list[str]:
    """Fields and values of the entry to XADD to `rq:results:<id>` for a success."""
    return ["type", "1", "worker_name", worker, "return_value", rq_return_value(serializer, result)]


def rq_failure(reason: str, worker: str) -> list[str]:
    """The same for a task given up, canceled or expired."""
    return ["type", "2", "worker_name", worker, "exc_string", rq_exc_string(reason)]


# JSON


class _NotJson(Exception):
    """`where` is the way in from the outside, innermost key first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.where: list[str] = []


def _dump_json(args: list[Any], kwargs: dict[str, Any], names: Sequence[str]) -> bytes:
    """Of the pair. `names` those of `args` and on, for errors."""
    pair = [args, kwargs]
    raw: bytes | None = None
    if orjson is not None:
        try:
            raw = orjson.dumps(pair, option=_STRICT)
        except TypeError:
            raw = None  # not JSON, which the check below explains, or only unusual, such as a read-only mapping
    # orjson writes NaN as null
    if raw is None or b"null" in raw or _may_be_deep(raw):
        _check_json(dict(zip(names, args, strict=False)) | kwargs)
    return raw or jsonlib.dumps(pair, ensure_ascii=False, separators=(",", ":"), default=dict).encode()


def _may_be_deep(raw: bytes) -> bool:
    # bytes.count looks at every byte in turn; replace finds the few there are with memchr
    return 2 * len(raw) - len(raw.replace(b"[", b"")) - len(raw.replace(b"{", b"")) > MAX_DEPTH


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        lists = [each for each in level if isinstance(each, list)]
        objects = [each.values() for each in level if isinstance(each, dict)]
        level = list(chain.from_iterable([*lists, *objects]))
        if not (lists or objects):
            return False
    return True


def _check_json(value: Any) -> None:
    """InvalidTask unless every encoder writes the value alike and every decoder reads it back."""
    try:
        _check_value(value, MAX_DEPTH)
    except _NotJson as error:
        where = ".".join(reversed(error.where)) or "value"
        raise InvalidTask(_short(f"{where}: {error}")) from None


def _check_value(value: Any, depth: int) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        if not value.isascii():
            _check_text(value)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise _NotJson("an integer beyond 64 bits; send it as text")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _NotJson(f"{value} is no JSON number; leave it out or send null")
    elif depth == 0:
        raise _NotJson(f"nests deeper than {MAX_DEPTH} levels, or contains itself; flatten it")
    elif isinstance(value, Mapping):
        _check_items(value.items(), depth - 1, keyed=True)
    elif isinstance(value, (list, tuple)):
        _check_items(enumerate(value), depth - 1, keyed=False)
    else:
        raise _NotJson(f"{type(value).__name__} is no JSON value; use text, numbers, lists and objects")


def _check_items(items: Iterable[tuple[Any, Any]], depth: int, *, keyed: bool) -> None:
    for key, value in items:
        try:
            if keyed and not isinstance(key, str):
                raise _NotJson(f"a key of type {type(key).__name__}; keys must be text")
            if keyed:
                _check_text(key)
            _check_value(value, depth)
        except _NotJson as error:
            error.where.append(_short(str(key), 40) if isinstance(key, (str, int)) else "?")
            raise


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _NotJson("text with half a surrogate pair; send valid Unicode") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _short(text: str, most: int = MAX_REASON_CHARS) -> str:
    """One printable line."""
    line = "".join(c if c.isprintable() else "?" for c in text[:most])
    return line if len(text) <= most else line[:-3] + "..."


def _too_large(size: int, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"task data: {size} bytes, more than {limit}; send less, or raise the pool's payload_limit")
