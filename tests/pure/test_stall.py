"""When a run says why nothing comes out of it."""

from __future__ import annotations

import pytest

from broker.cli.stall import AGAIN_S, EARLY_S, LATE_S, Stall


def said(some_up: bool, settled: dict[float, int], until: float, pending: int = 1) -> list[float]:
    """When it says something, looking five times a second. `settled`: from when on how many lines were."""
    stall, lines, now, count = Stall(0.0), [], 0.0, 0
    while now < until:
        now = round(now + 0.2, 1)
        count = settled.get(now, count)
        seconds = stall.lasted(count, pending, now)
        if seconds and stall.worth_a_line(some_up, seconds):
            lines.append(now)
    return lines


@pytest.mark.parametrize(
    ("some_up", "settled", "expected"),
    [
        (False, {}, [EARLY_S, EARLY_S + AGAIN_S, EARLY_S + 2 * AGAIN_S]),
        (True, {}, [LATE_S, LATE_S + AGAIN_S, LATE_S + 2 * AGAIN_S]),
        (False, {3.0: 1, 6.0: 2}, [6.0 + EARLY_S + n * AGAIN_S for n in range(3)]),
        (True, {10.0: 1, 140.0: 2}, [10.0 + LATE_S, 10.0 + LATE_S + AGAIN_S]),
        (False, {float(n): n for n in range(0, 140, 3)}, []),
    ],
)
def test_it_is_said_early_if_nothing_can_come_and_then_seldom(
    some_up: bool, settled: dict[float, int], expected: list[float]
) -> None:
    assert said(some_up, settled, 139.0) == pytest.approx(expected, abs=1.1)


def test_nothing_is_said_while_nothing_is_under_way() -> None:
    assert said(False, {}, 100.0, pending=0) == []
