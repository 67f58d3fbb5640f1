"""What a task is: a request for any endpoint of a pool, its options, and what becomes of it."""

from __future__ import annotations

import json as jsonlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import unquote

from broker.errors import InvalidTask

Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")

Outcome = Literal["ok", "dead", "expired", "poison", "canceled"]

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})
NPU_TASK_TYPES = ("text_analysis", "knowledge_processing", "embedding_batch")

# Headers a task may set: these, and those that begin with `x-`, but for names that proxies and frameworks obey or that
# carry credentials.
ALLOWED_HEADERS = frozenset(
    "accept accept-language cache-control content-language content-type user-agent prefer priority request-id "
    "correlation-id traceparent tracestate baggage openai-beta openai-organization openai-project anthropic-beta "
    "anthropic-version".split()
)
# CGI, WSGI and PHP take `_` (and some servers `.`) in a name for `-`: only letters, digits and `-` may stand in one.
_FREE = re.compile("x-[a-z0-9-]+")
_OBEYED = re.compile(
    "x-(?:forwarded|original|rewrite|real-ip|client-|cluster|host|http-|method|accel|sendfile|auth|api-|amz|aws-|ms-|"
    "goog-|csrf|xsrf|access-|remote-|scheme|url-|envoy-|middleware-|proxy|ssl-|tls-|webauth-|consumer-|idempotency-|"
    "signature$|timestamp$|task-attempt$).*|x-.*(?:secret|token|passw|credential|cookie|jwt|apikey|api-key|auth).*"
)

# Headers that neither a task nor a configured endpoint may set: they belong to the connection, the endpoint's own
# credentials, or headrace.
FORBIDDEN_HEADERS = frozenset(
    "host authorization cookie content-length transfer-encoding connection keep-alive te trailer upgrade expect "
    "proxy-authorization proxy-authenticate proxy-connection accept-encoding idempotency-key x-task-attempt".split()
)
MAX_HEADERS = 32
MOST_ATTEMPTS = 100
MAX_HEADER_BYTES = 8192
MAX_PATH_CHARS = 4096

_CONTROL = re.compile("[\x00-\x1f\x7f]")
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_POOL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_USUAL_PATH = re.compile(r"(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")  # nothing in it needs a second look
_TASK_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def shortened(text: str, most: int = 40) -> str:
    """At most so many characters, for errors that quote what somebody wrote."""
    return text if len(text) <= most else text[: most - 1] + "…"


def new_task_id() -> str:
    """A fresh id: 12 hex digits of milliseconds, then 80 random bits, so ids sort by time. 32 characters."""
    return f"{int(time.time() * 1000):012x}{os.urandom(10).hex()}"


def check_pool(pool: object) -> str:
    """The pool's name, or InvalidTask: 1-64 of letters, digits, `_`, `.`, `-`."""
    if not isinstance(pool, str) or not _POOL.fullmatch(pool):
        raise InvalidTask(f"pool {pool!r}: use 1 to 64 letters, digits, '_', '.' or '-'")
    return pool


def is_pool(name: str) -> bool:
    return _POOL.fullmatch(name) is not None


def check_task_id(task_id: object) -> str:
    """The id, or InvalidTask: 1-128 of letters, digits, `_`, `.`, `-`."""
    if not isinstance(task_id, str) or not _TASK_ID.fullmatch(task_id):
        raise InvalidTask(f"task id {task_id!r}: use 1 to 128 letters, digits, '_', '.' or '-'")
    return task_id


def check_priority(priority: object) -> Priority:
    """'high', 'normal' or 'low' exactly (None is 'normal'); anything else is InvalidTask, True and 1 too."""
    if priority is None:
        return "normal"
    for known in PRIORITIES:
        if isinstance(priority, str) and priority == known:
            return known
    raise InvalidTask(f"priority {priority!r}: must be 'high', 'normal' or 'low'")


def check_names(what: str, names: Iterable[object]) -> tuple[str, ...]:
    """Sorted, without repeats; each 1-64 of letters, digits, `_`, `-`."""
    if isinstance(names, (str, bytes)):
        raise InvalidTask(f"{what} {names!r}: must be a list of names")
    found = set()
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidTask(f"{what} {name!r}: use 1 to 64 letters, digits, '_' or '-'")
        found.add(name)
    return tuple(sorted(found))


