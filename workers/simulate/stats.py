"""What a simulated endpoint saw."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from typing import Any, Final

MAX_TASKS: Final = 500_000  # remembered; the oldest are forgotten


class Stats:
    """Counts of requests for work, and of connections. Requests for health, stats and control are not in them.

    hits             requests that came, `by_task` (Idempotency-Key), `by_path`, `by_status` (or the mode)
    attempts         X-Task-Attempt of every hit of a task, in the order they came
    in_flight        now, `max_in_flight` ever; `open_now` has their task ids
    aborted          the client closed before it had the answer
    connections      open now that carried work, `max_connections` ever, `total_connections`
    sockets          open now, whatever they carried, `max_sockets` ever
    """

    def __init__(self, record: str | None = None) -> None:
        self._record = os.open(record, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644) if record else None
        self.in_flight = self.connections = self.sockets = 0
        self._open: Counter[str] = Counter()
        self.reset()

    def reset(self) -> None:
        """Forget the past; what is open now stays counted."""
        self.hits = self.aborted = 0
        self.attempts: dict[str, list[int]] = {}
        self.by_path: Counter[str] = Counter()
        self.by_status: Counter[str] = Counter()
        self.max_in_flight = self.in_flight
        self.max_connections = self.total_connections = self.connections
        self.max_sockets = self.sockets

    def socket(self, change: int) -> None:
        self.sockets += change
        self.max_sockets = max(self.max_sockets, self.sockets)

    def connection(self, change: int) -> None:
        self.connections += change
        self.total_connections += max(0, change)
        self.max_connections = max(self.max_connections, self.connections)

    def began(self, path: str, task: str, attempt: int) -> float:
        """Returns when: Unix seconds."""
        self.hits += 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        self.by_path[path] += 1
        if task:
            self._open[task] += 1
            self.attempts.setdefault(task, []).append(attempt)
            if len(self.attempts) > MAX_TASKS:
                del self.attempts[next(iter(self.attempts))]
        return time.time()

    def ended(self, path: str, task: str, attempt: int, outcome: str, began: float) -> None:
        """`outcome`: a status, a mode, or 'aborted'; `began`: what `began` returned."""
        self.in_flight -= 1
        if outcome == "aborted":
            self.aborted += 1
        else:
            self.by_status[outcome] += 1
        if task:
            self._open[task] -= 1
            if self._open[task] <= 0:
                del self._open[task]
        if self._record is not None:
            said = {"path": path, "task": task, "attempt": attempt, "outcome": outcome}
            line = {"began": began, "t": time.time(), **said}
            os.write(self._record, json.dumps(line).encode() + b"\n")

    def report(self) -> dict[str, Any]:
        return {
            "hits": self.hits,
            "in_flight": self.in_flight,
            "max_in_flight": self.max_in_flight,
            "aborted": self.aborted,
            "connections": self.connections,
            "max_connections": self.max_connections,
            "total_connections": self.total_connections,
            "sockets": self.sockets,
            "max_sockets": self.max_sockets,
            "by_status": dict(self.by_status),
            "by_path": dict(self.by_path),
            "open_now": list(self._open),
            "by_task": {task: len(attempts) for task, attempts in self.attempts.items()},
            "attempts": self.attempts,
        }
