"""The checker on histories with one thing wrong each: it must see it, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.checker import Line, check

KILLED = {"fault": "process killed", "until": 102.0, "in_flight": ["b"], "reruns": True, "pid": 7}
WELL = {"attempt": 1, "outcome": "200", "ended": 104.0}
SAID = {"a": "918496be75a439fc prompt of a", "b": "0f0261b2964306aa prompt of b"}  # as the simulated endpoint answers


def history() -> list[Line]:
    """Two tasks; b ran twice, because a fault met it."""
    lines: list[Line] = [
        {"kind": "meta", "t": 100.0, "scenario": "x", "seed": 1, "lease": 2.0, "recovery": 20.0, "window": 0.0,
         "slots": 4},
        {"kind": "processes", "t": 100.0, "moment": "start", "pids": [7, 8]},
        {"kind": "leases", "t": 101.0, "held": {"e0": [["a", "1.0.p-7-x"]], "e1": [["b", "1.0.p-7-x"]]}},
        {"kind": "fault", "t": 102.0, **KILLED},
    ]
    for task, outcome in (("a", "ok"), ("b", "ok")):
        settled = {"task": task, "outcome": outcome, "digest": f"d{task}", "end": 105.0}
        rest = {"attempts": 1, "claims": 1, "lost": 0, "max": 3, "retries": [], "deadline": 0.0,
                "failures": 0, "times": [101.0, 104.9], "endpoint": "e0", "to": task, "said": SAID[task]}
        lines += [
            {"kind": "ack", "t": 100.5, "task": task, "word": "queued", "asked": f"prompt of {task}"},
            {"kind": "hit", "t": 107.5, "task": task, "endpoint": "e0", **WELL, "began": 101.0},
            {"kind": "outcome", "t": 105.0, "status": "finished", **settled},
            {"kind": "reply", "t": 106.0, "task": task},
            {"kind": "final", "t": 107.0, "status": "finished", **settled, **rest},
        ]
    return [
        *lines,
        {"kind": "hit", "t": 107.5, "task": "b", "endpoint": "e1", **WELL, "began": 103.0},
        *(
            {"kind": "hit", "t": 107.5, "task": "b", "endpoint": "e2", **WELL, "outcome": "429", "began": began}
            for began in (102.0, 102.1, 102.2)
        ),
        {"kind": "expect", "t": 104.0, "task": "b", "outcome": "ok", "lost": 0},
        {"kind": "counters", "t": 108.0, "pool": {"n_ok": 2, "n_enqueued": 2}, "served": 2, "failed": 0},
        {"kind": "rest", "t": 108.0, "slots": 0, "wip": 0, "scheduled": 0, "listed": 0, "waiting": 1},
        {"kind": "keys", "t": 108.0, "found": [["rq:x:pool:llm", "hash", -1], ["rq:finished:llm", "zset", -1]]},
        {"kind": "processes", "t": 108.0, "moment": "end", "pids": [8, 9]},
    ]


def find(lines: list[Line], kind: str, **wanted: Any) -> Line:
    return next(
        line for line in lines if line["kind"] == kind and all(line[name] == value for name, value in wanted.items())
    )


def test_a_good_history_holds() -> None:
    verdict = check(history())
    assert verdict.violations == []
    assert (verdict.tasks, verdict.hits, verdict.extra, verdict.extra_bound) == (2, 6, 1, 1)
    assert verdict.recovery == {"process killed": 3.0}
    assert verdict.resumed == {"process killed": 3.0}


CHANGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "A lost": ("final", {"task": "a"}, {"status": "queued", "outcome": None}),
    "A gone": ("final", {"task": "a"}, {"status": None, "outcome": None}),
    "A answered after its outcome": ("hit", {"task": "a"}, {"ended": 105.5}),
    "A never answered well": ("hit", {"task": "a"}, {"outcome": "503"}),
    "A answered by another endpoint": ("final", {"task": "a"}, {"endpoint": "e1"}),
    "A of nobody's answer": ("final", {"task": "a"}, {"endpoint": None}),
    "A another's body": ("final", {"task": "a"}, {"said": SAID["b"]}),
    "A half its body": ("final", {"task": "a"}, {"said": SAID["a"][:-1]}),
    "A no body": ("final", {"task": "a"}, {"said": None}),
    "A another's head": ("final", {"task": "a"}, {"to": "b"}),
    "A no head": ("final", {"task": "a"}, {"to": None}),
    "B changed": ("outcome", {"task": "a"}, {"digest": "other"}),
    "B told twice": ("reply", {"task": "a"}, {"task": "b"}),
    "C two leases": ("leases", {}, {"held": {"e0": [["a", "1.0.p"]], "e1": [["a", "2.0.q"]]}}),
    "D ran again": ("hit", {"endpoint": "e1"}, {"task": "a"}),
    "E attempts": ("final", {"task": "a"}, {"attempts": 4}),
    "E early": ("final", {"task": "b"}, {"retries": [[102.0, 103.9]]}),
    "E late": ("final", {"task": "b"}, {"deadline": 102.0}),
    "A other than expected": ("expect", {}, {"outcome": "poison"}),
    "E count": ("final", {"task": "a"}, {"failures": 1}),
    "E asked in a pause": ("meta", {}, {"slots": 1}),
    "E time": ("final", {"task": "a"}, {"times": [-500.0, 104.9]}),
    "F slow": ("fault", {}, {"until": 80.0}),
    "F not resumed": ("fault", {}, {"until": 106.0, "resume": 5.0}),
    "F unowned": ("meta", {}, {"unowned": 0.1}),
    "G slot": ("rest", {}, {"slots": 1}),
    "G key": ("keys", {}, {"found": [["rq:x:bell:p", "list", -1]]}),
    "H counter": ("counters", {}, {"pool": {"n_ok": 3, "n_enqueued": 2}}),
    "I died": ("processes", {"moment": "end"}, {"pids": [9]}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_sees(name: str) -> None:
    kind, wanted, change = CHANGES[name]
    lines = history()
    find(lines, kind, **wanted).update(change)
    assert name[0] in {invariant for invariant, _ in check(lines).violations}


@pytest.mark.parametrize("whose", [["a"], ["b"], ["a", "b"]])
def test_it_sees_that_a_task_which_is_ok_was_never_sent(whose: list[str]) -> None:
    lines = [line for line in history() if line["kind"] != "hit" or line["task"] not in whose]
    found = check(lines).violations
    assert [invariant for invariant, _ in found] == ["A"] * len(whose)
    assert all("had not answered" in what for _, what in found)


def test_answers_that_were_mixed_up_are_lost_each() -> None:
    lines = history()
    for task, other in ("ab", "ba"):
        find(lines, "final", task=task).update(to=other, said=SAID[other])
    verdict = check(lines)
    assert (verdict.lost, [invariant for invariant, _ in verdict.violations]) == (2, ["A", "A"])


def test_the_answer_to_a_failure_is_its_own_too() -> None:
    lines = history()
    final = find(lines, "final", task="a")
    for line in (final, find(lines, "outcome", task="a")):
        line.update(outcome="dead", status="failed")
    find(lines, "counters").update(pool={"n_ok": 1, "n_dead": 1, "n_enqueued": 2}, served=1)
    final.update(failures=1, to=None, said=None, endpoint=None)
    assert check(lines).violations == []
    final.update(to="b")
    assert {invariant for invariant, _ in check(lines).violations} == {"A"}


def test_a_request_may_be_sent_once_more_within_its_attempt_and_no_more() -> None:
    lines = history()
    again: Line = {**find(lines, "hit", task="a"), "outcome": "reset"}
    assert check([*lines, again]).violations == []
    assert {invariant for invariant, _ in check([*lines, again, again]).violations} == {"D"}


def test_faults_in_a_row_count_from_the_last_of_them() -> None:
    lines = history()
    find(lines, "fault").update(until=80.0, in_a_row=True)
    later: Line = {"kind": "fault", "t": 90.0, **KILLED, "until": 90.0, "in_flight": [], "in_a_row": True}
    assert check([*lines, later]).recovery == {"process killed": 15.0}


def test_where_nothing_may_fail_a_second_attempt_is_a_violation() -> None:
    lines = history()
    find(lines, "meta")["all_ok"] = True
    assert check(lines).violations == []
    find(lines, "final", task="a").update(attempts=2, failures=1)
    assert {invariant for invariant, _ in check(lines).violations} == {"A"}


def test_a_killed_server_may_lose_its_last_moments_and_no_more() -> None:
    lines = history()
    find(lines, "meta")["window"] = 2.0
    find(lines, "fault").update(fault="server killed", t=102.0)
    find(lines, "final", task="a").update(status=None, outcome=None, digest="", end=0.0)
    lines.remove(find(lines, "outcome", task="a"))
    verdict = check(lines)
    assert (verdict.lost, verdict.in_window) == (0, 1)
    find(lines, "ack", task="a")["t"] = 99.0
    assert check(lines).lost == 1


def test_a_failover_may_lose_what_was_acknowledged_until_the_new_primary_was_known_and_no_more() -> None:
    lines = history()
    find(lines, "meta")["window"] = 1.0
    find(lines, "fault").update(fault="failover by order", t=102.0, lost_until=106.0)
    find(lines, "outcome", task="a")["digest"] = "lost"
    find(lines, "hit", endpoint="e1")["task"] = "a"
    verdict = check(lines)
    assert verdict.violations == []
    assert (verdict.in_window, verdict.extra) == (1, 1)
    lines.append({**find(lines, "fault"), "fault": "failover by itself", "t": 104.5})
    assert check(lines).violations == [], "each failover has a window of its own"
    lines.pop()
    find(lines, "leases")["t"] = 100.5
    find(lines, "fault")["lost_until"] = 104.0
    assert {invariant for invariant, _ in check(lines).violations} == {"B", "D"}
