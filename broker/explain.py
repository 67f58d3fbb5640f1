"""Why a task waits: its place, and for each endpoint of its pool what keeps it from taking the task now.

`decide` is pure: it judges what `read` found at one moment. The rule itself is lua/select.lua.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from broker.errors import UnknownTask
from broker.fields import as_count, as_date, as_fields, as_list, as_seconds
from broker.flows import Flow, Plain, drive
from broker.inspect import (
    EndpointStatus,
    Plainly,
    endpoint_states,
    process_names,
    unattended,
)
from broker.keys import Keys
from broker.outcome import attempts_of
from broker.task import PRIORITIES, check_task_id
from broker.taskview import MOST_LISTED, failed_by_stock, reason_of, stock_failures, variant_of

if TYPE_CHECKING:
    from broker.store import Store

ENDED: Final = {"finished": "ok", "failed": "dead", "canceled": "canceled"}  # RQ's words, ours
OUT: Final = ("removed", "disabled", "draining", "absent", "unhealthy", "open")  # as `live` in lua/select.lua


@dataclass(frozen=True, slots=True)
class Reading:
    """What Redis said of a task. `row`: its hash as text. Times in Unix seconds by the server's clock.

    place     from 1, in the list it waits in, of `length` entries; None: not found there
    before    waiting tasks of the same endpoints and a higher priority
    due       from the registry of delayed tasks
    lease_end of its lease, while it runs
    """

    id: str
    row: dict[str, str]
    endpoints: tuple[EndpointStatus, ...]
    place: int | None = None
    length: int = 0
    before: int = 0
    due: float | None = None
    lease_end: float | None = None


@dataclass(frozen=True, slots=True)
class Reason(Plainly):
    """`allowed`: the endpoint may take this task as soon as nothing temporary is in the way; `free`: nothing is."""

    endpoint: str
    allowed: bool
    free: bool
    why: str


@dataclass(frozen=True, slots=True)
class Explanation(Plainly):
    """`state` as in TaskView; `summary` is the answer in one line; `endpoints` only while it waits, preferred first."""

    id: str
    pool: str
    state: str
    summary: str
    place: int | None = None
    due_at: float | None = None
    deadline: float | None = None
    endpoints: tuple[Reason, ...] = ()


def task_explain(store: Store, task_id: str) -> Explanation:
    """Raises UnknownTask, InvalidTask."""
    return drive(store, explain(store.keys, check_task_id(task_id)))


def explain(keys: Keys, task_id: str) -> Flow[Explanation]:
    now, reading = yield from read(keys, task_id)
    return decide(reading, now)


# Reading


def read(keys: Keys, task_id: str) -> Flow[tuple[float, Reading]]:
    """The server's time, and what it knows of the task. Raises UnknownTask."""
    (record,) = yield Plain([("HGETALL", keys.job(task_id))])
    if not record:
        raise UnknownTask(f"task {task_id}: not in Redis; it never was, or its outcome has expired (queue.result_ttl)")
    row = as_fields({name: value for name, value in record.items() if name not in (b"data", b"x_ans")})
    if failed_by_stock(row):
        for why, _ in (yield from stock_failures(keys, [task_id])).values():
            row["exc_info"] = why
    pool, priority = row.get("origin", ""), row.get("x_pri") or "normal"
    own = keys.queue(pool, variant_of(row))
    higher = [keys.queue(pool, variant_of({**row, "x_pri": each})) for each in _above(priority)]
    now, endpoints = yield from endpoint_states(keys, pool)
    place, length, due, lease, waiters, leases, *before = yield Plain(
        [
            ("LPOS", own, task_id, "MAXLEN", MOST_LISTED),
            ("LLEN", own),
            ("ZSCORE", keys.registry("scheduled", pool), task_id),
            ("ZSCORE", keys.slots(pool, row.get("x_ep", "")), task_id),
            ("HKEYS", keys.waiting(pool)),
            ("ZRANGE", keys.registry("wip", pool), 0, -1),
            *(("LLEN", name) for name in higher),
        ]
    )
    return now, Reading(
        id=task_id,
        row=row,
        endpoints=endpoints if process_names(waiters, leases) else unattended(endpoints),
        place=None if place is None else place + 1,
        length=length,
        before=sum(before),
        due=None if due is None else float(due),
        lease_end=None if lease is None else float(lease) / 1000,
    )


