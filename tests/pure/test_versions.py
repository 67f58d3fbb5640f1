"""Ranges of versions as package metadata writes them."""

from __future__ import annotations

import pytest

from broker.cli.versions import outside


@pytest.mark.parametrize(
    ("version", "wanted", "is_outside"),
    [
        ("8.1.0", ">=5.1,!=6.0.0,<9", False),
        ("6.0.0", ">=5.1,!=6.0.0,<9", True),
        ("6.0", "!=6.0.0", True),
        ("9.0.0", "<9,>=5.1", True),
        ("5.0.9", ">=5.1", True),
        ("5.10", ">=5.9", False),
        ("8.1.0rc1", "<9", False),
        ("3.10.14", ">=3.11", True),
        ("3.13.0", ">=3.11", False),
        ("1.0.post2", ">=1.0", False),
        ("2.0", "", False),
        ("2.0", "==2", False),
        ("2.1", "==2", True),
        ("2.0", ">2", True),
        ("2.0", "<=1.9", True),
        ("odd", ">=1", True),
        ("1.0", "~=3.0", False),
    ],
)
def test_outside(version: str, wanted: str, is_outside: bool) -> None:
    assert outside(version, wanted) is is_outside
