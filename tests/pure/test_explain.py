"""Why a task waits, decided from what was read: a table."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from broker.explain import Reading, decide
from broker.inspect import EndpointStatus
from broker.rqjob import utc

NOW = 1_700_000_000.0
MS = int(NOW * 1000)


def at(ms: int) -> str:
    return utc(ms / 1000)


def endpoint(name: str, state: str = "ready", **more: Any) -> EndpointStatus:
    """Live, with 4 slots of which none is taken."""
    given: dict[str, Any] = {
        "id": name, "state": state, "priority": 5, "max_concurrent": 4, "in_flight": 0, "capabilities": (),
        "enabled": state != "disabled", "served": 0, "failed": 0, "breaker": "closed", "fails": 0, "opened": 0,
        "reason": "", "open_until": None, "paused_until": None, "age": 1.0, "slots": 4,
    }  # fmt: skip
    return EndpointStatus(**{**given, **more})


FULL = endpoint("full", "full", in_flight=4)
OPEN = endpoint("open", "open", breaker="open", open_until=NOW + 42, reason="http_5xx: busy")
PAUSED = endpoint("paused", "paused", paused_until=NOW + 7.5)
SICK = endpoint("sick", "unhealthy", healthy=False, checked_at=NOW - 3, health_detail="HTTP 500")
ABSENT = endpoint("absent", "absent", age=120.0)
NEVER = endpoint("never", "absent", age=None)
PROBED = endpoint("probed", "probing", breaker="half_open", in_flight=1)
RAMPING = endpoint("ramping", "full", in_flight=2, slots=2)
FREE = endpoint("free", in_flight=1)


def waiting(*endpoints: EndpointStatus, place: int | None = 1, before: int = 0, **row: str) -> Reading:
    return Reading("t", {"origin": "llm", "status": "queued", **row}, endpoints, place, 3, before)


@pytest.mark.parametrize(
    ("one", "allowed", "free", "why"),
    [
        (FREE, True, True, "has 3 of 4 slots free"),
        (FULL, True, False, "has all slots busy (4/4)"),
        (RAMPING, True, False, "has all slots busy (2/2; 4 when it has recovered)"),
        (OPEN, True, False, "has its breaker open for 42.0 s more (http_5xx: busy)"),
        (PROBED, True, False, "is being probed with one task (breaker half open)"),
        (dataclasses.replace(PROBED, in_flight=0), True, True, "has 4 of 4 slots free"),
        (PAUSED, True, False, "asked for a pause, 7.5 s more"),
        (SICK, True, False, "is unhealthy: its check 3.0 s ago said HTTP 500"),
        (ABSENT, True, False, "has no worker process listening (last 2 min ago)"),
        (NEVER, True, False, "has no worker process listening (never did)"),
        (endpoint("e", "draining"), False, False, "is draining"),
        (endpoint("e", "disabled"), False, False, "is disabled"),
        (endpoint("e", "removed"), False, False, "is leaving the configuration"),
    ],
    ids=lambda value: value.state if isinstance(value, EndpointStatus) else None,
)
def test_what_keeps_an_endpoint_from_a_task(one: EndpointStatus, allowed: bool, free: bool, why: str) -> None:
    (reason,) = decide(waiting(one), NOW).endpoints
    assert (reason.endpoint, reason.allowed, reason.free, reason.why) == (one.id, allowed, free, why)


def test_a_capability_comes_first() -> None:
    eyes = endpoint("eyes", "full", in_flight=4, capabilities=("llm", "vision"))
    told = decide(waiting(FREE, eyes, OPEN, x_req="llm,vision"), NOW)
    assert [reason.why for reason in told.endpoints] == [
        "lacks llm and vision", "has all slots busy (4/4)", "lacks llm and vision",
    ]  # fmt: skip
    assert told.summary == "place 1 of 3 in list 'normal+llm,vision'; eyes has all slots busy (4/4)"
    assert decide(waiting(FREE, x_req="vision"), NOW).summary.endswith("; no endpoint has vision")


def test_an_endpoint_that_failed_the_task_is_left_out_while_another_is_live() -> None:
    failed = dataclasses.replace(FREE, id="failed")
    told = decide(waiting(failed, FULL, x_excl="failed"), NOW)
    assert [(each.allowed, each.why) for each in told.endpoints] == [
        (False, "is left out: it failed this task"), (True, "has all slots busy (4/4)"),
    ]  # fmt: skip
    for out in (OPEN, SICK, ABSENT, endpoint("e", "draining"), endpoint("e", "disabled")):
        first, _ = decide(waiting(failed, out, x_excl="failed"), NOW).endpoints
        assert (first.allowed, first.free) == (True, True), out.state
    for live in (PAUSED, PROBED, FULL):
        first, _ = decide(waiting(failed, live, x_excl="failed"), NOW).endpoints
        assert not first.allowed, live.state


@pytest.mark.parametrize(
    ("reading", "summary"),
    [
        (waiting(), "no endpoint is registered for pool 'llm': start `headrace worker`"),
        (waiting(FULL, FREE), "free has a free slot: it is about to start"),
        (
            waiting(FULL, OPEN),
            "full has all slots busy (4/4), open has its breaker open for 42.0 s more (http_5xx: busy)",
        ),
        (waiting(FULL, dataclasses.replace(FULL, id="b")), "all 2 endpoints: has all slots busy (4/4)"),
        (waiting(endpoint("e", "draining")), "no endpoint may take it: e is draining"),
    ],
)
def test_what_the_endpoints_come_to(reading: Reading, summary: str) -> None:
    assert decide(reading, NOW).summary == f"place 1 of 3 in list 'normal'; {summary}"


def test_the_place() -> None:
    told = decide(waiting(FULL, place=2, before=40), NOW)
    assert told.place == 2
    assert told.summary.startswith("place 2 of 3 in list 'normal', behind 40 of higher priority; full has")
    lost = decide(waiting(FULL, place=None), NOW)
    assert lost.summary.startswith("in no list (it should stand in 'normal'): it will be repaired")
    far = dataclasses.replace(waiting(FULL, place=None), length=50_000)
    assert decide(far, NOW).summary.startswith("beyond place 10000 of 50000 in list 'normal'")
    high = decide(waiting(FULL, x_pri="high", x_excl="a"), NOW)
    assert "in list 'high!a'" in high.summary


def other(status: str, **more: Any) -> Reading:
    row = {name: value for name, value in more.items() if name.startswith(("x_", "exc", "ended"))}
    rest = {name: value for name, value in more.items() if name not in row}
    return Reading("t", {"origin": "llm", "status": status, **row}, (), **rest)


@pytest.mark.parametrize(
    ("reading", "state", "summary"),
    [
        (other("scheduled", due=NOW + 8), "scheduled", "not due for 8.0 s, until 2023-11-14 22:13:28 UTC"),
        (other("scheduled", due=NOW + 8, x_try="2"), "scheduled", "(after 2 failed attempts)"),
        (other("scheduled", due=NOW + 8, x_del="1"), "scheduled", "(after 1 lost process)"),
        (other("scheduled", due=NOW - 1), "scheduled", "due now: the next claim or sweep puts it on the queue"),
        (other("scheduled"), "scheduled", "delayed, but in no list"),
        (
            other("started", x_ep="vm1", x_run=str(MS - 2500), x_try="1", lease_end=NOW + 20),
            "started", "running on vm1 for 2.5 s, attempt 2",
        ),
        (other("started", x_ep="vm1", x_run=str(MS - 99_000), lease_end=NOW - 4), "started", "ran out 4.0 s ago"),
        (other("started", x_ep="vm1", x_run=str(MS)), "started", "holds no slot there"),
        (other("started"), "started", "running in a stock RQ worker"),
        (other("finished", x_out="ok", ended_at=at(MS - 5000)), "ok", "answered 5.0 s ago after 1 attempt"),
        (other("finished", x_out="ok", ended_at=at(MS), x_try="2"), "ok", "answered 0.0 s ago after 3 attempts"),
        (
            other("failed", x_out="dead", x_why="http_400: no", ended_at=at(MS), x_try="1"),
            "dead", "given up 0.0 s ago after 1 attempt: http_400: no; `headrace dead redrive t` puts it back",
        ),
        (other("failed", x_out="expired", x_why="late", ended_at=at(MS)), "expired", "expired 0.0 s ago: late"),
        (other("canceled", x_out="canceled", ended_at=at(MS - 60_000)), "canceled", "canceled 60.0 s ago"),
        (other("failed", exc_info="Traceback\nValueError: x"), "dead", "given up: ValueError: x"),
        (other("deferred"), "deferred", "RQ says 'deferred'"),
    ],
)  # fmt: skip
def test_a_task_that_does_not_wait_for_a_slot(reading: Reading, state: str, summary: str) -> None:
    told = decide(reading, NOW)
    assert told.state == state
    assert summary in told.summary
    assert told.endpoints == ()


def test_the_deadline_is_told_until_there_is_an_outcome() -> None:
    told = decide(waiting(FULL, x_dl=str(MS + 30_000)), NOW)
    assert told.deadline == NOW + 30
    assert told.summary.endswith("; it expires in 30.0 s")
    assert decide(waiting(FULL, x_dl=str(MS - 1)), NOW).summary.endswith("its deadline has passed: it will expire")
    ended = decide(other("finished", x_out="ok", x_dl=str(MS + 1)), NOW)
    assert "expires" not in ended.summary
