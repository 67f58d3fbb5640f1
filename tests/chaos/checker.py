"""Reads a history and says whether the invariants held. Knows the lines in `history`, nothing of the product.

A every acknowledged task has exactly one outcome, and if it is ok its own answer
B an outcome never changes
C one live lease a task                                 D tasks run again at most where a fault met them under way
E attempts, delays and deadlines are kept               F what a fault met is settled in time
G nothing is left behind: leases, keys without TTL      H counters equal a full scan at rest
I processes that nobody killed still live
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.chaos.verdict import Verdict, table

Line = dict[str, Any]

OUTCOMES = ("ok", "dead", "expired", "poison", "canceled")
WELL = "200"
NOT_NOW = "429"  # no attempt: the task goes back
UNANSWERED = ("reset", "close")  # a kept connection that ends so is replaced once within the attempt
PAUSE_S = 1.0  # an endpoint that said 429 rests so long
TIMES_SLACK_S = 5.0  # a settle may wait so long for its server; a clock that is wrong is so by minutes
DUE_SLACK_S = 0.05  # two clocks' rounding
DEADLINE_SLACK_S = 0.25  # a claim just before the deadline is still on its way to the endpoint
PERMANENT = re.compile(r"^rq:(queues|workers(:.+)?|x:(pools|(pool|endpoints|endpoint|registered|waiting):.+))$")
FORGETFUL = ("server killed", "primary killed", "failover by order", "failover by itself")
GONE_WHEN_EMPTY = re.compile(r"^rq:(finished|failed|canceled):[^:]+$")


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
    damage = {line["task"]: line["what"] for line in by_kind["damage"]}
    destroyed = {task for task, what in damage.items() if what == "another type"}
    _acknowledged(verdict, by_kind, finals, meta, destroyed)
    _answers(verdict, by_kind, finals)
    _unchanged(verdict, by_kind, finals, meta)
    _leases(verdict, by_kind["leases"], by_kind["fault"], meta)
    _executions(verdict, by_kind, finals, damage, meta)
    _pauses(verdict, by_kind["hit"], meta)
    _limits(verdict, by_kind, finals, damage)
    _times(verdict, by_kind, finals)
    faults = _in_rows(by_kind["fault"])
    _recovery(verdict, faults, finals, meta)
    _resumption(verdict, faults, finals)
    _unowned(verdict, by_kind, finals, meta.get("unowned", 0.0))
    _leftovers(verdict, by_kind)
    _counters(verdict, by_kind, finals, len(destroyed))
    _processes(verdict, by_kind)
    if meta.get("all_ok"):
        _all_ok(verdict, finals)
    return verdict


def _in_window(t: float, faults: Sequence[Line], window: float) -> bool:
    """A killed server may forget what it said in its last moments, one that is replaced what it said until then."""
    return any(
        fault["t"] - window <= t <= fault.get("lost_until", fault["t"] + 0.2)
        for fault in faults
        if fault["fault"] in FORGETFUL
    )


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
    for wanted in lines["expect"]:
        final = finals.get(wanted["task"], {})
        for name in ("outcome", "lost"):
            if final.get(name) != wanted[name]:
                verdict.against("A", f"task {wanted['task']}: {name} is {final.get(name)}, not {wanted[name]}")


def _answers(verdict: Verdict, lines: dict[str, list[Line]], finals: dict[str, Line]) -> None:
    """What is ok was sent, and answered well before it was settled; its answer is the one to its own question."""
    asked = {ack["task"]: ack["asked"] for ack in lines["ack"]}
    well: dict[tuple[str, str], float] = {}  # by task and endpoint: when first
    for hit in lines["hit"]:
        if hit["outcome"] == WELL:
            at = (hit["task"], hit["endpoint"])
            well[at] = min(well.get(at, hit["ended"]), hit["ended"])
    for task, final in finals.items():
        ok, endpoint = final["outcome"] == "ok", final["endpoint"]
        if ok and well.get((task, endpoint), math.inf) > final["end"] + DUE_SLACK_S:
            verdict.against("A", f"task {task} is ok, but {endpoint} had not answered it well by then")
        foreign = final["to"] != task and (ok or final["to"] is not None)
        if foreign or (ok and task in asked and final["said"] != _answer_to(asked[task])):
            verdict.lost += 1
            verdict.against("A", f"task {task}: its answer is one to {final['to']}, and says {final['said']!r}")


def _answer_to(prompt: str) -> str:
    """The simulated endpoint's, see there."""
    return f"{hashlib.sha256(prompt.encode()).hexdigest()[:16]} {prompt[:60]}"


