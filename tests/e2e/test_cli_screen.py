"""What the command prints: logs, tables, counts."""

from __future__ import annotations

import io
import json
import logging
import random
from collections.abc import Iterator

import pytest

from broker import logs
from broker.cli import screen
from broker.cli.tally import Histogram, Tally
from broker.task import Result


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, ours = logging.getLogger(), logging.getLogger(logs.ROOT)
    levels = root.level, ours.level
    yield io.StringIO()
    for handler in [each for each in root.handlers if each.get_name() == logs.ROOT]:
        root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


FORGED = "a\n12:00:00 ERROR fake: b\r\x1b[31m\u2028\u202e"


def test_text_logs_are_one_line_a_record(stream: io.StringIO) -> None:
    logs.set_up("info", "text", stream)
    logging.getLogger("headrace.dispatch").info("task %s", FORGED)
    logging.getLogger("headrace.dispatch").debug("not at this level")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r"INFO dispatch: task a\n12:00:00 ERROR fake: b\r\x1b[31m\u2028\u202e")


def test_json_logs_are_one_object_a_record(stream: io.StringIO) -> None:
    logs.set_up("warning", "json", stream)
    logging.getLogger("headrace.dispatch").warning("task %s", FORGED)
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert (told["level"], told["logger"], told["message"]) == ("warning", "headrace.dispatch", f"task {FORGED}")
    assert line.isascii()


def test_set_up_again_replaces(stream: io.StringIO) -> None:
    other = io.StringIO()
    logs.set_up("info", "text", other)
    logs.set_up("error", "text", stream)
    logging.getLogger("headrace.x").error("once")
    logging.getLogger("headrace.x").warning("not now")
    logging.getLogger("aiohttp").warning("others from warnings on")
    assert other.getvalue() == ""
    assert len(stream.getvalue().splitlines()) == 2


def test_a_traceback_cannot_forge_a_line(stream: io.StringIO) -> None:
    logs.set_up("info", "text", stream)
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("headrace.x").exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("ERROR x: failed")
    assert all(line.startswith("  ") for line in rest)


def test_a_long_message_is_cut(stream: io.StringIO) -> None:
    logs.set_up("info", "text", stream)
    logging.getLogger("headrace.x").info("x" * 10_000)
    assert len(stream.getvalue()) < 4200
    assert "(10000 characters)" in stream.getvalue()


def test_quantiles_are_right_to_two_percent() -> None:
    random.seed(5)
    histogram, values = Histogram(), [random.lognormvariate(-2, 1.2) for _ in range(20_000)]
    for value in values:
        histogram.add(value)
    values.sort()
    for share in (0.01, 0.5, 0.95, 0.999):
        found = histogram.quantile(share)
        assert found is not None
        assert abs(found / values[int(share * len(values))] - 1) < 0.02
    assert Histogram().quantile(0.5) is None


def test_a_tally_counts_outcomes() -> None:
    tally = Tally()
    tally.outcome(Result("1", "ok", 200, endpoint="a", attempts=1, started_at=1, ended_at=1.5))
    tally.outcome(Result("2", "ok", 200, endpoint="b", attempts=3, started_at=1, ended_at=2))
    tally.outcome(Result("3", "dead", 400, endpoint="a", attempts=1, reason="http_4xx"))
    tally.outcome(Result("4", "expired", reason="expired"))
    tally.add_failures({"a": 7, "b": 1}, {"a": 8, "b": 3, "c": 2})
    told = tally.to_dict()
    assert (told["answered"], told["failed"], told["retries"], told["dead_letters"]) == (2, 2, 2, 1)
    rows = {row["endpoint"]: row for row in told["endpoints"]}
    assert [(rows[name]["served"], rows[name]["failures"]) for name in "abc"] == [(1, 1), (1, 2), (0, 2)]
    assert rows["a"]["share"] == 0.5
    assert tally.troubled


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (0.0032, "3.2 ms"), (0.34, "340 ms"), (0.9999, "1.0 s"), (2.14, "2.1 s"), (245, "4 min 5 s"),
        (7260, "2 h 1 min"),
    ],
)  # fmt: skip
def test_spans(seconds: float | None, text: str) -> None:
    assert screen.span(seconds) == text


def test_tables_align_and_escape() -> None:
    out = io.StringIO()
    screen.print_table(("id", "count"), [("a\x1b[2J", 5), ("bb", 1000), ("c", None)], out)
    assert out.getvalue().splitlines() == ["id        count", r"a\x1b[2J      5", "bb         1000", "c             -"]
