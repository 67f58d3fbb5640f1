"""Many verdicts as one page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.chaos.checker import Verdict


def report(verdicts: Sequence[Verdict], seconds: float, seed: int) -> str:
    """Faults by kind with the slowest recovery of each, and the sums."""
    faults: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    bounds: dict[str, float] = {}
    outcomes: Counter[str] = Counter()
    for verdict in verdicts:
        faults.update(verdict.faults)
        outcomes.update(verdict.outcomes)
        for kind, took in verdict.recovery.items():
            slowest[kind] = max(slowest.get(kind, 0.0), took)
        for kind, bound in verdict.bounds.items():
            bounds[kind] = max(bounds.get(kind, 0.0), bound)
    lines = [f"{'fault':36} {'count':>6}  {'slowest recovery':>16}  {'bound':>6}"]
    for kind, count in sorted(faults.items()):
        shown = f"{slowest[kind]:.1f} s" if kind in slowest else "-"
        lines.append(f"{kind:36} {count:6}  {shown:>16}  {bounds[kind]:4.0f} s")
    broken = [verdict for verdict in verdicts if not verdict.holds]
    lines += [
        "",
        f"rounds             {len(verdicts)}, of which {len(broken)} broke an invariant (seed {seed})",
        f"faults             {sum(faults.values())}",
        f"tasks              {sum(v.tasks for v in verdicts)}: "
        + ", ".join(f"{count} {name}" for name, count in outcomes.most_common()),
        f"requests           {sum(v.hits for v in verdicts)}",
        f"extra executions   {sum(v.extra for v in verdicts)} of at most {sum(v.extra_bound for v in verdicts)}",
        f"lost               {sum(v.lost for v in verdicts)}",
        f"second outcomes    {sum(v.second for v in verdicts)}",
        f"in the sync window {sum(v.in_window for v in verdicts)} (appendfsync everysec, kill -9 of the server)",
        f"time               {seconds:.0f} s",
    ]
    lines += [f"broken: {verdict.scenario}, seed {verdict.seed}: {verdict.violations[0][1]}" for verdict in broken]
    return "\n".join(lines)
