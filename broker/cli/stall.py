"""When nothing comes out of a run: after how long to say so, and why it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from broker.cli.watch import why
from broker.inspect import EndpointStatus

EARLY_S: Final = 4.0  # without an outcome, before it is told that no endpoint takes tasks: an address may be mistyped
LATE_S: Final = 15.0  # before it is told in any case: answers may just be slow
AGAIN_S: Final = 60.0


class Stall:
    """Decides on times alone; `now` in seconds of any steady clock."""

    def __init__(self, now: float) -> None:
        self._moved_at, self._settled = now, 0
        self._asked = self._told = 0.0  # seconds into this stall

    def lasted(self, settled: int, pending: int, now: float) -> float:
        """For how long nothing was settled, if it is time to ask the endpoints why; else 0."""
        if settled != self._settled or not pending:
            self._settled, self._moved_at = settled, now
            self._asked = self._told = 0.0
            return 0.0
        seconds = now - self._moved_at
        pause = AGAIN_S if self._told else 1.0
        if seconds < EARLY_S or seconds - max(self._asked, self._told) < pause:
            return 0.0
        self._asked = seconds
        return seconds

    def worth_a_line(self, some_up: bool, seconds: float) -> bool:
        """Whether to say it now. `some_up`: an endpoint takes tasks."""
        if some_up and seconds < LATE_S:
            return False
        self._told = seconds
        return True


def explain(endpoints: Sequence[EndpointStatus]) -> str:
    """Each endpoint's state, with its cause."""
    return "; ".join(
        f"{each.id} is {each.state}" + (f" ({reason})" if (reason := why(each)) else "") for each in endpoints
    )
