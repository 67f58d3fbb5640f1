"""Durations and sizes as people write them: "500ms", "1h30m", "256KiB". In Python: float seconds, int bytes."""

from __future__ import annotations

import math
import re

_PER_UNIT = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_PART = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(ms|sec|s|min|m|h|d|w)\s*")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")

_SIZE_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "ki": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mi": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gi": 1 << 30, "gib": 1 << 30, "gb": 10**9,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")

DURATION_FORM = "a duration such as 500ms, 30s, 5m, 24h or 14d (a bare number is seconds)"
SIZE_FORM = "a size such as 256KiB, 1MiB or a number of bytes"


def parse_seconds(value: object) -> float:
    """Seconds. A number is seconds already; a string needs a unit (ms, s, m, h, d, w) unless it is only a number.

    Raises ValueError.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"must be {DURATION_FORM}")
    if not isinstance(value, str) or _NUMBER.fullmatch(value.strip()):
        seconds = float(value)
    else:
        seconds = _sum_of_parts(value.strip())
    if not math.isfinite(seconds):
        raise ValueError(f"must be {DURATION_FORM}")
    return seconds


def _sum_of_parts(text: str) -> float:
    position, seconds = 0, 0.0
    while position < len(text) and (part := _PART.match(text, position)):
        amount, unit = float(part[1]), part[2]
        seconds += amount / 1000 if unit == "ms" else amount * _PER_UNIT[unit]
        position = part.end()
    if not text or position < len(text):
        raise ValueError(f"must be {DURATION_FORM}")
    return seconds


def format_seconds(seconds: float) -> str:
    """The shortest exact way to write it; `parse_seconds` gives the same number back."""
    if seconds == int(seconds):
        whole = int(seconds)
        for unit in ("d", "h", "m"):
            if whole and whole % _PER_UNIT[unit] == 0:
                return f"{whole // _PER_UNIT[unit]}{unit}"
        return f"{whole}s"
    millis = round(seconds * 1000)
    return f"{millis}ms" if millis / 1000 == seconds else f"{seconds!r}s"


def span(seconds: float) -> str:
    """For people, rounded: 3.2 ms, 340 ms, 2.1 s, 4 min 5 s, 3 h 20 min, 13 d 4 h."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"


def parse_size(value: object) -> int:
    """Bytes. KiB, MiB, GiB (and K, M, G) are powers of 1024; KB, MB, GB powers of 1000. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and (parts := _SIZE.fullmatch(value.strip())) and parts[2].lower() in _SIZE_UNITS:
        size = float(parts[1]) * _SIZE_UNITS[parts[2].lower()]
        if math.isfinite(size) and size == int(size):
            return int(size)
    raise ValueError(f"must be {SIZE_FORM}")


def format_size(size: int) -> str | int:
    """As `256KiB` where that is exact, else the number of bytes."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return size
