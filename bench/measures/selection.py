"""What the choice of endpoints costs in Redis: the time of the claim script, from SLOWLOG, for 9 and 100 endpoints."""

from __future__ import annotations

from typing import Any

from bench.lab import Lab, quantile
from bench.report import Goal, Section, number
from broker.scripts import Finish, NewTask, Offer
from broker.store import Store

POOL = "selection"
PROCESSES = 4
SLOTS = 8


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


def claims(lab: Lab, endpoints: int, rounds: int, most: int) -> list[float]:
    """The endpoints spread over four processes, as the plan does it; every claim has to weigh them all."""
    lab.server.clear()
    store = Store(lab.server.url)
    names = [f"e{i}" for i in range(endpoints)]
    scripts = store.scripts
    store.run(scripts.register(POOL, {"max_depth": 1_000_000}, [(name, 5, SLOTS, True, ()) for name in names]))
    store.pipelined([("CONFIG", "SET", "slowlog-log-slower-than", 0), ("CONFIG", "SET", "slowlog-max-len", 1_000_000)])
    times: list[float] = []
    sha = scripts.claim(POOL, "p", [], lease=30, most=1).script.sha
    done, last = 0, -1
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
    store.pipelined([("CONFIG", "SET", "slowlog-log-slower-than", 10_000)])
    store.close()
    return times


def measure(lab: Lab) -> Section:
    section = Section("selection", "Time of a claim in Redis, ms", ("endpoints", "tasks a claim", "p50", "p99"))
    for endpoints, limit in ((9, 1.0), (100, 2.0)):
        for most in (1, 32):
            times = claims(lab, endpoints, lab.options.pick(200, 2000), most)
            p50, p99 = quantile(times, 0.5), quantile(times, 0.99)
            section.add(str(endpoints), str(most), number(p50), number(p99))
            if most == 1:
                what = f"choice among {endpoints} endpoints, p99"
                section.goals.append(Goal(what, p99, limit, at_least=False, unit="ms"))
    section.notes.append("from SLOWLOG: the server's own time for the whole claim script, of tasks of 90 bytes")
    return section
