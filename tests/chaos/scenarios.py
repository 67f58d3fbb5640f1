"""The rows of the fault matrix, each a named scenario: what it does to a world that is under load.

A scenario injects up to `budget` faults and returns; the world then heals, and the checker reads what happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from tests.chaos.world import Settings, World

Action = Callable[[World, int], None]


@dataclass(frozen=True)
class Scenario:
    """`row` of the matrix; `most` faults that one round injects."""

    name: str
    row: int
    action: Action
    settings: Settings
    most: int


SCENARIOS: dict[str, Scenario] = {}


def scenario(row: int, most: int, **settings: object) -> Callable[[Action], Action]:
    """Registers a function under its own name."""

    def register(action: Action) -> Action:
        name = action.__name__.replace("_", "-")
        SCENARIOS[name] = Scenario(name, row, action, Settings(**settings), most)  # type: ignore[arg-type]
        return action

    return register


def volleys(
    world: World, name: str, budget: int, size: int, inject: Callable[[], int], low: float, high: float
) -> None:
    """`budget` faults in a row, noted `size` at a time with the tasks that ran when the volley began."""
    done = 0
    while done < budget:
        held, began, count = world.observer.in_flight(), time.time(), 0
        while count < min(size, budget - done):
            count += inject()
            world.pause(low, high)
        world.fault(name, held, reruns=False, since=began, count=count)
        done += count
    world.flowing()


def load() -> dict[str, Scenario]:
    """All of them, by name."""
    for rows in ("process", "time", "server", "link", "endpoint", "data"):
        import_module(f"tests.chaos.{rows}_faults")
    return SCENARIOS
