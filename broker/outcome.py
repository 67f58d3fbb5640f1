"""What stands in a task's hash once it has an outcome, and how it is read: one place for writer and readers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from broker.fields import as_array, as_count, as_date, as_seconds, as_status, as_text
from broker.task import Outcome, Result

# Fields of rq:job:<id> that make a Result, in the order HMGET asks for them.
FIELDS: Final = (
    "status", "x_out", "x_ans", "x_why", "x_try", "x_born", "started_at", "ended_at", "created_at",
)  # fmt: skip

KEPT_HEADERS: Final = ("content-type", "retry-after", "x-request-id")
USUAL_TYPE: Final = "application/json"


def encode_answer(status: int | None, headers: Mapping[str, str], endpoint: str) -> str:
    """The first line of the field `x_ans`: a JSON array of status, endpoint and KEPT_HEADERS. What follows is the body.

    There is one for each task with an outcome, so it is short: null, or left out at the end, are the usual content
    type, and other headers that are not there. No content type at all is 0.
    """
    content_type = headers.get(KEPT_HEADERS[0], 0)
    others = [headers.get(name) for name in KEPT_HEADERS[1:]]
    return _encode_answer(status, endpoint, None if content_type == USUAL_TYPE else content_type, *others)


@lru_cache(maxsize=256)
def _encode_answer(status: int | None, endpoint: str, *kept: str | int | None) -> str:
    answer = [status, endpoint, *kept]
    while answer[-1] is None:
        answer.pop()
    return json.dumps(answer, separators=(",", ":"))


def decode_answer(text: bytes | None) -> tuple[int | None, str, dict[str, str], bytes]:
    """The field `x_ans`: status, endpoint, headers and body, as far as they are what they should be."""
    head, _, body = (text or b"").partition(b"\n")
    told = as_array(head)
    if len(told) < 2:
        return None, "", {}, body
    status, endpoint, *kept = told
    kept = [USUAL_TYPE if not kept or kept[0] is None else kept[0], *kept[1:]]
    headers = {name: value for name, value in zip(KEPT_HEADERS, kept, strict=False) if isinstance(value, str)}
    return as_status(status), endpoint if isinstance(endpoint, str) else "", headers, body


def attempts_of(outcome: str | bytes | None, failed: str | bytes | None) -> int:
    """From the fields `x_out` and `x_try`, which counts attempts that failed: one more did not if the outcome is ok."""
    return as_count(failed) + (as_text(outcome or "") == "ok")


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")


def _seconds(value: bytes | None) -> float:
    return as_seconds(value) or 0.0


def read_result(task_id: str, values: Sequence[Any]) -> Result | None:
    """The Result in what HMGET gave for FIELDS; None while the task has no outcome.

    A task that a stock RQ worker ran has RQ's status alone: finished is `ok`, failed is `dead`.
    """
    status, outcome, answer, why, failed, born, started, ended, _ = values
    word = _text(outcome) or {"finished": "ok", "failed": "dead", "canceled": "canceled"}.get(_text(status), "")
    if not word:
        return None
    status_code, endpoint, headers, body = decode_answer(answer)
    return Result(
        task_id=task_id,
        outcome=cast(Outcome, word),
        status_code=status_code,
        headers=headers,
        body=body,
        endpoint=endpoint,
        attempts=attempts_of(outcome, failed),
        reason=_text(why),
        enqueued_at=_seconds(born),
        started_at=(as_date(started) if answer or not outcome else None) or 0.0,
        ended_at=as_date(ended) or 0.0,
    )
