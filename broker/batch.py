"""OpenAI batch lines: one input line becomes a task or a bad line, one outcome becomes an output line.

An output line names its input line twice: by `custom_id`, and by an `id` that changes with the content. So a second run
knows what is done, and notices what has changed. Files are in `broker.batch_output`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, BinaryIO, Final, NoReturn
from urllib.parse import urlsplit

from broker.errors import InvalidTask, PayloadTooLarge
from broker.seenkeys import KeptKeys
from broker.task import METHODS, NpuTask, Request, Result, Work, check_path, shortened

MAX_LINE_BYTES: Final = 262_144  # the default of a pool's queue.payload_limit
MAX_CUSTOM_ID_CHARS: Final = 512
MAX_MESSAGE_CHARS: Final = 400
DIGEST_CHARS: Final = 24  # of the sha256 in an output line's id: 96 bits
TASK_ID: Final = "batch_req_"  # ids of lines that became a task
LINE_ID: Final = "batch_line_"  # ids of lines that did not
REQUEST_FIELDS: Final = ("custom_id", "method", "url", "body")
NPU_FIELDS: Final = ("custom_id", "task_type", "data")

_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_SKIP_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class BatchTask:
    """An input line that is a task. `number` is 1-based; `digest` is hex and covers the id and the whole request."""

    number: int
    custom_id: str
    work: Work
    digest: str

    @property
    def line_id(self) -> str:
        """The `id` of its output line."""
        return TASK_ID + self.digest[:DIGEST_CHARS]


@dataclass(frozen=True, slots=True)
class BadLine:
    """An input line that is no task. `message` names the line and the remedy.

    `custom_id` is None where none could be read. `digest` is hex and covers the line's number and its bytes, so that
    the same broken line twice in a file is two error lines, and still two after a resumed run.
    """

    number: int
    custom_id: str | None
    code: str
    message: str
    digest: str

    @property
    def line_id(self) -> str:
        """The `id` of its output line."""
        return LINE_ID + self.digest[:DIGEST_CHARS]


class _Bad(Exception):
    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.custom_id = code, message, custom_id


def read_batch(file: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[BatchTask | BadLine]:
    """Every line of `file` but the blank ones, in order, one at a time.

    A line over `max_bytes` is a bad line and never stands in memory whole. A repeated `custom_id` is a bad line; what
    is kept to notice it stands in a file from some thousands of lines on.
    """
    seen = KeptKeys()
    number = 0
    most = max_bytes + 2  # with a line end of two bytes
    while line := file.readline(most + 1):
        number += 1
        if len(line) > most or len(line.rstrip(b"\r\n")) > max_bytes:
            yield _too_long(file, line, number, max_bytes)
            continue
        parsed = parse_line(line, number)
        if parsed is None:
            continue
        if parsed.custom_id is not None and not seen.add(custom_id_key(parsed.custom_id)):
            parsed = _repeated(parsed, line)
        yield parsed


def parse_line(line: bytes, number: int) -> BatchTask | BadLine | None:
    """One input line, with or without its line end: a task, a bad line, or None if it is blank. Never raises."""
    raw = line.strip(b" \t\r\n").removeprefix(_BOM)
    if not raw:
        return None
    try:
        record = _decode(raw)
        custom_id = _custom_id(record)
        try:
            work, content = _work(record)
            return BatchTask(number, custom_id, work, _digest([custom_id, *content]))
        except _Bad as bad:
            bad.custom_id = custom_id
            raise
    except _Bad as bad:
        message = f"line {number}: {bad.message}"[:MAX_MESSAGE_CHARS]
        return BadLine(number, bad.custom_id, bad.code, message, _line_digest(number, raw))


def refused(task: BatchTask, error: InvalidTask) -> BadLine:
    """The bad line that `task` turns out to be when it cannot be enqueued (too large, nested too deeply)."""
    message = f"line {task.number}: {error}"[:MAX_MESSAGE_CHARS]
    code = "too_large" if isinstance(error, PayloadTooLarge) else "invalid_task"
    return BadLine(task.number, task.custom_id, code, message, task.digest)


def custom_id_key(custom_id: str) -> bytes:
    """16 bytes that stand for a `custom_id` in sets of many."""
    return sha256(custom_id.encode("utf-8", "surrogatepass")).digest()[:16]


def result_line(custom_id: str, digest: str, result: Result) -> bytes:
    """The output line of a task that has an outcome. Everything but a 2xx carries `error`, a 4xx besides its body."""
    status = result.status_code
    error = None
    if not result.ok or status is None or not 200 <= status < 300:
        error = (_error_code(result), result.reason or (f"status {status}" if status else "no answer"))
    request_id = result.headers.get("x-request-id") or result.task_id
    line_id = TASK_ID + digest[:DIGEST_CHARS]
    return output_line(line_id, custom_id, status_code=status, request_id=request_id, body=result.body, error=error)


def bad_line(bad: BadLine) -> bytes:
    """The output line of an input line that is no task."""
    return output_line(bad.line_id, bad.custom_id, error=(bad.code, bad.message))


def output_line(
    line_id: str,
    custom_id: str | None,
    *,
    status_code: int | None = None,
    request_id: str = "",
    body: bytes = b"",
    error: tuple[str, str] | None = None,
) -> bytes:
    """One OpenAI batch output object, with its line end.

    `response` is null without a `status_code`; its body stands as it came if it is JSON, else as text. `error` is
    (code, message) and must be given for everything that is not a 2xx; raises ValueError.
    """
    if error is None and (status_code is None or not 200 <= status_code < 300):
        raise ValueError(f"{line_id}: an output line that is not a success needs an error")
    response = b"null"
    if status_code is not None:
        head = f'{{"status_code": {status_code}, "request_id": {json.dumps(request_id)}, "body": '
        response = head.encode() + json_or_text(body) + b"}"
    problem = "null" if error is None else json.dumps({"code": error[0], "message": error[1]})
    start = f'{{"id": {json.dumps(line_id)}, "custom_id": {json.dumps(custom_id)}, "response": '
    return start.encode() + response + f', "error": {problem}}}\n'.encode()


def json_or_text(body: bytes) -> bytes:
    """The body as one line of JSON: as it came, to the digit, if it is JSON; else a JSON string of it as UTF-8."""
    try:
        json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(body.decode("utf-8", "replace")).encode()
    line = body.strip().replace(b"\r", b" ").replace(b"\n", b" ")  # in JSON a bare line end is only whitespace
    for separator, escaped in _SEPARATORS:
        line = line.replace(separator, escaped)
    return line


# Legal in a JSON string, but some readers of lines split at them.
_SEPARATORS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def _error_code(result: Result) -> str:
    if result.outcome not in ("ok", "dead"):
        return result.outcome
    status = result.status_code
    return "dead_letter" if status is None or 200 <= status < 300 else f"http_{status}"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _decode(raw: bytes) -> Mapping[str, Any]:
    if raw.startswith(_UTF16_BOMS):
        raise _Bad("invalid_encoding", "the file is UTF-16; save it as UTF-8")
    try:
        record = json.loads(raw.decode(), parse_constant=_refuse_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise _Bad("invalid_encoding", f"byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise _Bad("invalid_json", f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        why = _why(error)
        raise _Bad("invalid_json", f"not JSON: {why}") from None
    if not isinstance(record, dict):
        raise _Bad("not_an_object", 'must be an object such as {"custom_id", "method", "url", "body"}')
    return record


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values under one key JSON readers keep one, and not all the same: nobody knows which was meant."""
    record = dict(pairs)
    if len(record) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _Bad("duplicate_key", f"the key {shortened(twice)!r} stands twice in one object; keep one")
    return record


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number has too many digits" if "digits" in str(error) else str(error)