def _all_ok(verdict: Verdict, finals: dict[str, Line]) -> None:
    for task, final in finals.items():
        if (final["outcome"], final["attempts"]) != ("ok", 1):
            outcome, attempts = final["outcome"], final["attempts"]
            verdict.against("A", f"task {task}: {outcome} after {attempts} attempts; nothing failed it")


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


def _leases(verdict: Verdict, samples: Sequence[Line], faults: Sequence[Line], meta: Line) -> None:
    fences: dict[str, int] = {}
    seen: dict[str, float] = {}
    for sample in samples:
        holders: dict[str, str] = {}
        for endpoint, held in sample["held"].items():
            for task, token in held:
                if task in holders:
                    verdict.against("C", f"task {task} has a lease on {holders[task]} and one on {endpoint}")
                holders[task] = endpoint
                fence = int(token.split(".")[0]) if token else 0
                fell = 0 < fence < fences.get(task, 0)
                if fell and not _in_window(seen[task], faults, meta["window"]):
                    verdict.against("C", f"task {task}: fence fell from {fences[task]} to {fence}")
                fences[task], seen[task] = fence or fences.get(task, 0), sample["t"]


def _executions(
    verdict: Verdict, lines: dict[str, list[Line]], finals: dict[str, Line], damage: dict[str, str], meta: Line
) -> None:
    met: Counter[str] = Counter()  # how often a fault met a task under way
    for fault in lines["fault"]:
        if fault["reruns"]:
            met.update(set(fault["in_flight"]) | _forgotten(fault, lines, meta["window"]))
    verdict.extra_bound = sum(met.values())
    hits: Counter[str] = Counter()
    resent: dict[str, set[int]] = defaultdict(set)  # attempts that were sent once more within themselves
    for line in lines["hit"]:
        if line["outcome"] != NOT_NOW:
            hits[line["task"]] += 1
        if line["outcome"] in UNANSWERED:
            resent[line["task"]].add(line["attempt"])
    for task, count in hits.items():
        final = finals.get(task)
        if final is None or final["status"] is None or damage.get(task) == "bad numbers":  # its count was overwritten
            continue
        extra = count - final["attempts"] - len(resent[task])
        if extra <= 0:
            continue
        verdict.extra += extra
        if extra > met[task]:
            verdict.against("D", f"task {task} ran {extra} times too often; faults met it {met[task]} times")


def _forgotten(fault: Line, lines: dict[str, list[Line]], window: float) -> set[str]:
    """Tasks that ran where another server took over: what they came to may be lost with the rest of the window."""
    if "lost_until" not in fault:
        return set()
    told = [line for kind in ("ack", "outcome", "leases") for line in lines[kind]]
    told = [line for line in told if _in_window(line["t"], [fault], window)]
    leased = {task for line in told for held in line.get("held", {}).values() for task, _ in held}
    return leased | {line["task"] for line in told if "task" in line}


def _pauses(verdict: Verdict, hits: Sequence[Line], meta: Line) -> None:
    """Who said "not now" is not asked all the time: in a pause's length at most what was under way, twice over."""
    said: dict[str, list[float]] = defaultdict(list)
    for hit in hits:
        if hit["outcome"] == NOT_NOW:
            said[hit["endpoint"]].append(hit["began"])
    most = 2 * int(meta.get("slots", 1))
    for endpoint, times in said.items():
        times.sort()
        for at in range(len(times) - most):
            if times[at + most] - times[at] < PAUSE_S * 0.9:
                verdict.against("E", f"endpoint {endpoint} was asked {most + 1} times in a second in which it said 429")
                break


def _times(verdict: Verdict, lines: dict[str, list[Line]], finals: dict[str, Line]) -> None:
    """What a task says of when it ran lies between when it was first sent and its end, in order."""
    born = {ack["task"]: ack.get("sent", ack["t"]) for ack in lines["ack"]}
    for task, final in finals.items():
        began, ended = final.get("times") or (0.0, 0.0)
        if final["outcome"] != "ok" or task not in born or not began or not ended:
            continue
        moments = (born[task], began, ended, final["end"])
        if any(later < earlier - TIMES_SLACK_S for earlier, later in pairwise(moments)):
            verdict.against("E", f"task {task}: sent, started, ended, settled at {moments}")


