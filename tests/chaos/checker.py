"""Reads a history and says whether the invariants held. Knows the lines in `history`, nothing of the product.

A every acknowledged task has exactly one outcome      B an outcome never changes
C one live lease a task                                 D tasks run again at most where a fault met them under way
E attempts, delays and deadlines are kept               F what a fault met is settled in time
G nothing is left behind: leases, keys without TTL      H counters equal a full scan at rest
I processes that nobody killed still live
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]

OUTCOMES = ("ok", "dead", "expired", "poison", "canceled")
NAMES = {
    "A": "every acknowledged task has an outcome", "B": "no outcome changed, none came twice", "C": "one lease a task",
    "D": "extra executions only where faults met tasks", "E": "attempts, delays, deadlines", "F": "recovery in time",
    "G": "nothing left behind", "H": "counters equal a scan", "I": "processes live on",
}  # fmt: skip
# "Not now", and a kept connection that ends with no answer: the latter is sent once more, as part of the same attempt.
UNANSWERED = ("429", "reset", "close")
DUE_SLACK_S = 0.05  # two clocks' rounding
DEADLINE_SLACK_S = 0.25  # a claim just before the deadline is still on its way to the endpoint
PERMANENT = re.compile(r"^rq:(queues|workers(:.+)?|x:(pools|(pool|endpoints|endpoint|registered|waiting):.+))$")
GONE_WHEN_EMPTY = re.compile(r"^rq:(finished|failed|canceled):[^:]+$")


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
    recovery: dict[str, float] = field(default_factory=dict)
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


def check(lines: Iterable[Line]) -> Verdict:
    """The verdict on one round."""
    by_kind: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_kind[line["kind"]].append(line)
    meta = by_kind["meta"][0]
    verdict = Verdict(meta["scenario"], meta["seed"])
    finals = {line["task"]: line for line in by_kind["final"]}
    verdict.tasks, verdict.hits = len(finals), len(by_kind["hit"])
    verdict.outcomes = Counter(line["outcome"] or line["status"] or "gone" for line in finals.values())
    for fault in by_kind["fault"]:
        verdict.faults[fault["fault"]] += fault.get("count", 1)
    damaged = {line["task"] for line in by_kind["damage"]}
    destroyed = {line["task"] for line in by_kind["damage"] if line["what"] == "another type"}
    _acknowledged(verdict, by_kind, finals, meta, destroyed)
    _unchanged(verdict, by_kind, finals, meta)
    _leases(verdict, by_kind["leases"])
    _executions(verdict, by_kind, finals, damaged)
    _limits(verdict, by_kind, finals, damaged)
    _recovery(verdict, by_kind["fault"], finals, meta, damaged)
    _leftovers(verdict, by_kind)
    _counters(verdict, by_kind, finals, bool(damaged))
    _processes(verdict, by_kind)
    return verdict


def _in_window(t: float, faults: Sequence[Line], window: float) -> bool:
    """A killed server may forget what it said in its last moments."""
    return any(fault["fault"] == "server killed" and -0.2 <= fault["t"] - t <= window for fault in faults)


def _acknowledged(
    verdict: Verdict, lines: dict[str, list[Line]], finals: dict[str, Line], meta: Line, destroyed: set[str]
) -> None:
    for ack in lines["ack"]:
        if ack["task"] in destroyed:
            continue
        final = finals.get(ack["task"])
        if final is not None and final["outcome"] in OUTCOMES:
            continue
        if final is not None and final["status"] is None and _in_window(ack["t"], lines["fault"], meta["window"]):
            verdict.in_window += 1
            continue
        verdict.lost += 1
        verdict.against("A", f"task {ack['task']} was acknowledged and is {final and final['status']!r} at the end")
    for task, final in finals.items():
        if final["status"] is not None and final["outcome"] not in OUTCOMES:
            verdict.against("A", f"task {task} exists and is still {final['status']!r}")


def _unchanged(verdict: Verdict, lines: dict[str, list[Line]], finals: dict[str, Line], meta: Line) -> None:
    for seen in lines["outcome"] + lines["answer"]:
        final = finals.get(seen["task"])
        if final is None or (final["outcome"], final["digest"]) == (seen["outcome"], seen["digest"]):
            continue
        if _in_window(seen["t"], lines["fault"], meta["window"]):
            verdict.in_window += 1
            continue
        verdict.second += 1
        verdict.against("B", f"task {seen['task']}: outcome was {seen['outcome']}, is {final['outcome']} at the end")
    for task, times in Counter(line["task"] for line in lines["reply"]).items():
        if times > 1:
            verdict.second += 1
            verdict.against("B", f"task {task} was settled {times} times, by its reply list")


def _leases(verdict: Verdict, samples: Sequence[Line]) -> None:
    fences: dict[str, int] = {}
    for sample in samples:
        holders: dict[str, str] = {}
        for endpoint, held in sample["held"].items():
            for task, token in held:
                if task in holders:
                    verdict.against("C", f"task {task} has a lease on {holders[task]} and one on {endpoint}")
                holders[task] = endpoint
                fence = int(token.split(".")[0]) if token else 0
                if fence and fence < fences.get(task, 0) and not sample.get("reverted"):
                    verdict.against("C", f"task {task}: fence fell from {fences[task]} to {fence}")
                fences[task] = fence or fences.get(task, 0)


def _executions(
    verdict: Verdict, lines: dict[str, list[Line]], finals: dict[str, Line], damaged: set[str]
) -> None:
    met: Counter[str] = Counter()  # how often a fault met a task under way
    for fault in lines["fault"]:
        if fault["reruns"]:
            met.update(fault["in_flight"])
    verdict.extra_bound = sum(met.values())
    hits = Counter(line["task"] for line in lines["hit"] if line["outcome"] not in UNANSWERED)
    for task, count in hits.items():
        final = finals.get(task)
        if final is None or final["status"] is None or task in damaged:
            continue
        extra = count - final["attempts"]
        if extra <= 0:
            continue
        verdict.extra += extra
        if extra > met[task]:
            verdict.against("D", f"task {task} ran {extra} times too often; faults met it {met[task]} times")


def _limits(verdict: Verdict, lines: dict[str, list[Line]], finals: dict[str, Line], damaged: set[str]) -> None:
    by_task: dict[str, list[Line]] = defaultdict(list)
    for hit in lines["hit"]:
        by_task[hit["task"]].append(hit)
    for task, final in finals.items():
        if final["status"] is None or task in damaged:
            continue
        if final["attempts"] > final["max"]:
            verdict.against("E", f"task {task} had {final['attempts']} attempts of {final['max']}")
        starts = sorted(hit["began"] for hit in by_task[task])
        for ended, due in final["retries"]:
            early = [began for began in starts if ended + DUE_SLACK_S < began < due - DUE_SLACK_S]
            if early:
                verdict.against("E", f"task {task} ran {due - early[0]:.3f} s before its retry was due")
        deadline = final["deadline"]
        if deadline and starts and starts[-1] > deadline + DEADLINE_SLACK_S:
            verdict.against("E", f"task {task} ran {starts[-1] - deadline:.3f} s after its deadline")


def _recovery(
    verdict: Verdict, faults: Sequence[Line], finals: dict[str, Line], meta: Line, damaged: set[str]
) -> None:
    last: dict[str, float] = {}  # from the last fault that met a task on
    for fault in faults:
        for task in fault["in_flight"]:
            last[task] = max(last.get(task, 0.0), fault["until"])
    for fault in faults:
        name: str = fault["fault"]
        bound = float(fault.get("bound") or meta["recovery"])
        verdict.bounds[name] = bound
        for task in fault["in_flight"]:
            final = finals.get(task)
            if final is None or not final["end"] or fault["until"] < last[task]:
                continue
            took = max(0.0, final["end"] - fault["until"])
            verdict.recovery[name] = max(verdict.recovery.get(name, 0.0), took)
            if took > bound and task not in damaged:
                verdict.against("F", f"task {task}: outcome {took:.1f} s after {name!r} was over (bound {bound:.0f} s)")


def _leftovers(verdict: Verdict, lines: dict[str, list[Line]]) -> None:
    for rest in lines["rest"]:
        for what in ("slots", "wip", "scheduled", "listed"):
            if rest[what]:
                verdict.against("G", f"{rest[what]} entries are left in {what}")
    by_rq = any("RQ" in fault["fault"] for fault in lines["fault"])  # its reader wrote them; scrub is there in a minute
    for sample in lines["keys"]:
        for name, kind, ttl in sample["found"]:
            if by_rq and name.startswith("rq:results:"):
                continue
            if ttl == -1 and not PERMANENT.match(name) and not GONE_WHEN_EMPTY.match(name):
                verdict.against("G", f"key {name} ({kind}) has no TTL and is not on the list")


def _counters(verdict: Verdict, lines: dict[str, list[Line]], finals: dict[str, Line], damaged: bool) -> None:
    if damaged or verdict.in_window:
        return
    seen = Counter(final["outcome"] for final in finals.values() if final["outcome"])
    there = sum(1 for final in finals.values() if final["status"] is not None)
    for line in lines["counters"]:
        pool = line["pool"]
        for outcome in OUTCOMES:
            if pool.get(f"n_{outcome}", 0) != seen[outcome]:
                verdict.against("H", f"n_{outcome} is {pool.get(f'n_{outcome}', 0)}; a scan finds {seen[outcome]}")
        if pool.get("n_enqueued", 0) != there:
            verdict.against("H", f"n_enqueued is {pool.get('n_enqueued', 0)}; a scan finds {there}")
        if line["served"] != seen["ok"]:
            verdict.against("H", f"endpoints served {line['served']}; a scan finds {seen['ok']} ok")


def _processes(verdict: Verdict, lines: dict[str, list[Line]]) -> None:
    start: set[int] = set()
    end: set[int] = set()
    for line in lines["processes"]:
        (start if line["moment"] == "start" else end).update(line["pids"])
    killed = {fault["pid"] for fault in lines["fault"] if fault.get("pid")}
    for pid in start - killed - end:
        verdict.against("I", f"process {pid} ended, and nobody killed it")
    if not end and lines["processes"]:
        verdict.against("I", "no process is left")


def read(path: Path) -> Iterable[Line]:
    with path.open(encoding="utf-8") as file:
        for text in file:
            yield json.loads(text)


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


def main(arguments: Sequence[str]) -> int:
    bad = 0
    for name in arguments:
        verdict = check(read(Path(name)))
        print(f"{name}: {verdict.scenario}, seed {verdict.seed}: {verdict.tasks} tasks, {verdict.hits} hits")
        print(table(verdict))
        bad += not verdict.holds
    return 1 if bad or not arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