def _custom_id(record: Mapping[str, Any]) -> str:
    custom_id = record.get("custom_id")
    if custom_id is None:
        raise _Bad("missing_custom_id", "custom_id is missing; give each line its own")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise _Bad("invalid_custom_id", f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters")
    return custom_id


def _check_fields(record: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    """What is not read must not be taken for granted. A null is as good as absent: tables have them for empty cells."""
    for name, value in record.items():
        if value is not None and name not in allowed:
            raise _Bad("unknown_field", f"{shortened(name)!r} is no field here; a line has {', '.join(allowed)}")


def _work(record: Mapping[str, Any]) -> tuple[Work, list[Any]]:
    """The work, and what of the line decides whether it is the same work."""
    url, task_type = record.get("url"), record.get("task_type")
    if url is not None and task_type is not None:
        raise _Bad("ambiguous", "both url and task_type; give url for a request, task_type for an NPU task")
    _check_fields(record, NPU_FIELDS if task_type is not None else REQUEST_FIELDS)
    if task_type is not None:
        try:
            return NpuTask(task_type, record.get("data")), ["npu", task_type, record["data"]]  # type: ignore[arg-type]
        except InvalidTask as error:
            raise _Bad("invalid_task", str(error)) from None
    if url is None:
        raise _Bad("missing_url", 'url is missing; give a path such as "/v1/chat/completions"')
    method, url, body = _method(record.get("method")), _url(url), record.get("body")
    if body is None and method in ("POST", "PUT", "PATCH"):
        raise _Bad("missing_body", f"body is missing; a {method} needs one, an object")
    if body is not None and not isinstance(body, dict):
        raise _Bad("invalid_body", f"body must be an object, not {_json_name(body)}")
    return Request(method, url, json=body), [method, url, body]


def _method(method: object) -> str:
    if method is None:
        raise _Bad("missing_method", 'method is missing; add "method": "POST"')
    if not isinstance(method, str) or method not in METHODS:
        raise _Bad("invalid_method", f"method must be one of {', '.join(sorted(METHODS))}, in capitals")
    return method


def _url(url: object) -> str:
    if isinstance(url, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", url):
        raise _Bad("invalid_url", f"url is a full address; give the path only{_path_of(url)}")
    try:
        return check_path(url)
    except InvalidTask as error:
        raise _Bad("invalid_url", str(error).replace("path", "url", 1)) from None


def _path_of(url: str) -> str:
    try:
        path = check_path(urlsplit(url).path)
    except (InvalidTask, ValueError):
        return ""
    return f", {path!r}, and name the server with --endpoint"


def _json_name(value: object) -> str:
    names = {str: "a string", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _digest(content: list[Any]) -> str:
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise _Bad("invalid_json", "a number is too large for JSON readers; write it as a string") from None
    except RecursionError:
        raise _Bad("invalid_json", "not JSON: nested too deeply") from None
    return sha256(text.encode()).hexdigest()


def _line_digest(number: int, raw: bytes) -> str:
    return sha256(b"%d\n" % number + raw).hexdigest()


def _repeated(parsed: BatchTask | BadLine, line: bytes) -> BadLine:
    message = f"line {parsed.number}: custom_id {parsed.custom_id!r} stands in an earlier line; give each its own"
    raw = line.strip(b" \t\r\n").removeprefix(_BOM)
    return BadLine(parsed.number, parsed.custom_id, "duplicate_custom_id", message, _line_digest(parsed.number, raw))


def _too_long(file: BinaryIO, start: bytes, number: int, max_bytes: int) -> BadLine:
    """Reads on to the end of the line, piece by piece."""
    digest, length, piece = sha256(b"%d\n" % number), 0, start
    while not piece.endswith(b"\n") and (following := file.readline(_SKIP_BYTES)):
        digest.update(piece)
        length, piece = length + len(piece), following
    piece = piece.rstrip(b"\r\n")
    digest.update(piece)
    length += len(piece)
    message = f"line {number}: {length} bytes, at most {max_bytes}; shorten it, or raise queue.payload_limit"
    return BadLine(number, None, "line_too_long", message, digest.hexdigest())
