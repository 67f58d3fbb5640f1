"""A Request, for the endpoint it happens to run on: the address and credentials configured, the path and body given.

An endpoint with `hmac_secret` gets each request signed: `X-Timestamp` (whole Unix seconds) and `X-Signature`, the hex
HMAC-SHA256 of timestamp + method + path with query, as sent + body, one directly after the other.
"""

from __future__ import annotations

import hashlib
import hmac
import json as jsonlib
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

from broker.configmodel import Endpoint, Pool
from broker.task import NpuTask, Request, Work
from workers.errors import AttemptFailed, status_failure
from workers.transport.types import Answer, Call, Timeouts

orjson: Any
try:
    import orjson
except ImportError:  # json does the same, only slower
    orjson = None

Headers = tuple[tuple[str, str], ...]

_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"
_VERSION: Final = re.compile(r"v\d+")


class HttpAdapter:
    """Requests for one endpoint of a pool. What does not change from task to task is made once, here.

    Raises ValueError for an endpoint whose url is more than scheme, host, port and path.
    """

    def __init__(self, endpoint: Endpoint, pool: Pool, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._base, self._base_path, self._version = _split_base(endpoint.url)
        self._timeouts = Timeouts(
            pool.timeout.connect, pool.timeout.first_byte, pool.timeout.idle, pool.timeout.attempt
        )
        self._max_bytes = pool.queue.result_limit
        self._own = {name.lower(): value for name, value in endpoint.headers.items()}
        if endpoint.api_key is not None:
            self._own["authorization"] = f"Bearer {endpoint.api_key.reveal()}"
        self._json_headers: Headers = tuple({"content-type": _JSON, **self._own}.items())
        self._mac: hmac.HMAC | None = None
        if endpoint.hmac_secret is not None:
            self._mac = hmac.new(endpoint.hmac_secret.reveal().encode(), digestmod=hashlib.sha256)

    def call(self, work: Work, task_id: str, attempt: int) -> Call:
        """The request; see `Adapter`. An NPU task is 'task_error' here."""
        if isinstance(work, NpuTask):
            raise AttemptFailed("task_error", f"{work.task_type} is an NPU task; its pool needs adapter: npu")
        body = _body(work)
        headers = self._json_headers if work.json is not None and not work.headers else self._headers(work)
        headers += (("idempotency-key", task_id), ("x-task-attempt", str(attempt)))
        path = self._path(work.path)
        if self._mac is not None:
            headers += self._signature(self._mac, work.method, path, body)
        timeouts = self._timeouts
        if work.timeout is not None and work.timeout < timeouts.attempt:
            timeouts = replace(timeouts, attempt=work.timeout)
        return Call(work.method, self._base + path, headers, body, timeouts, self._max_bytes)

    def check_answer(self, work: Work, answer: Answer) -> None:
        """2xx is a success; see `workers.errors` for the rest."""
        if 200 <= answer.status < 300:
            _check_json(answer)
            return
        failure = status_failure(answer.status, answer.headers, answer.body, self._clock())
        if failure is not None:
            raise failure

    def blame(self, work: Work, failure: AttemptFailed) -> AttemptFailed:
        """See `Adapter`."""
        if failure.kind != "attempt_timeout" or work.timeout is None or work.timeout >= self._timeouts.attempt:
            return failure
        return AttemptFailed("own_timeout", f"no whole answer within the task's own limit of {work.timeout:g} s")

    def _path(self, path: str) -> str:
        """Behind the base path; `/v1` at the end of one and the start of the other is meant once."""
        if self._version and (path + "/").startswith(self._version + "/"):
            path = path[len(self._version) :]
        return self._base_path + path

    def _headers(self, work: Request) -> Headers:
        content_type = {"content-type": _JSON if work.json is not None else _TEXT}
        if work.json is None and work.body is None:
            content_type = {}
        return tuple({**content_type, **work.headers, **self._own}.items())

    def _signature(self, keyed: hmac.HMAC, method: str, path: str, body: bytes) -> Headers:
        stamp = str(int(self._clock()))
        mac = keyed.copy()
        mac.update(f"{stamp}{method}{path}".encode())
        mac.update(body)
        return (("x-timestamp", stamp), ("x-signature", mac.hexdigest()))


def _split_base(url: str) -> tuple[str, str, str]:
    """Scheme with host, the path, and its last segment as '/v1' if it is a version."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("endpoint url: must start with http:// or https:// and name a host")
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("endpoint url: must not have a query, a fragment or credentials; use api_key or headers")
    base_path = parts.path.rstrip("/")
    last = base_path.rpartition("/")[2]
    return f"{parts.scheme}://{parts.netloc}", base_path, f"/{last}" if _VERSION.fullmatch(last) else ""


def _check_json(answer: Answer) -> None:
    """An answer that calls itself JSON and is not: cut short by the server itself, or made by something in between."""
    media_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not answer.body or not (media_type == _JSON or media_type.endswith("+json")):
        return
    try:
        jsonlib.loads(answer.body) if orjson is None else orjson.loads(answer.body)
    except (ValueError, RecursionError):
        detail = f"status {answer.status}, but the answer is no JSON although its content-type says so"
        raise AttemptFailed(
            "malformed", detail, status=answer.status, body=answer.body, headers=answer.headers
        ) from None


def _body(work: Request) -> bytes:
    if work.body is not None:
        return _encode(work.body)
    return b"" if work.json is None else dump_json(work.json)


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise AttemptFailed("task_error", "the body is not Unicode text; send it as json") from None


def dump_json(value: Any) -> bytes:
    """Compact JSON. Raises AttemptFailed 'task_error' for what JSON cannot carry."""
    if orjson is not None:
        try:
            return bytes(orjson.dumps(value))
        except TypeError:  # whole numbers over 64 bits and lone surrogates; json writes them
            pass
    try:
        return jsonlib.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise AttemptFailed("task_error", f"the task's json cannot be written: {error}") from None
