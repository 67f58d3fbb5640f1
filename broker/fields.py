"""Reads text, numbers and lists out of Redis, whoever wrote them: what cannot be read is as if it were not set.

Anybody who may write to Redis may have mangled a hash; a reader must show the rest, not fail.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

MOST_DIGITS: Final = 20
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z", re.ASCII).fullmatch
MOST_MS: Final = 253_402_300_799_000  # the end of the year 9999: what is later is no time


def as_text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def as_fields(record: Mapping[bytes, bytes]) -> dict[str, str]:
    return {as_text(name): as_text(value) for name, value in record.items()}


def as_int(text: str | bytes | None) -> int | None:
    """None for what is unset or no whole number."""
    if not text or len(text) > MOST_DIGITS:
        return None
    try:
        return int(text)
    except ValueError:
        return None


def as_count(text: str | bytes | None, default: int = 0) -> int:
    number = as_int(text)
    return default if number is None else number


def as_list(text: str | None) -> tuple[str, ...]:
    return tuple(part for part in (text or "").split(",") if part)


def as_seconds(text: str | bytes | None) -> float | None:
    """Milliseconds in Redis to seconds; None for unset or 0."""
    try:
        number = float(text) if text else 0.0
    except ValueError:
        return None
    return number / 1000 if 0 < number <= MOST_MS else None  # NaN is not


def as_date(text: str | bytes | None) -> float | None:
    """A time in RQ's text, `2026-01-31T12:34:56.789Z`, to Unix seconds; None for anything else."""
    told = as_text(text or "")
    if not _DATE(told):
        return None
    try:
        return as_moment(datetime.fromisoformat(told).timestamp())
    except ValueError:
        return None


def as_array(text: str | bytes | None) -> list[Any]:
    """A JSON array; [] for anything else."""
    told = _as_json(text)
    return told if isinstance(told, list) else []


def as_object(text: str | bytes | None) -> dict[str, Any]:
    """A JSON object; {} for anything else."""
    told = _as_json(text)
    return told if isinstance(told, dict) else {}


def _as_json(text: str | bytes | None) -> Any:
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):  # ValueError: also what is no UTF-8, and numbers of too many digits
        return None


def as_number(value: Any) -> float | None:
    """A number out of JSON; None for anything else."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return value if plain and abs(value) < 1e15 else None  # NaN is not


def as_moment(value: Any) -> float | None:
    """Unix seconds out of JSON; None for anything that is no time."""
    number = as_number(value)
    return number if number is not None and 0 < number * 1000 <= MOST_MS else None


def as_status(value: Any) -> int | None:
    """An HTTP status out of JSON; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 999 else None


def as_headers(value: Any) -> dict[str, str]:
    """Names and texts out of JSON; what is neither is left out."""
    return {name: text for name, text in value.items() if isinstance(text, str)} if isinstance(value, dict) else {}