def _leads_away(path: str) -> bool:
    """Whether a server that decodes it, perhaps again and again, might read '..' (or `..;`) or a control character."""
    for _ in range(4):
        parts = re.split(r"[/\\]", path)
        if _CONTROL.search(path) or any(part.partition(";")[0] in ("..", ".") for part in parts):
            return True
        if "%" not in path:
            return False
        path = unquote(path)
    return False


@lru_cache(maxsize=256)  # the tasks of a producer have few paths
def _is_usual(path: str) -> bool:
    return len(path) <= MAX_PATH_CHARS and _USUAL_PATH.fullmatch(path) is not None


def check_path(path: object) -> str:
    """A path with optional query, starting with one '/'. A URL, a fragment, '..' or a control character is refused."""
    if isinstance(path, str) and _is_usual(path):
        return path
    if not isinstance(path, str) or not path:
        raise InvalidTask(f"path {path!r}: must be a string that starts with '/'")
    if "://" in path.split("?", 1)[0] or path.startswith("//"):
        raise InvalidTask(f"path {path[:80]!r}: give a path, not a URL; the address comes from the configuration")
    if not path.startswith("/"):
        raise InvalidTask(f"path {path[:80]!r}: must start with '/'")
    if len(path) > MAX_PATH_CHARS:
        raise InvalidTask(f"path of {len(path)} characters: at most {MAX_PATH_CHARS}")
    if not path.isascii() or any(c <= " " or c in '\x7f\\#"<>' for c in path):
        raise InvalidTask(f"path {path[:80]!r}: percent-encode spaces, '#', '\\' and everything outside ASCII")
    if _leads_away(path.partition("?")[0]):
        why = "must not contain '.' or '..' segments or control characters, encoded ones neither"
        raise InvalidTask(f"path {path[:80]!r}: {why}")
    return path


def task_may_set(name: str) -> bool:
    """Whether a header, its name in lower case, may come with a task."""
    return name in ALLOWED_HEADERS or (_FREE.fullmatch(name) is not None and not _OBEYED.fullmatch(name))


def check_headers(headers: object) -> dict[str, str]:
    """Names lower-cased. What is not on the allow-list, CR, LF and non-ASCII are refused."""
    if headers is None or headers == {}:
        return {}
    if not isinstance(headers, Mapping):
        raise InvalidTask(f"headers {type(headers).__name__}: must be a mapping of names to strings")
    checked: dict[str, str] = {}
    for name, value in headers.items():
        if not isinstance(name, str) or not HEADER_NAME.fullmatch(name):
            raise InvalidTask(f"header name {shortened(repr(name))}: not a valid HTTP header name")
        lowered = name.lower()
        if not task_may_set(lowered):
            raise InvalidTask(
                f"header {shortened(name)!r}: a task may not set it; it may set {', '.join(sorted(ALLOWED_HEADERS))} "
                "and most of x-... (letters, digits, '-'); the rest is the endpoint's (its `headers`) or connection's"
            )
        if lowered in checked:
            raise InvalidTask(f"header {shortened(name)!r}: given twice")
        checked[lowered] = check_header_value(name, value)
    if len(checked) > MAX_HEADERS or sum(len(n) + len(v) for n, v in checked.items()) > MAX_HEADER_BYTES:
        raise InvalidTask(f"headers: at most {MAX_HEADERS} and {MAX_HEADER_BYTES} bytes in all")
    return checked


def check_header_value(name: str, value: object) -> str:
    """The value without space around it: printable ASCII, or InvalidTask."""
    if not isinstance(value, str) or not value.isascii() or any((c < " " and c != "\t") or c > "~" for c in value):
        raise InvalidTask(f"header {shortened(name)!r}: the value must be printable ASCII without CR or LF")
    return value.strip()


