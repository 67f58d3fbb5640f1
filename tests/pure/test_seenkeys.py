from __future__ import annotations

import builtins
from typing import Any

import pytest

from broker.seenkeys import KeptKeys


def keys(numbers: range) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def test_each_key_is_new_once_wherever_it_stands() -> None:
    seen = KeptKeys(in_memory=10)
    assert all(seen.add(key) for key in keys(range(100)))
    assert not any(seen.add(key) for key in keys(range(100)))
    assert all(seen.add(key) for key in keys(range(100, 200)))
    assert len(seen._some) == 10


def test_without_sqlite_they_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any) -> Any:
        if name == "sqlite3":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    seen = KeptKeys(in_memory=10)
    assert all(seen.add(key) for key in keys(range(50)))
    assert not any(seen.add(key) for key in keys(range(50)))


@pytest.mark.parametrize("in_memory", [0, 10, 1000])
def test_what_is_kept_for_a_key_is_the_last_that_was_set(in_memory: int) -> None:
    kept = KeptKeys(in_memory)
    for number, key in enumerate(keys(range(100))):
        kept[key] = b"%d" % number
    for key in keys(range(50, 70)):
        kept[key] = b"again"
    assert [kept.get(key) for key in keys(range(48, 52))] == [b"48", b"49", b"again", b"again"]
    assert len(kept) == 100
    assert kept.get(b"never") is None
    assert b"never" not in kept
    assert kept.add(keys(range(3, 4))[0], b"x") is False
    assert kept.get(keys(range(3, 4))[0]) == b"3"
