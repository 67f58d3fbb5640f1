"""What flows are made of."""

from __future__ import annotations

import pytest

from broker.flows import Made


def test_items_are_made_once_each_when_they_are_asked_for() -> None:
    asked: list[int] = []

    def make(at: int) -> str:
        asked.append(at)
        return f"item {at}"

    made = Made(4, make)
    assert (len(made), asked) == (4, [])
    walk = iter(made)
    assert (next(walk), asked) == ("item 0", [0])
    assert list(made) == ["item 0", "item 1", "item 2", "item 3"]
    assert (made[1:3], asked) == (["item 1", "item 2"], [0, 1, 2, 3])
    for outside in (4, -1):
        with pytest.raises(IndexError):
            made[outside]
