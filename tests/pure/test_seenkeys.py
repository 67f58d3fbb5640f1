from __future__ import annotations

import builtins
from typing import Any

import pytest

from broker.seenkeys import SeenKeys


def keys(numbers: range) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def test_each_key_is_new_once_wherever_it_stands() -> None:
    seen = SeenKeys(in_memory=10)
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
    seen = SeenKeys(in_memory=10)
    assert all(seen.add(key) for key in keys(range(50)))
    assert not any(seen.add(key) for key in keys(range(50)))
