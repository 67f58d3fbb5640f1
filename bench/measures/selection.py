"""What the choice of endpoints costs in Redis: the time of the claim script, from SLOWLOG, for 9 and 100 endpoints.

SLOWLOG has wall time, so nothing else is to run on the server's core: only the client that claims, on the other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.lab import Lab, median, quantile
from bench.processes import here
from bench.report import Goal, Section, number
from broker.scripts import Finish, NewTask, Offer
from broker.store import Store

POOL = "selection"
PROCESSES = 4
SLOTS = 8
LIMITS_MS = {9: 1.0, 100: 2.0}  # by endpoints, for the p99 of a claim of one task


def _tasks(first: int, count: int) -> list[NewTask]:
    data = b'["workers.jobs.request",null,[],{"method":"POST","path":"/v1/chat/completions","json":{}}]'
    return [NewTask(f"s{first + i}", data, "0", "POST /v1/chat/completions") for i in range(count)]


def _claim_ms(store: Store, sha: str, since: int) -> tuple[list[float], int]:
    """Milliseconds of each claim in SLOWLOG after entry `since`, and the last entry's number."""
    entries: list[Any] = store.pipelined([("SLOWLOG", "GET", -1)])[0]
    parsed = [entry if isinstance(entry, dict) else {"id": entry[0], "duration": entry[2], "command": entry[3]}
              for entry in entries]  # fmt: skip
    new = [entry for entry in parsed if entry["id"] > since]
    wanted = sha.encode()
    found = [entry["duration"] / 1000 for entry in new if wanted in _words(entry["command"])]
    return found, max((entry["id"] for entry in parsed), default=since)


def _words(command: Any) -> list[bytes]:
    return command.split() if isinstance(command, bytes) else list(command)


def claims(lab: Lab, endpoints: int, rounds: int, most: int) -> tuple[float, float]:
    """p50 and p99, ms.

    The endpoints spread over four processes, as the plan does it; every claim has to weigh them all.
    """
    lab.server.clear()
    store = Store(lab.server.url)
    names = [f"e{i}" for i in range(endpoints)]
    scripts = store.scripts
    store.run(scripts.register(POOL, {"max_depth": 1_000_000}, [(name, 5, SLOTS, True, ()) for name in names]))
    store.pipelined([("CONFIG", "SET", "slowlog-log-slower-than", 0), ("CONFIG", "SET", "slowlog-max-len", 1_000_000)])
    times: list[float] = []
    sha = scripts.claim(POOL, "p", [], lease=30, most=1).script.sha
    done, last = 0, -1
    try:
        for turn in range(rounds):
            store.run(scripts.enqueue(POOL, _tasks(done, most)))
            done += most
            process = f"p{turn % PROCESSES}"
            offers = [Offer(name, SLOTS, 0) for name in names[turn % PROCESSES :: PROCESSES]]
            taken = store.run(scripts.claim(POOL, process, offers, lease=30, most=most)).tasks
            items = [Finish(task.lease, "{}", b"{}") for task in taken]
            if items:
                store.run(scripts.finish(POOL, items, result_ttl=60))
            if turn % 100 == 99:
                found, last = _claim_ms(store, sha, last)
                times += found
                store.pipelined([("SLOWLOG", "RESET")])
    finally:
        store.pipelined([("CONFIG", "SET", "slowlog-log-slower-than", 10_000)])
        store.close()
    return quantile(times, 0.5), quantile(times, 0.99)


def measure(lab: Lab) -> Section:
    section = Section("selection", "Time of a claim in Redis, ms", ("endpoints", "tasks a claim", "p50", "p99"))
    count = {1: lab.options.pick(100, 1000), 32: lab.options.pick(100, 400)}  # claims in one round
    cases = [(endpoints, most) for endpoints in LIMITS_MS for most in count]
    with here("worker"):
        found = lab.rounds(*(partial(claims, lab, endpoints, count[most], most) for endpoints, most in cases))
    for (endpoints, most), rounds in zip(cases, found, strict=True):
        p50, p99 = (median([each[at] for each in rounds]) for at in (0, 1))
        section.add(str(endpoints), str(most), number(p50), number(p99))
        if most == 1:
            what = f"choice among {endpoints} endpoints, p99"
            section.goals.append(Goal(what, p99, LIMITS_MS[endpoints], at_least=False, unit="ms"))
    section.notes.append(
        f"From SLOWLOG, which is wall time: the server is alone on its core, one client claims from the other. The "
        f"whole claim script, of tasks of 90 bytes; {count[1]:,} claims of one task a round, {count[32]:,} of 32."
    )
    return section
