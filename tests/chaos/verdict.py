"""What the checker found, and how it is shown."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

NAMES = {
    "A": "every acknowledged task has an outcome, ok its own answer", "B": "no outcome changed, none came twice",
    "C": "one lease a task",
    "D": "extra executions only where faults met tasks", "E": "attempts, delays, deadlines", "F": "recovery in time",
    "G": "nothing left behind", "H": "counters equal a scan", "I": "processes live on",
}  # fmt: skip


@dataclass
class Verdict:
    """What was found. `violations`: invariant and sentence."""

    scenario: str
    seed: int
    tasks: int = 0
    hits: int = 0
    extra: int = 0
    extra_bound: int = 0
    lost: int = 0
    second: int = 0
    in_window: int = 0  # acknowledged enqueues that a killed server lost inside its documented window
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    recovery: dict[str, float] = field(default_factory=dict)  # by fault: the slowest of its tasks to settle
    resumed: dict[str, float] = field(default_factory=dict)  # and the longest wait for the next outcome of any task
    bounds: dict[str, float] = field(default_factory=dict)
    violations: list[tuple[str, str]] = field(default_factory=list)

    @property
    def injected(self) -> int:
        return sum(self.faults.values())

    @property
    def holds(self) -> bool:
        return not self.violations

    def against(self, invariant: str, what: str) -> None:
        self.violations.append((invariant, what))


def table(verdict: Verdict) -> str:
    """The invariants, one a line; the first violations of each."""
    found: dict[str, list[str]] = defaultdict(list)
    for invariant, what in verdict.violations:
        found[invariant].append(what)
    rows = []
    for letter, name in NAMES.items():
        broken = found.get(letter, [])
        rows.append(f"  {letter} {'ok  ' if not broken else 'FAIL'} {name}{f' ({len(broken)})' if broken else ''}")
        rows += [f"         {what}" for what in broken[:5]]
    return "\n".join(rows)
