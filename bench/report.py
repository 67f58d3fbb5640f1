"""Tables, for the screen and for docs/performance.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

BEGIN = "<!-- measured: begin (python -m bench --write) -->"
END = "<!-- measured: end -->"
HEAD = "# Performance\n\nWhat limits each row, and what was tried, stands below the measured part.\n"


@dataclass(frozen=True)
class Goal:
    """One line of the first table: what was reached, and what is wanted (`at_least`, or else at most)."""

    what: str
    value: float
    wanted: float
    at_least: bool = True
    unit: str = ""
    detail: str = ""

    @property
    def word(self) -> str:
        if math.isnan(self.value):
            return "not measured"
        return "yes" if (self.value >= self.wanted if self.at_least else self.value <= self.wanted) else "MISSED"

    def cells(self) -> list[str]:
        sign = ">=" if self.at_least else "<="
        wanted = f"{sign} {number(self.wanted, self.unit)}"
        return [self.what, number(self.value, self.unit), wanted, self.word, self.detail]


@dataclass
class Section:
    """One measurement: its table, its goals, and notes on how to read it."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[list[str]] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        self.rows.append(list(cells))


def number(value: float, unit: str = "") -> str:
    """Three digits that matter; `-` for nothing. A ratio has the unit x."""
    if math.isnan(value):
        return "-"
    if value == 0:
        text = "0"
    elif abs(value) >= 100:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if not unit else f"{text}{unit}" if unit in ("x", "%") else f"{text} {unit}"


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool) -> str:
    widths = [max(len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        return f"| {' | '.join(padded)} |" if markdown else "  ".join(padded).rstrip()

    rule = line(["-" * width for width in widths])
    return "\n".join([line(columns), rule, *(line(row) for row in rows)])


def render(sections: Sequence[Section], about: Sequence[str], *, markdown: bool) -> str:
    """Everything: the goals first, then each table."""
    mark = "## " if markdown else ""
    parts = ["\n".join(f"- {line}" if markdown else line for line in about)]
    goals = [goal.cells() for section in sections for goal in section.goals]
    if goals:
        parts.append(f"{mark}Goals")
        parts.append(grid(("what", "measured", "goal", "reached", "how"), goals, markdown=markdown))
    for section in sections:
        parts.append(f"{mark}{section.title}")
        if section.rows:
            parts.append(grid(section.columns, section.rows, markdown=markdown))
        if section.notes:
            parts.append("\n".join(section.notes))
    return "\n\n".join(parts) + "\n"


def write(file: Path, text: str) -> None:
    """Replaces the measured part and keeps what people wrote around it."""
    old = file.read_text() if file.exists() else f"{HEAD}\n{BEGIN}\n{END}\n"
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        before, after = f"{HEAD}\n", f"\n{old.removeprefix(HEAD)}"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")
