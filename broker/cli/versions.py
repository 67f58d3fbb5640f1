"""Whether what is installed is what headrace asks for, as its own metadata has it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from typing import Final

_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?([^;()]*)\)?\s*(?:;(.*))?")
_CLAUSE: Final = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*([0-9][0-9.]*)\s*")
_FOREIGN_EXTRA: Final = re.compile(r"extra\s*==\s*['\"](?!api['\"])")


def outside(version: str, range_: str) -> bool:
    """Whether a version is outside a range like `>=5.1,!=6.0.0,<9`. Clauses of other kinds are passed over."""
    have = _numbers(version)
    for clause in range_.split(","):
        if (found := _CLAUSE.fullmatch(clause)) is None:
            continue
        word, bound = found[1], _numbers(found[2])
        holds = {
            ">=": have >= bound, "<=": have <= bound, "==": have == bound, "!=": have != bound,
            ">": have > bound, "<": have < bound,
        }[word]  # fmt: skip
        if not holds:
            return True
    return False


def _numbers(version: str) -> tuple[int, ...]:
    """`8.1.0rc1` gives (8, 1); zeros at the end do not count."""
    numbers = [int(part) for part in re.match(r"[0-9.]*", version.strip())[0].strip(".").split(".") if part]  # type: ignore[index]  # it matches all
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def unfit(distribution: str) -> Iterator[tuple[str, str, str]]:
    """Name, version and wanted range of each installed package that the distribution cannot work with."""
    try:
        wanted = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:  # run from a checkout
        return
    for text in wanted:
        found = _REQUIREMENT.fullmatch(text.strip())
        if found is None or _FOREIGN_EXTRA.search(found[3] or ""):
            continue
        try:
            version = metadata.version(found[1])
        except metadata.PackageNotFoundError:
            continue
        if outside(version, found[2]):
            yield found[1], version, found[2].strip()


def wanted_python(distribution: str) -> str:
    """`>=3.11`; "" if nothing tells."""
    try:
        return str(metadata.metadata(distribution)["Requires-Python"] or "")
    except (metadata.PackageNotFoundError, KeyError):
        return ""
