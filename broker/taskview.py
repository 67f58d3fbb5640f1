"""One task, seen from all sides. Reads only; the payload stays out unless asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from broker.durations import span
from broker.errors import InvalidTask, UnknownTask
from broker.fields import (
    as_count,
    as_fields,
    as_int,
    as_list,
    as_moment,
    as_number,
    as_object,
    as_seconds,
    as_status,
    as_text,
)
from broker.flows import Flow, Plain, drive
from broker.inspect import Plainly
from broker.keys import Keys
from broker.outcome import FIELDS, attempts_of, decode_answer, read_result
from broker.rqjob import decode_data, rq_why
from broker.task import NpuTask

if TYPE_CHECKING:
    from broker.store import Store

MOST_LISTED: Final = 10_000  # list entries looked at to find a task's place
MOST_PAYLOAD: Final = 512 << 20
NO_KEY: Final = -2  # what PTTL says of it


@dataclass(frozen=True, slots=True)
class Attempt(Plainly):
    """One line of a task's history. `kind` as in workers.errors, or `lease_lost`: its process died."""

    number: int | None
    endpoint: str
    kind: str
    status_code: int | None
    error: str
    started_at: float | None
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class TaskView(Plainly):
    """All about a task.

    state     queued, scheduled, started, or its outcome
    where     one line: the list and place it waits in, when it is due, the endpoint that runs it, how long it is kept
    lost      leases that ended without a settle
    excluded  endpoints it failed on
    answer    of the last attempt, text; None unless asked for. `payload` likewise
    """

    id: str
    pool: str
    state: str
    description: str
    where: str
    priority: str
    requires: tuple[str, ...]
    attempts: int
    max_attempts: int | None
    lost: int
    excluded: tuple[str, ...]
    reason: str
    status_code: int | None
    endpoint: str
    enqueued_at: float | None
    started_at: float | None
    ended_at: float | None
    deadline: float | None
    ttl: float | None
    idempotency_key: str
    history: tuple[Attempt, ...]
    answer: str | None = None
    payload: Any = None


def task_show(store: Store, task_id: str, *, payload: bool = False) -> TaskView:
    """Raises UnknownTask. `payload`: with the work and the last answer's body, which may be private."""
    return drive(store, task_view(store.keys, task_id, payload=payload))


def task_view(keys: Keys, task_id: str, *, payload: bool) -> Flow[TaskView]:
    record, ttl = yield Plain([("HGETALL", keys.job(task_id)), ("PTTL", keys.job(task_id))])
    if not record and ttl != NO_KEY:
        key = keys.job(task_id)
        raise UnknownTask(f"task {task_id}: what Redis has under its name is no task any more; delete {key}")
    if not record:
        raise UnknownTask(f"task {task_id}: not in Redis; it never was, or its outcome has expired (queue.result_ttl)")
    raw = {as_text(name): value for name, value in record.items()}
    row = as_fields(record)
    where = yield from _where(keys, task_id, row, ttl)
    view = _view(task_id, raw, where, ttl, payload)
    if failed_by_stock(row):
        for why, ended in (yield from stock_failures(keys, [task_id])).values():
            return replace(view, reason=why, ended_at=ended)
    return view


def _where(keys: Keys, task_id: str, row: Mapping[str, str], ttl: int) -> Flow[str]:
    pool, status = row.get("origin", ""), row.get("status", "")
    if row.get("x_out") or status in ("finished", "failed", "canceled"):
        return "kept for ever" if ttl < 0 else f"kept for {span(ttl / 1000)} more"
    if status == "scheduled":
        (due,) = yield Plain([("ZSCORE", keys.registry("scheduled", pool), task_id)])
        return "in no list: it will be repaired" if due is None else f"due at {float(due):.3f}"
    if status == "started":
        return f"runs on {row.get('x_ep') or 'a stock RQ worker'}"
    if status != "queued":
        return status
    variant = variant_of(row)
    name = keys.queue(pool, variant)
    place, length = yield Plain([("LPOS", name, task_id, "MAXLEN", MOST_LISTED), ("LLEN", name)])
    label = variant or "normal"
    return f"waits in list {label!r}, {f'place {place + 1}' if place is not None else 'far back'} of {length}"