def check_seconds(what: str, value: object) -> float | None:
    """A positive, finite number of seconds, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise InvalidTask(f"{what} {value!r}: must be a positive number of seconds")
    return float(value)


def check_count(what: str, value: object, most: int = MOST_ATTEMPTS) -> int | None:
    """A whole number from 1 to `most`, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidTask(f"{what} {value!r}: must be a whole number from 1 to {most}")
    return value


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP request for any endpoint of a pool.

    `path` is a path with optional query, never a URL. Give the body as `json` (any JSON value) or as `body` (text; set
    the content type in `headers`), not both. `timeout` is for one attempt, in seconds; None takes the pool's.
    Raises InvalidTask.
    """

    method: str
    path: str
    json: Any = None
    body: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise InvalidTask(f"method {self.method!r}: must be one of {', '.join(sorted(METHODS))}")
        check_path(self.path)
        if self.json is not None and self.body is not None:
            raise InvalidTask("json and body: give one of them")
        if self.body is not None and not isinstance(self.body, str):
            raise InvalidTask(f"body {type(self.body).__name__}: must be a string")
        object.__setattr__(self, "headers", check_headers(self.headers))
        if self.timeout is not None:
            object.__setattr__(self, "timeout", check_seconds("timeout", self.timeout))

    def __repr__(self) -> str:  # payloads and header values stay out of logs
        return f"Request({self.method!r}, {self.path!r})"


@dataclass(frozen=True, slots=True)
class NpuTask:
    """A task for an NPU pool: `task_type` is text_analysis, knowledge_processing or embedding_batch; `data` an object.

    `timeout` is for one attempt, in seconds. Raises InvalidTask.
    """

    task_type: str
    data: Mapping[str, Any]
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.task_type not in NPU_TASK_TYPES:
            raise InvalidTask(f"task_type {self.task_type!r}: must be one of {', '.join(NPU_TASK_TYPES)}")
        if not isinstance(self.data, Mapping):
            raise InvalidTask(f"data {type(self.data).__name__}: must be an object")
        object.__setattr__(self, "timeout", check_seconds("timeout", self.timeout))

    def __repr__(self) -> str:
        return f"NpuTask({self.task_type!r})"


Work = Request | NpuTask


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """How a task is queued. Every field is checked; raises InvalidTask.

    id               chosen by the client; None makes one. The same id again with the same payload is the same task.
    idempotency_key  same key = same task, for the pool's result TTL
    deadline         seconds from enqueue until it is given up as `expired`; None: never
    priority         'high', 'normal', 'low'
    requires         capabilities an endpoint must have
    max_attempts     None takes the pool's (3)
    delay            seconds before it may start
    """

    id: str | None = None
    idempotency_key: str | None = None
    deadline: float | None = None
    priority: Priority | None = None
    requires: tuple[str, ...] = ()
    max_attempts: int | None = None
    delay: float | None = None

    def __post_init__(self) -> None:
        if self.id is not None:
            check_task_id(self.id)
        key = self.idempotency_key
        if key is not None and (not isinstance(key, str) or not 1 <= len(key) <= 255 or not key.isprintable()):
            raise InvalidTask(f"idempotency_key {shortened(repr(key))}: must be 1 to 255 printable characters")
        object.__setattr__(self, "deadline", check_seconds("deadline", self.deadline))
        object.__setattr__(self, "delay", check_seconds("delay", self.delay))
        object.__setattr__(self, "priority", check_priority(self.priority))
        object.__setattr__(self, "requires", check_names("requires", self.requires))
        check_count("max_attempts", self.max_attempts)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a task. All times are Unix seconds by the Redis server's clock.

    outcome      'ok', 'dead', 'expired', 'poison' or 'canceled'
    status_code  of the last answer; None if there was none
    headers      of the last answer, names lower-cased (a small selection: content-type, retry-after, x-request-id)
    body         of the last answer, bytes
    endpoint     id of the endpoint that gave it; "" if none did
    attempts     attempts counted
    reason       one line; "" for 'ok'
    """

    task_id: str
    outcome: Outcome
    status_code: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    endpoint: str = ""
    attempts: int = 0
    reason: str = ""
    enqueued_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON. Raises ValueError."""
        return jsonlib.loads(self.body)

    def __repr__(self) -> str:
        return f"Result({self.task_id!r}, {self.outcome!r}, status_code={self.status_code}, endpoint={self.endpoint!r})"
