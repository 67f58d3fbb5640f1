"""Classification is a table, and is tested as one."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import EndpointError
from workers.errors import (
    MAX_DETAIL_CHARS,
    RULES,
    AttemptFailed,
    FailureKind,
    Rule,
    classify_status,
    one_line,
    parse_retry_after,
    status_failure,
)

NOW = 1_700_000_000.0
COUNTED = Rule("endpoint", "retry", "count")
GIVEN_UP = Rule("task", "dead_letter", "ignore")
TRIED_ELSEWHERE = Rule("none", "retry", "ignore")

EXPECTED: dict[FailureKind, Rule] = {
    "connect": COUNTED,
    "connect_timeout": COUNTED,
    "first_byte_timeout": COUNTED,
    "idle_timeout": COUNTED,
    "attempt_timeout": COUNTED,
    "cut": COUNTED,
    "malformed": COUNTED,
    "tls": COUNTED,
    "http_5xx": COUNTED,
    "own_timeout": TRIED_ELSEWHERE,
    "again": TRIED_ELSEWHERE,
    "app_error": TRIED_ELSEWHERE,
    "rate_limited": Rule("none", "pause", "ignore"),
    "auth": Rule("endpoint", "retry", "open"),
    "redirect": Rule("endpoint", "retry", "count"),
    "http_4xx": GIVEN_UP,
    "too_large": COUNTED,
    "task_error": GIVEN_UP,
}


def test_the_table() -> None:
    assert dict(RULES) == EXPECTED


def test_every_kind_has_a_rule() -> None:
    assert set(RULES) == set(get_args(FailureKind))


def test_the_tasks_fault_never_touches_the_breaker_and_a_pause_never_counts() -> None:
    for kind, rule in RULES.items():
        if rule.fault != "endpoint" or rule.action == "pause":
            assert rule.breaker == "ignore", kind


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, None),
        (204, None),
        (299, None),
        (101, "malformed"),
        (301, "redirect"),
        (304, "redirect"),
        (307, "redirect"),
        (400, "http_4xx"),
        (401, "auth"),
        (402, "http_4xx"),
        (403, "auth"),
        (404, "http_4xx"),
        (408, "again"),
        (409, "again"),
        (413, "http_4xx"),
        (422, "http_4xx"),
        (425, "again"),
        (429, "rate_limited"),
        (499, "http_4xx"),
        (500, "http_5xx"),
        (503, "http_5xx"),
        (529, "http_5xx"),
        (599, "http_5xx"),
        (600, "malformed"),
        (0, "malformed"),
    ],
)
def test_statuses(status: int, kind: FailureKind | None) -> None:
    assert classify_status(status) == kind


def test_a_503_with_retry_after_stays_a_5xx_and_keeps_the_wait() -> None:
    failure = status_failure(503, {"retry-after": "60"}, b"busy", NOW)
    assert failure is not None
    assert (failure.kind, failure.status, failure.retry_after, failure.body) == ("http_5xx", 503, 60.0, b"busy")
    assert "busy" not in str(failure)


def test_a_success_is_no_failure() -> None:
    assert status_failure(201, {}, b"", NOW) is None


def date_in(seconds: float) -> str:
    return format_datetime(datetime.fromtimestamp(NOW + seconds, UTC), usegmt=True)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("1", 1.0),
        ("0", 0.0),
        (" 2 ", 2.0),
        ("1.5", 1.5),
        ("99999999999", 600.0),
        (date_in(30), 30.0),
        (date_in(-30), 0.0),
        (date_in(1e6), 600.0),
        ("-1", None),
        ("soon", None),
        ("", None),
        ("nan", None),
        ("inf", None),
        ("1e3", None),
        ("1, 2", None),
        ("\u0661", None),
        ("Wed, 99 Foo 2023 99:99:99 GMT", None),
    ],
)
def test_retry_after(value: str, seconds: float | None) -> None:
    assert parse_retry_after({"retry-after": value}, NOW) == seconds


@given(st.text())
def test_retry_after_never_raises_and_stays_in_bounds(value: str) -> None:
    seconds = parse_retry_after({"retry-after": value}, NOW)
    assert seconds is None or 0 <= seconds <= 600


@given(st.text())
def test_a_detail_is_one_printable_bounded_line(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert len(line) <= MAX_DETAIL_CHARS


def test_attempt_failed_survives_pickling() -> None:
    failure = AttemptFailed("cut", "a\nb", status=200, retry_after=2.0, body=b"x", headers={"a": "b"})
    copy = pickle.loads(pickle.dumps(failure))
    assert isinstance(copy, AttemptFailed)
    assert isinstance(copy, EndpointError)
    assert str(copy) == str(failure) == "cut: a b"
    assert vars(copy) == vars(failure)
    assert copy.rule is RULES["cut"]
