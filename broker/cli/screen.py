"""What people see: tables, numbers with units, progress. Text of users is escaped."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol, TextIO

from broker import durations
from broker.cli.tally import Tally
from broker.logs import escape

PLAIN_EVERY_S: Final = 5.0


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], stream: TextIO | None = None) -> None:
    """Numbers to the right. A rich table on a terminal, aligned text elsewhere."""
    out = stream or sys.stdout
    cells = [[escape(_cell(value)) for value in row] for row in rows]
    numeric = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(headers))]
    if out.isatty():
        _print_rich(headers, cells, numeric, out)
        return
    widths = [max(len(row[i]) for row in [headers, *cells]) for i in range(len(headers))]
    for row in [list(headers), *cells]:
        placed = zip(row, widths, numeric, strict=True)
        line = "  ".join(f"{text:>{width}}" if right else f"{text:<{width}}" for text, width, right in placed)
        out.write(line.rstrip() + "\n")


def _print_rich(headers: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool], out: TextIO) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header, right in zip(headers, numeric, strict=True):
        table.add_column(header, justify="right" if right else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    Console(file=out).print(table)


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _is_number(value: object) -> bool:
    """Numbers, and what `seconds` and `share` make of them."""
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and value[:1].isdigit())


def span(seconds: float | None) -> str:
    """A duration for people, `-` for none."""
    return "-" if seconds is None else durations.span(seconds)


def counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def print_tally(tally: Tally, wall: float, out: TextIO) -> None:
    """The table at the end of a run, and its totals in one line each."""
    rows = [
        (name, served, f"{share:.1%}", failures, span(p50), span(p95))
        for name, served, share, failures, p50, p95 in tally.rows()
    ]
    if rows:
        print_table(("endpoint", "served", "share", "failures", "p50", "p95"), rows, out)
    parts = [f"{tally.answered} answered", f"{tally.failed} failed", *_not_sent(tally)]
    if tally.earlier:
        parts.append(f"{tally.earlier} done earlier")
    if tally.earlier_failed:
        parts.append(f"of those {tally.earlier_failed} failed")
    rate = f" ({(tally.answered + tally.failed) / wall:.0f}/s)" if wall > 0.05 and tally.answered else ""
    out.write(f"{', '.join(parts)}\n")
    letters = counted(tally.dead, "dead letter")
    out.write(f"{counted(tally.retries, 'retry', 'retries')}, {letters}, {span(wall)}{rate}\n")
    out.flush()


class Progress(Protocol):
    def update(self, tally: Tally, total: int | None) -> None: ...
    def close(self) -> None: ...


def progress(stream: TextIO) -> Progress:
    """A bar on a terminal, a line each five seconds elsewhere."""
    return BarProgress(stream) if stream.isatty() else PlainProgress(stream)


class PlainProgress:
    def __init__(self, stream: TextIO, every: float = PLAIN_EVERY_S) -> None:
        self._stream, self._every = stream, every
        self._began = self._said = time.monotonic()

    def update(self, tally: Tally, total: int | None) -> None:
        now = time.monotonic()
        if now - self._said < self._every:
            return
        self._said = now
        of = f" of {total}" if total else ""
        rate = tally.written / (now - self._began)
        self._stream.write(f"{tally.settled}{of} done, {rate:.0f}/s{_troubles(tally)}\n")
        self._stream.flush()

    def close(self) -> None:
        return


class BarProgress:
    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn(),
            console=Console(file=stream), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, rate="")
        self._began = time.monotonic()
        self._bar.start()

    def update(self, tally: Tally, total: int | None) -> None:
        rate = tally.written / max(time.monotonic() - self._began, 0.001)
        self._bar.update(self._task, completed=tally.settled, total=total, rate=f"{rate:.0f}/s{_troubles(tally)}")

    def close(self) -> None:
        self._bar.stop()


def _troubles(tally: Tally) -> str:
    found = [counted(tally.retries, "retry", "retries")] if tally.retries else []
    if tally.failed:
        found.append(f"{tally.failed} failed")
    return "".join(f", {each}" for each in (*found, *_not_sent(tally)))


def _not_sent(tally: Tally) -> list[str]:
    """Lines that became no task, in the words of the progress and of the end alike."""
    found = [counted(tally.bad, "bad line")] if tally.bad else []
    return [*found, f"{tally.changed} changed and not sent"] if tally.changed else found