def _above(priority: str) -> Sequence[str]:
    return PRIORITIES[: PRIORITIES.index(priority)] if priority in PRIORITIES else ()


# Deciding


def decide(reading: Reading, now: float) -> Explanation:
    """`now` is the server's time."""
    row = reading.row
    status = row.get("status", "")
    outcome = row.get("x_out") or ENDED.get(status, "")
    deadline = as_seconds(row.get("x_dl"))
    reasons: tuple[Reason, ...] = ()
    if outcome:
        state, summary = outcome, _ended(reading, outcome, now)
    elif status == "started":
        state, summary = status, _running(reading, now)
    elif status == "scheduled":
        state, summary = status, _delayed(reading, now)
    elif status == "queued":
        reasons = tuple(_reasons(reading, now))
        state, summary = status, _waiting(reading, reasons)
    else:
        state, summary = status, f"RQ says {status or 'nothing'!r}: it is not headrace's turn yet"
    if not outcome and deadline is not None:
        left = deadline - now
        summary += f"; it expires in {_span(left)}" if left > 0 else "; its deadline has passed: it will expire"
    return Explanation(
        id=reading.id,
        pool=row.get("origin", ""),
        state=state,
        summary=summary,
        place=reading.place if state == "queued" else None,
        due_at=reading.due if state == "scheduled" else None,
        deadline=deadline,
        endpoints=reasons,
    )


def _ended(reading: Reading, outcome: str, now: float) -> str:
    row = reading.row
    ended, why = as_date(row.get("ended_at")), reason_of(row)
    tries = attempts_of(row.get("x_out"), row.get("x_try"))
    text = {"ok": "answered", "dead": "given up", "poison": "given up"}.get(outcome, outcome)
    if ended is not None:
        text += f" {_span(now - ended)} ago"
    if tries:
        text += f" after {_count(tries, 'attempt')}"
    if why and outcome not in ("ok", "canceled"):
        text += f": {why}"
    if outcome in ("dead", "poison"):
        text += f"; `headrace dead redrive {reading.id}` puts it back"
    return text


def _running(reading: Reading, now: float) -> str:
    row = reading.row
    began, endpoint = as_seconds(row.get("x_run")), row.get("x_ep", "")
    if not endpoint:
        return "running in a stock RQ worker"
    since = f" for {_span(now - began)}" if began is not None else ""
    text = f"running on {endpoint}{since}, attempt {as_count(row.get('x_try')) + 1}"
    if reading.lease_end is None:
        return f"{text}; but it holds no slot there: it will be repaired"
    if reading.lease_end < now:
        gone = _span(now - reading.lease_end)
        return f"{text}; its lease ran out {gone} ago: its process is gone, it will be tried again"
    return text


def _delayed(reading: Reading, now: float) -> str:
    tries, lost = as_count(reading.row.get("x_try")), as_count(reading.row.get("x_del"))
    after = f" (after {_count(tries, 'failed attempt')})" if tries else ""
    if lost and not tries:
        after = f" (after {_count(lost, 'lost process', 'lost processes')})"
    if reading.due is None:
        return "delayed, but in no list: it will be repaired"
    if reading.due > now:
        return f"not due for {_span(reading.due - now)}, until {_clock(reading.due)}{after}"
    return f"due now{after}: the next claim or sweep puts it on the queue"