def variant_of(row: Mapping[str, str]) -> str:
    """The list of a waiting task, as lua/common.lua names it."""
    priority, requires, excluded = row.get("x_pri") or "normal", row.get("x_req", ""), row.get("x_excl", "")
    if not requires and not excluded:
        return "" if priority == "normal" else priority
    return priority + (f"+{requires}" if requires else "") + (f"!{excluded}" if excluded else "")


def _view(task_id: str, raw: Mapping[str, bytes], where: str, ttl: int, payload: bool) -> TaskView:
    row = {name: as_text(value) for name, value in raw.items() if name not in ("data", "x_ans")}
    result = read_result(task_id, [raw.get(name) for name in FIELDS])
    return TaskView(
        id=task_id,
        pool=row.get("origin", ""),
        state=result.outcome if result else row.get("status", ""),
        description=row.get("description", ""),
        where=where,
        priority=row.get("x_pri") or "normal",
        requires=as_list(row.get("x_req")),
        attempts=attempts_of(row.get("x_out"), row.get("x_try")),
        max_attempts=as_int(row.get("x_max")),
        lost=as_count(row.get("x_del")),
        excluded=as_list(row.get("x_excl")),
        reason=reason_of(row),
        status_code=result.status_code if result else None,
        endpoint=(result.endpoint if result else "") or row.get("x_ep", ""),
        enqueued_at=as_seconds(row.get("x_born")),
        started_at=(result.started_at or None) if result else as_seconds(row.get("x_run")),
        ended_at=(result.ended_at or None) if result else None,
        deadline=as_seconds(row.get("x_dl")),
        ttl=ttl / 1000 if ttl >= 0 else None,
        idempotency_key=row.get("x_idem", ""),
        history=read_history(row.get("x_hist", "")),
        answer=as_text(decode_answer(raw.get("x_ans"))[3]) if payload else None,
        payload=_payload(raw.get("data", b"")) if payload else None,
    )


def reason_of(row: Mapping[str, str]) -> str:
    """Ours, else the last line of what RQ keeps of an exception."""
    lines = (row.get("x_why") or row.get("exc_info") or "").strip().splitlines()
    return lines[-1] if lines else ""


def stock_failures(keys: Keys, task_ids: Sequence[str]) -> Flow[dict[str, tuple[str, float]]]:
    """Why and when each failed for which RQ keeps that: a stock `rq worker` writes it beside the task, not into it."""
    replies = yield Plain([("XREVRANGE", keys.results(task_id), "+", "-", "COUNT", 1) for task_id in task_ids])
    found: dict[str, tuple[str, float]] = {}
    for task_id, entries in zip(task_ids, replies, strict=True):
        for entry, fields in entries:
            if b"exc_string" in fields:
                found[task_id] = (rq_why(fields[b"exc_string"]), as_count(entry.partition(b"-")[0]) / 1000)
    return found


def failed_by_stock(row: Mapping[str, str]) -> bool:
    """Whether a stock worker failed it, and did not say in its hash why."""
    return not row.get("x_out") and row.get("status") == "failed" and not reason_of(row)


def read_history(text: str) -> tuple[Attempt, ...]:
    """The lines of `x_hist`, oldest first; a line that is no JSON is left out."""
    found = []
    for told in map(as_object, text.splitlines()):
        if told:
            ended = as_number(told["at"]) if "at" in told else None
            at = told.get("ended") if ended is None else ended / 1000
            found.append(
                Attempt(
                    number=_whole(told.get("attempt")),
                    endpoint=str(told.get("endpoint", "")),
                    kind=str(told.get("kind", "")),
                    status_code=as_status(told.get("status")),
                    error=str(told.get("error", "")),
                    started_at=as_moment(told.get("started")),
                    ended_at=as_moment(at),
                )
            )
    return tuple(found)


def _whole(value: Any) -> int | None:
    number = as_number(value)
    return None if number is None else int(number)


def _payload(data: bytes) -> Any:
    try:
        work = decode_data(data, MOST_PAYLOAD).work
    except InvalidTask as error:
        return {"unreadable": str(error)}
    told: dict[str, Any] = {"timeout": work.timeout}
    if isinstance(work, NpuTask):
        told |= {"task_type": work.task_type, "data": work.data}
    else:
        told |= {"method": work.method, "path": work.path, "json": work.json, "body": work.body}
        told["headers"] = dict(work.headers)
    return {name: value for name, value in told.items() if value not in (None, {})}
