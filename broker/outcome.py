"""What stands in a task's hash once it has an outcome, and how it is read: one place for writer and readers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from broker.fields import as_count, as_headers, as_moment, as_object, as_seconds, as_status
from broker.task import Outcome, Result

# Fields of rq:job:<id> that make a Result, in the order HMGET asks for them.
FIELDS: Final = ("status", "x_out", "x_ans", "x_body", "x_why", "x_try", "x_born", "x_end", "created_at")

KEPT_HEADERS: Final = ("content-type", "retry-after", "x-request-id")


def encode_answer(status: int | None, headers: Mapping[str, str], endpoint: str, started_at: float) -> str:
    """The field `x_ans`: JSON of the last answer but for its body. `started_at` in Unix seconds."""
    kept = tuple([(name, headers[name]) for name in KEPT_HEADERS if name in headers])
    return f"{_answer_begun(status, kept, endpoint)}{started_at:.3f}}}"


@lru_cache(maxsize=256)
def _answer_begun(status: int | None, kept: tuple[tuple[str, str], ...], endpoint: str) -> str:
    """All but the last value: it is the same for most answers of an endpoint."""
    answer = {"status": status, "headers": dict(kept), "endpoint": endpoint}
    return f'{json.dumps(answer, separators=(",", ":"))[:-1]},"started":'


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")


def _seconds(value: bytes | None) -> float:
    return as_seconds(value) or 0.0

def read_result(task_id: str, values: Sequence[Any]) -> Result | None:
    """The Result in what HMGET gave for FIELDS; None while the task has no outcome.

    A task that a stock RQ worker ran has RQ's status alone: finished is `ok`, failed is `dead`.
    """
    status, outcome, answer, body, why, tries, born, ended, _ = values
    word = _text(outcome) or {"finished": "ok", "failed": "dead", "canceled": "canceled"}.get(_text(status), "")
    if not word:
        return None
    told = as_object(answer)
    return Result(
        task_id=task_id,
        outcome=cast(Outcome, word),
        status_code=as_status(told.get("status")),
        headers=as_headers(told.get("headers")),
        body=body or b"",
        endpoint=str(told.get("endpoint", "")),
        attempts=as_count(tries),
        reason=_text(why),
        enqueued_at=_seconds(born),
        started_at=as_moment(told.get("started")) or 0.0,
        ended_at=_seconds(ended),
    )
