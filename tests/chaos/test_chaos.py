"""A short selection of the fault matrix; all of it is `make chaos`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.clock import MissingFaketime, library
from tests.chaos.rounds import run_round
from tests.chaos.scale import crowd, lines
from tests.chaos.scenarios import load
from tests.chaos.verdict import table

SHORT = {
    "kill-one": 3,
    "freeze-long": 1,
    "block-loop": 1,
    "wrong-clock": 3,
    "drain": 2,
    "kill-synced-server": 2,
    "server-away": 1,
    "read-only": 1,
    "sentinel-failover": 1,
    "lose-replies": 60,
    "lose-enqueue-replies": 20,
    "reset-links": 60,
    "clock-ahead": 2,
    "bad-endpoint": 4,
}


def need_faketime() -> None:
    """Skips where there is none; CI brings it."""
    try:
        library()
    except MissingFaketime as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", SHORT)
def test_the_invariants_hold(name: str, tmp_path: Path) -> None:
    if load()[name].settings.wrong_clocks:
        need_faketime()
    verdict = run_round(load()[name], 7, tmp_path, SHORT[name])
    assert verdict.holds, table(verdict)
    assert verdict.injected >= 1
    assert verdict.tasks >= 10


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_long_input_does_not_grow_the_memory_of_run(tmp_path: Path) -> None:
    """S23, small; all of it: `python -m tests.chaos.scale lines`."""
    code, memory, _ = lines(10_000, tmp_path)
    assert code == 0
    assert memory.flat, str(memory)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_many_in_flight_on_one_process(tmp_path: Path) -> None:
    """S17, small; all of it: `python -m tests.chaos.scale crowd`."""
    seen = crowd(400, 10.0, tmp_path)
    assert (seen.failed, seen.ended, seen.most) == (0, False, 400)
    assert seen.memory.flat, str(seen.memory)
