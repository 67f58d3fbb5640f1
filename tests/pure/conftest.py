"""Configuration files for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a text as configuration file; gives its path."""

    def write_file(text: str) -> Path:
        path = tmp_path / "headrace.yaml"
        path.write_text(text)
        return path

    return write_file
