"""A short selection of the fault matrix; all of it is `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import run_round
from tests.chaos.checker import table
from tests.chaos.scenarios import load

SHORT = {
    "kill-one": 3,
    "freeze-long": 1,
    "drain": 2,
    "kill-synced-server": 2,
    "server-away": 1,
    "read-only": 1,
    "lose-replies": 60,
    "reset-links": 60,
    "clock-ahead": 2,
    "bad-endpoint": 4,
}


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", SHORT)
def test_the_invariants_hold(name: str, tmp_path: Path) -> None:
    verdict = run_round(load()[name], 7, tmp_path, SHORT[name])
    assert verdict.holds, table(verdict)
    assert verdict.injected >= 1
    assert verdict.tasks >= 10
