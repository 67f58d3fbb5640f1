"""The dead letters: list them, send them back, throw them away. In batches, so that none holds Redis for long.

A dead letter is a task whose outcome is `dead` or `poison`; it stands in RQ's failed registry until it expires.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from broker.core import discard
from broker.errors import InvalidTask
from broker.fields import as_count, as_date, as_text
from broker.flows import Call, Flow, Plain, drive, in_batches
from broker.inspect import Plainly
from broker.keys import Keys
from broker.scripts import BATCH, Scripts
from broker.task import check_pool, check_task_id
from broker.taskview import Attempt, failed_by_stock, read_history, reason_of, stock_failures

if TYPE_CHECKING:
    from broker.store import Store

MOST_SCANNED: Final = 10_000  # entries looked at for one page
_NAMES: Final = ("status", "x_out", "x_why", "exc_info", "x_try", "ended_at", "x_hist", "description", "x_ep")


@dataclass(frozen=True, slots=True)
class DeadLetter(Plainly):
    """One line of the list. `endpoint` is that of the last attempt; `ended_at` in Unix seconds."""

    id: str
    outcome: str
    reason: str
    attempts: int
    endpoint: str
    ended_at: float | None
    description: str


@dataclass(frozen=True, slots=True)
class Page(Plainly):
    """Newest first. `cursor` continues the list; None at its end."""

    letters: tuple[DeadLetter, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class Filter:
    """What a dead letter must match: `reason` and `endpoint` are parts of the text, upper and lower case alike.

    `outcome` is 'dead', 'poison' or "" for both.
    """

    reason: str = ""
    endpoint: str = ""
    outcome: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in ("", "dead", "poison"):
            raise InvalidTask(f"outcome {self.outcome!r}: must be 'dead' or 'poison'")

    def matches(self, letter: DeadLetter) -> bool:
        return (
            self.reason.casefold() in letter.reason.casefold()
            and self.endpoint.casefold() in letter.endpoint.casefold()
            and self.outcome in ("", letter.outcome)
        )


ALL: Final = Filter()


@dataclass(frozen=True, slots=True)
class Redriven(Plainly):
    """How many went back to the queue; wait or run already; are done (outcome ok); are not in this pool."""

    queued: int = 0
    unsettled: int = 0
    done: int = 0
    unknown: int = 0

    def plus(self, words: Sequence[str]) -> Redriven:
        return Redriven(
            self.queued + words.count("queued"),
            self.unsettled + words.count("unsettled"),
            self.done + words.count("done"),
            self.unknown + words.count("unknown"),
        )


# Doors


def dead_list(store: Store, pool: str, limit: int = 100, *, match: Filter = ALL, cursor: str | None = None) -> Page:
    """At most `limit` dead letters. A shorter page may still have a cursor: a filter looks at so many at a time."""
    return drive(store, page(store.keys, check_pool(pool), limit, match, cursor))


def dead_count(store: Store, pool: str, match: Filter = ALL) -> int:
    """How many match."""
    return sum(len(letters) for letters in _pages(store, check_pool(pool), match))


def redrive(store: Store, pool: str, ids: Iterable[str] | None = None, *, match: Filter = ALL) -> Redriven:
    """Puts dead letters back on the queue, attempts, exclusions and deadline cleared; in batches of 100.

    ids    also canceled and expired tasks may be named; None: every dead letter that matches
    """
    total = Redriven()
    for batch in _chosen(store, check_pool(pool), ids, match):
        total = total.plus(drive(store, _redrive(store.scripts, pool, batch)))
    return total


def purge(store: Store, pool: str, ids: Iterable[str] | None = None, *, match: Filter = ALL) -> int:
    """Deletes dead letters for good; returns how many.

    ids    any task of the pool that has an outcome may be named; None: every dead letter that matches
    """
    chosen = _chosen(store, check_pool(pool), ids, match)
    return sum(drive(store, discard(store.scripts, pool, batch)) for batch in chosen)


def _chosen(store: Store, pool: str, ids: Iterable[str] | None, match: Filter) -> Iterator[Sequence[str]]:
    if ids is not None:
        yield from in_batches([check_task_id(task_id) for task_id in ids])
        return
    for letters in _pages(store, pool, match):
        yield [letter.id for letter in letters]


def _pages(store: Store, pool: str, match: Filter) -> Iterator[tuple[DeadLetter, ...]]:
    """From the newest down: what fails again meanwhile comes in above and is not met twice."""
    cursor: str | None = None
    while True:
        found = drive(store, page(store.keys, pool, BATCH, match, cursor))
        if found.letters:
            yield found.letters
        cursor = found.cursor
        if cursor is None:
            return


# Flows


def page(keys: Keys, pool: str, limit: int, match: Filter, cursor: str | None) -> Flow[Page]:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_SCANNED:
        raise InvalidTask(f"limit {limit!r}: must be a whole number from 1 to {MOST_SCANNED}")
    found: list[DeadLetter] = []
    looked = 0
    while len(found) < limit and looked < MOST_SCANNED:
        entries = yield from _entries(keys, pool, cursor)
        if not entries:
            return Page(tuple(found), None)
        rows = yield Plain([("HMGET", keys.job(task_id), *_NAMES) for _, task_id in entries])
        read = [_row(values) for values in rows]
        silent = [task_id for (_, task_id), row in zip(entries, read, strict=True) if failed_by_stock(row)]
        told = (yield from stock_failures(keys, silent)) if silent else {}
        for (score, task_id), row in zip(entries, read, strict=True):
            looked += 1
            cursor = f"{score}/{task_id}"
            letter = _letter(task_id, row)
            if letter is not None and task_id in told:
                reason, ended_at = told[task_id]
                letter = replace(letter, reason=reason, ended_at=ended_at)
            if letter is not None and match.matches(letter):
                found.append(letter)
                if len(found) == limit:
                    break
    return Page(tuple(found), cursor)


def _entries(keys: Keys, pool: str, cursor: str | None) -> Flow[list[tuple[str, str]]]:
    """The next entries (score, id) below the cursor. Many may share a score: a batch died in one call."""
    key = keys.registry("failed", pool)
    score, last = _place(cursor)
    offset = 0
    while True:
        (members,) = yield Plain([("ZRANGE", key, score, "-inf", "BYSCORE", "REV", "LIMIT", offset, BATCH)])
        names = [as_text(member) for member in members]
        scores = yield Plain([("ZSCORE", key, name) for name in names])
        pairs = [(repr(float(found)), name) for found, name in zip(scores, names, strict=True) if found is not None]
        fresh = [pair for pair in pairs if not last or pair[0] != score or pair[1] < last]
        if fresh or len(names) < BATCH:
            return fresh
        offset += BATCH


def _place(cursor: str | None) -> tuple[str, str]:
    """Score and id that a cursor stands for. Raises InvalidTask."""
    score, _, last = (cursor or "inf/").partition("/")
    try:
        return repr(float(score)), last
    except ValueError:
        raise InvalidTask(f"cursor {cursor!r}: take it from an earlier page") from None


def _row(values: Sequence[bytes | None]) -> dict[str, str]:
    return {name: as_text(value) for name, value in zip(_NAMES, values, strict=True) if value is not None}


def _letter(task_id: str, row: Mapping[str, str]) -> DeadLetter | None:
    """None for an entry whose task is gone or was redriven."""
    outcome = row.get("x_out") or ("dead" if row.get("status") == "failed" else "")
    if outcome not in ("dead", "poison"):
        return None
    history: tuple[Attempt, ...] = read_history(row.get("x_hist", ""))
    return DeadLetter(
        id=task_id,
        outcome=outcome,
        reason=reason_of(row),
        attempts=as_count(row.get("x_try")),
        endpoint=history[-1].endpoint if history else row.get("x_ep", ""),
        ended_at=as_date(row.get("ended_at")),
        description=row.get("description", ""),
    )


def _redrive(scripts: Scripts, pool: str, ids: Sequence[str]) -> Flow[list[str]]:
    (words,) = yield Call([scripts.redrive(pool, ids)])
    found: list[str] = words
    return found
