"""The history of a round: one JSON object a line, each with `kind` and `t` (Unix seconds; one machine, one clock).

meta       scenario, seed, lease, max_attempts, recovery (bound, s), window (s of acknowledged writes a server may
           lose), slots (of an endpoint), unowned (s that a task may be without a lease; 0: any), all_ok
ack        task, word: the server has it. asked: its prompt. sent: when it was first sent, Unix seconds
fault      fault (its name), until (when it was over), in_flight (task ids), reruns (bool: may these run again?), pid,
           count, bound (s, instead of meta's recovery), resume (s until the next outcome of any task),
           lost_until (Unix seconds: what was acknowledged until then may be lost),
           in_a_row (bool: recovery counts from the last of its name, which may have met whoever would recover)
leases     held: {endpoint: [[task, token], ...]}, all of one instant
outcome    task, status, outcome, digest, end: when it was first seen
answer     task, outcome, digest: what a producer was told
reply      task: an entry of a reply list that every settle must write once
hit        task, endpoint, attempt, outcome, began, ended: a request at an endpoint. Its outcome, a status or how it
           failed, is on disk before the first byte of the answer is sent: no kill of an endpoint loses it
expect     task, outcome, lost: how it must end
final      a task at the end: status, outcome, digest, end, attempts, claims, lost, max, deadline, its retries:
           [[ended, due]], failures (attempts in its history), times (started and ended, as RQ reads them); of its
           answer: said (its text), endpoint (who gave it), to (the task it was given to, in the endpoint's own word)
counters   pool: {n_...}, served, failed (sums over endpoints)
processes  pids, moment: start | end
rest       what is left when nothing is under way: slots, wip, scheduled, listed, waiting
keys       found: [[name, type, ttl]]; a ttl of -1 is none
damage     task, what: harmed on purpose by a scenario
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any


class History:
    """Appends, from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "t": round(time.time(), 4), **fields}, separators=(",", ":"))
        with self._lock:
            self._file.write(line + "\n")

    def close(self) -> None:
        with self._lock:
            self._file.close()