def _waiting(reading: Reading, reasons: Sequence[Reason]) -> str:
    where = variant_of(reading.row) or "normal"
    if reading.place is not None:
        text = f"place {reading.place} of {reading.length} in list {where!r}"
    elif reading.length > MOST_LISTED:
        text = f"beyond place {MOST_LISTED} of {reading.length} in list {where!r}"
    else:
        text = f"in no list (it should stand in {where!r}): it will be repaired"
    if reading.before:
        text += f", behind {reading.before} of higher priority"
    return f"{text}; {_obstacle(reading, reasons)}"


def _obstacle(reading: Reading, reasons: Sequence[Reason]) -> str:
    """What the endpoints' reasons come to."""
    if not reasons:
        return f"no endpoint is registered for pool {reading.row.get('origin', '')!r}: start `headrace worker`"
    allowed = [reason for reason in reasons if reason.allowed]
    if not allowed:
        needed = as_list(reading.row.get("x_req"))
        if needed and all(reason.why.startswith("lacks") for reason in reasons):
            return f"no endpoint has {' and '.join(needed)}"
        return "no endpoint may take it: " + ", ".join(f"{reason.endpoint} {reason.why}" for reason in reasons[:5])
    free = [reason.endpoint for reason in allowed if reason.free]
    if free:
        return f"{', '.join(free[:5])} {'has' if len(free) == 1 else 'have'} a free slot: it is about to start"
    shared = {reason.why for reason in allowed}
    if len(allowed) > 1 and len(shared) == 1:
        return f"all {len(allowed)} endpoints: {allowed[0].why}"
    return ", ".join(f"{reason.endpoint} {reason.why}" for reason in allowed[:5])


def _reasons(reading: Reading, now: float) -> Iterator[Reason]:
    needed, excluded = set(as_list(reading.row.get("x_req"))), set(as_list(reading.row.get("x_excl")))
    capable = [each for each in reading.endpoints if needed <= set(each.capabilities)]
    # Exclusions hold only while another endpoint is live.
    holds = any(each.state not in OUT for each in capable if each.id not in excluded)
    for each in reading.endpoints:
        missing = sorted(needed - set(each.capabilities))
        if missing:
            yield Reason(each.id, False, False, f"lacks {' and '.join(missing)}")
        elif each.state in ("removed", "disabled", "draining"):
            word = "is leaving the configuration" if each.state == "removed" else f"is {each.state}"
            yield Reason(each.id, False, False, word)
        elif holds and each.id in excluded:
            yield Reason(each.id, False, False, "is left out: it failed this task")
        else:
            why = _why_not_now(each, now)
            yield Reason(each.id, True, not why, why or f"has {each.slots - each.in_flight} of {each.slots} slots free")


def _why_not_now(endpoint: EndpointStatus, now: float) -> str:
    """What keeps tasks from an endpoint for the time being; "" if nothing does."""
    if endpoint.state == "absent":
        since = "never did" if endpoint.age is None else f"last {_span(endpoint.age)} ago"
        return f"has no worker process listening ({since})"
    if endpoint.state == "unhealthy":
        ago = f" {_span(now - endpoint.checked_at)} ago" if endpoint.checked_at is not None else ""
        return f"is unhealthy: its check{ago} said {endpoint.health_detail or 'no'}"
    if endpoint.state == "open":
        left = (endpoint.open_until or now) - now
        return f"has its breaker open for {_span(left)} more ({endpoint.reason or 'no reason kept'})"
    if endpoint.state == "paused":
        return f"asked for a pause, {_span((endpoint.paused_until or now) - now)} more"
    if endpoint.state == "probing" and endpoint.in_flight:
        return "is being probed with one task (breaker half open)"
    if endpoint.in_flight < endpoint.slots:
        return ""
    slow = f"; {endpoint.max_concurrent} when it has recovered" if endpoint.slots < endpoint.max_concurrent else ""
    return f"has all slots busy ({endpoint.in_flight}/{endpoint.slots}{slow})"


# Words


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def _clock(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