def _limits(verdict: Verdict, lines: dict[str, list[Line]], finals: dict[str, Line], damage: dict[str, str]) -> None:
    by_task: dict[str, list[Line]] = defaultdict(list)
    for hit in lines["hit"]:
        by_task[hit["task"]].append(hit)
    for task, final in finals.items():
        if final["status"] is None or damage.get(task) == "bad numbers":
            continue
        counted = final.get("failures", final["attempts"] - 1) + (final["outcome"] == "ok")
        if final["outcome"] in ("ok", "dead") and final["attempts"] != counted:
            verdict.against("E", f"task {task}: {final['attempts']} attempts are counted, its history has {counted}")
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


def _in_rows(faults: Sequence[Line]) -> list[Line]:
    """Faults that kept those away who would recover are over when the last of their name is."""
    over: dict[str, float] = {}
    for fault in faults:
        if fault.get("in_a_row"):
            over[fault["fault"]] = max(over.get(fault["fault"], 0.0), fault["until"])
    return [{**fault, "until": over.get(fault["fault"], fault["until"])} for fault in faults]


def _recovery(verdict: Verdict, faults: Sequence[Line], finals: dict[str, Line], meta: Line) -> None:
    last: dict[str, float] = {}  # from the last fault that met a task on
    for fault in faults:
        for task in fault["in_flight"]:
            last[task] = max(last.get(task, 0.0), fault["until"])
    for fault in faults:
        name: str = fault["fault"]
        bound = float(fault.get("bound") or meta["recovery"])
        verdict.bounds[name] = max(bound, verdict.bounds.get(name, 0.0))
        for task in fault["in_flight"]:
            final = finals.get(task)
            if final is None or not final["end"] or fault["until"] < last[task]:
                continue
            took = max(0.0, final["end"] - fault["until"])
            verdict.recovery[name] = max(verdict.recovery.get(name, 0.0), took)
            if took > bound:
                verdict.against("F", f"task {task}: outcome {took:.1f} s after {name!r} was over (bound {bound:.0f} s)")


def _resumption(verdict: Verdict, faults: Sequence[Line], finals: dict[str, Line]) -> None:
    """How long after each fault the next task of all had its outcome; a fault may say how long that may take."""
    ends = sorted(final["end"] for final in finals.values() if final["end"])
    for fault in faults:
        if not fault.get("count", 1):
            continue
        at = bisect_right(ends, fault["until"])
        took = ends[at] - fault["until"] if at < len(ends) else None
        name: str = fault["fault"]
        if took is not None:
            verdict.resumed[name] = max(verdict.resumed.get(name, 0.0), took)
        if "resume" in fault and (took is None or took > fault["resume"]):
            verdict.against("F", f"the next outcome came {took} s after {name!r} (bound {fault['resume']:.0f} s)")


def _unowned(verdict: Verdict, lines: dict[str, list[Line]], finals: dict[str, Line], bound: float) -> None:
    """From its acknowledgement to its outcome a task is never long without a lease, as far as samples show."""
    if not bound:
        return
    owned: dict[str, float] = {ack["task"]: ack["t"] for ack in lines["ack"]}
    for sample in lines["leases"]:
        for task in [task for held in sample["held"].values() for task, _ in held]:
            gap = sample["t"] - owned.get(task, sample["t"])
            if gap > bound:
                verdict.against("F", f"task {task} was {gap:.1f} s without a lease (bound {bound:.0f} s)")
            owned[task] = sample["t"]
    for task, final in finals.items():
        gap = final["end"] - owned.get(task, final["end"])
        if gap > bound:
            verdict.against("F", f"task {task} had no lease in its last {gap:.1f} s (bound {bound:.0f} s)")


def _leftovers(verdict: Verdict, lines: dict[str, list[Line]]) -> None:
    for rest in lines["rest"]:
        for what in ("slots", "wip", "scheduled", "listed"):
            if rest[what]:
                verdict.against("G", f"{rest[what]} entries are left in {what}")
    # RQ's own reader wrote them, for what it took for abandoned; RQ has no TTL for failures' results
    by_rq = {f"rq:results:{task}" for f in lines["fault"] if "RQ" in f["fault"] for task in f["in_flight"]}
    for sample in lines["keys"]:
        for name, kind, ttl in sample["found"]:
            if name in by_rq:
                continue
            if ttl == -1 and not PERMANENT.match(name) and not GONE_WHEN_EMPTY.match(name):
                verdict.against("G", f"key {name} ({kind}) has no TTL and is not on the list")


def _counters(verdict: Verdict, lines: dict[str, list[Line]], finals: dict[str, Line], destroyed: int) -> None:
    """`destroyed` tasks were counted when they came, and have no outcome."""
    if verdict.in_window:
        return
    seen = Counter(final["outcome"] for final in finals.values() if final["outcome"])
    there = sum(1 for final in finals.values() if final["status"] is not None) + destroyed
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
