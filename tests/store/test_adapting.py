"""`max_concurrent: auto` on endpoints of any speed. What it decides is walked through by the model (`test_model`)."""

from __future__ import annotations

import pytest

from tests.support.verbs import Verbs, row

LANES = 4  # more slots than these gain nothing


@pytest.mark.parametrize("pace", [100, 714_000, 3_600_000])
def test_slots_are_found_however_slow_the_endpoint(verbs: Verbs, pace: int) -> None:
    """It answers once in `pace` ms with all its lanes in use, in proportion with fewer."""
    verbs.register(row("a", 1, span=(1, 256)))
    held, slots = verbs.claim("p1", a=256), []
    for number in range(400):
        verbs.enqueue(*(f"{number}.{one}" for one in range(8)))
        held += verbs.claim("p1", held=len(held), a=256 - len(held))
        verbs.clock.advance(pace * LANES // min(len(held), LANES))
        verbs.finish(held.pop(0))
        slots.append(int(verbs.endpoint("a", "cap")))
    assert max(slots) == 2 * LANES, "it was tried, and gained nothing"
    assert slots[-1] == LANES
