"""Many verdicts as one page."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.chaos.verdict import Verdict
from tests.support.fleet import ROOT

DOCUMENT = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- longest run: begin (python -m tests.chaos --write) -->"
END = "<!-- longest run: end -->"


def report(verdicts: Sequence[Verdict], seconds: float, seed: int) -> str:
    """Faults by kind, how long each took to recover from at most, and the sums."""
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for verdict in verdicts:
        faults.update(verdict.faults)
        outcomes.update(verdict.outcomes)
    resumed = _slowest(verdict.resumed for verdict in verdicts)
    settled = _slowest(verdict.recovery for verdict in verdicts)
    bounds = _slowest(verdict.bounds for verdict in verdicts)
    lines = [f"{'fault':36} {'count':>6}  {'next outcome':>12}  {'its tasks':>9}  {'bound':>6}"]
    for kind, count in sorted(faults.items()):
        row = f"{kind:36} {count:6}  {_span(resumed.get(kind)):>12}  {_span(settled.get(kind)):>9}"
        lines.append(f"{row}  {bounds.get(kind, 0.0):4.0f} s")
    broken = [verdict for verdict in verdicts if not verdict.holds]
    by_scenario = Counter(verdict.scenario for verdict in verdicts)
    least, most = min(by_scenario.values(), default=0), max(by_scenario.values(), default=0)
    lines += [
        "",
        "next outcome: the longest wait, from the end of such a fault, until any task had its outcome",
        "its tasks: the longest until a task that the fault met under way had its own; bound: of that",
        "",
        f"rounds             {len(verdicts)}, of which {len(broken)} broke an invariant (seed {seed})",
        f"scenarios          {len(by_scenario)}, each {least} to {most} times",
        f"faults             {sum(faults.values())}",
        f"tasks              {sum(v.tasks for v in verdicts)}: "
        + ", ".join(f"{count} {name}" for name, count in outcomes.most_common()),
        f"requests           {sum(v.hits for v in verdicts)}",
        f"extra executions   {sum(v.extra for v in verdicts)} of at most {sum(v.extra_bound for v in verdicts)}",
        f"lost               {sum(v.lost for v in verdicts)}",
        f"second outcomes    {sum(v.second for v in verdicts)}",
        f"in the sync window {sum(v.in_window for v in verdicts)} (appendfsync everysec, kill -9 of the server)",
        f"time               {seconds:.0f} s, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, {_server()}",
    ]
    lines += [f"broken: {verdict.scenario}, seed {verdict.seed}: {verdict.violations[0][1]}" for verdict in broken]
    return "\n".join(lines)


def write(text: str) -> None:
    """Between the markers in docs/reliability.md."""
    page = DOCUMENT.read_text()
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{DOCUMENT}: no place for the report; it needs {BEGIN!r} and {END!r}")
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n```\n{text}\n```\n\n{END}{after}")


def _slowest(each: Iterable[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for times in each:
        for kind, took in times.items():
            found[kind] = max(found.get(kind, 0.0), took)
    return found


def _span(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _server() -> str:
    return "redis-server" if os.environ.get("HEADRACE_TEST_SERVER") == "redis" else "the bundled Valkey"
