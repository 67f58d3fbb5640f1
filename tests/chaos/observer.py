"""What the harness sees of Redis, over a socket that no proxy stands before: leases, outcomes, what is left."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from broker.errors import BrokerError
from broker.outcome import attempts_of, decode_answer
from broker.store import Store
from tests.chaos.history import History

T = TypeVar("T")

LOOK_S = 0.1
PATIENCE_S = 60.0
FIELDS = (
    "status", "x_out", "ended_at", "x_ans", "x_try", "x_fence", "x_done", "x_del", "x_max", "x_hist", "x_dl",
    "started_at",
)  # fmt: skip
LEASES = """
local held = {}
for _, endpoint in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  for _, id in ipairs(redis.call('ZRANGE', ARGV[1] .. endpoint, 0, -1)) do
    local key = ARGV[2] .. id
    local lease = redis.call('TYPE', key).ok == 'hash' and redis.call('HGET', key, 'x_lease') or ''
    held[#held + 1] = {endpoint, id, lease or ''}
  end
end
return held
"""


def text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else "" if value is None else str(value)


def digest(outcome: Any, end: Any, answer: Any) -> str:
    whole = b"|".join([text(outcome).encode(), text(end).encode(), answer or b""])
    return hashlib.sha1(whole, usedforsecurity=False).hexdigest()[:16]


def said(body: bytes) -> str | None:
    """The text in a completion; None where there is none."""
    try:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    except (ValueError, LookupError, TypeError):
        return None


class Observer:
    """`watch` tasks; `start` looks at them all the time; `finish` writes how everything ended."""

    def __init__(self, url: str, pool: str, history: History, max_attempts: int) -> None:
        self.store, self.pool, self.history = Store(url), pool, history
        self._max_attempts = max_attempts
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self.every: set[str] = set()
        self.destroyed: set[str] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="observer", daemon=True)
        self.settled_at = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def watch(self, tasks: Sequence[str]) -> None:
        with self._lock:
            self._open.update(set(tasks) - self.destroyed)
            self.every.update(tasks)

    def forget(self, task: str) -> None:
        """It was destroyed on purpose."""
        with self._lock:
            self._open.discard(task)
            self.every.discard(task)
            self.destroyed.add(task)

    def forget_missing(self, keep: Sequence[str]) -> None:
        """No longer wait for tasks that are not there, except these."""
        tasks = [task for task in self.open_tasks() if task not in keep]
        there = self.patient(lambda: self.store.pipelined([("EXISTS", self.store.keys.job(task)) for task in tasks]))
        with self._lock:
            self._open -= {task for task, exists in zip(tasks, there, strict=True) if not exists}

    @property
    def waiting(self) -> int:
        """Tasks that were seen without an outcome when last looked at."""
        with self._lock:
            return len(self._open)

    def open_tasks(self) -> list[str]:
        with self._lock:
            return sorted(self._open)

    def unsettled(self) -> bool:
        """Whether a task that exists has no outcome yet."""
        tasks = self.open_tasks()
        if not tasks:
            return False
        try:
            return any(self.store.pipelined([("EXISTS", self.store.keys.job(task)) for task in tasks]))
        except BrokerError:
            return True

    def statuses(self) -> Counter[str]:
        """How many of all tasks have which status."""
        tasks = sorted(self.every)
        commands = [("HGET", self.store.keys.job(task), "status") for task in tasks]
        found = self.patient(lambda: self.store.pipelined(commands))
        return Counter(text(status) for status in found)

    def patient(self, use: Callable[[], T], patience: float = PATIENCE_S) -> T:
        """Again while the server is away or busy."""
        end = time.monotonic() + patience
        while True:
            try:
                return use()
            except BrokerError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def leases(self) -> dict[str, list[list[str]]]:
        """{endpoint: [[task, token], ...]}, all of one instant."""
        keys = self.store.keys
        args = (keys.slots(self.pool, ""), keys.job(""))
        rows = self.store.raw(lambda client: client.eval(LEASES, 1, keys.endpoints(self.pool), *args))
        held: dict[str, list[list[str]]] = {}
        for endpoint, task, token in rows:
            held.setdefault(text(endpoint), []).append([text(task), text(token)])
        return held

    def in_flight(self) -> list[str]:
        return [task for held in self.patient(self.leases).values() for task, _ in held]

    def held_by(self, pid: int) -> list[str]:
        """Tasks whose lease a process has: its name stands in the token."""
        mark = f"-{pid}-"
        return [task for held in self.patient(self.leases).values() for task, token in held if mark in token]

    # In the thread

    def _look(self) -> None:
        while not self._end.wait(LOOK_S):
            try:
                self.history.write("leases", held=self.leases())
                self._outcomes(self.open_tasks())
            except BrokerError:
                continue

    def _outcomes(self, tasks: Sequence[str]) -> None:
        for at in range(0, len(tasks), 500):
            some = tasks[at : at + 500]
            for task, values in zip(some, self._read(some), strict=True):
                status, outcome, end, answer = values[:4]
                if outcome is None:
                    continue
                self.history.write(
                    "outcome", task=task, status=text(status), outcome=text(outcome), end=_unix(end),
                    digest=digest(outcome, end, answer),
                )  # fmt: skip
                with self._lock:
                    self._open.discard(task)
                self.settled_at = time.monotonic()

    def _read(self, tasks: Sequence[str]) -> list[list[Any]]:
        keys = self.store.keys
        commands = [("HMGET", keys.job(task), *FIELDS) for task in tasks]
        try:
            return self.store.pipelined(commands)
        except BrokerError as error:
            if "WRONGTYPE" not in str(error):
                raise
            return [self._one(command) for command in commands]

    def _one(self, command: tuple[Any, ...]) -> list[Any]:
        try:
            return list(self.store.pipelined([command])[0])
        except BrokerError as error:
            if "WRONGTYPE" not in str(error):
                raise
            return [b"damaged", *[None] * (len(FIELDS) - 1)]

    # At the end

    def finish(self, reply: str) -> None:
        """Everything once more, and what is left."""
        tasks = sorted(self.every)
        for at in range(0, len(tasks), 500):
            some = tasks[at : at + 500]
            for task, values in zip(some, self.patient(lambda ids=some: self._read(ids)), strict=True):  # type: ignore[misc]
                self._final(task, values)
        for entry in self.patient(lambda: self.store.raw(lambda c: c.lrange(self.store.keys.reply(reply), 0, -1))):
            self.history.write("reply", task=text(entry))
        self._counters()
        self._rest()

    def _final(self, task: str, values: Sequence[Any]) -> None:
        status, outcome, end, answer, tries, fence, done, lost, most, hist, deadline, began = values
        _, endpoint, headers, body = decode_answer(answer)
        retries, failures = [], 0
        for line in text(hist).splitlines():
            attempt = json.loads(line)
            failures += "attempt" in attempt
            if attempt.get("retry_in") is not None:
                retries.append([attempt["ended"], attempt["ended"] + attempt["retry_in"]])
        self.history.write(
            "final", task=task, status=text(status) or None, outcome=text(outcome) or None,
            digest=digest(outcome, end, answer), end=_unix(end), attempts=attempts_of(outcome, tries),
            claims=_int(fence) or _int(text(done).partition(".")[0]), lost=_int(lost),
            max=_int(most) or self._max_attempts, retries=retries, deadline=_int(deadline) / 1000, failures=failures,
            times=[_unix(began), _unix(end)], said=said(body), endpoint=endpoint or None,
            to=headers.get("x-request-id"),
        )  # fmt: skip

    def _counters(self) -> None:
        keys = self.store.keys
        pool = self.store.raw(lambda client: client.hgetall(keys.pool(self.pool)))
        numbers = {text(name): int(value) for name, value in pool.items() if text(name).startswith("n_")}
        served = failed = 0
        for endpoint in self.store.raw(lambda client: client.smembers(keys.endpoints(self.pool))):
            key = keys.endpoint(self.pool, text(endpoint))
            row = self.store.pipelined([("HMGET", key, "served", "failed")])[0]
            served, failed = served + _int(row[0]), failed + _int(row[1])
        self.history.write("counters", pool=numbers, served=served, failed=failed)

    def rest(self) -> dict[str, int]:
        keys = self.store.keys
        lists = [keys.queue(self.pool)]
        for variant in self.store.raw(lambda client: client.smembers(keys.lists(self.pool))):
            lists.append(keys.queue(self.pool, text(variant)))
        sizes = self.store.pipelined(
            [("ZCARD", keys.registry(name, self.pool)) for name in ("wip", "scheduled")]
            + [("HLEN", keys.waiting(self.pool))]
            + [("LLEN", key) for key in lists]
        )
        slots = sum(len(held) for held in self.leases().values())
        return {"slots": slots, "wip": sizes[0], "scheduled": sizes[1], "waiting": sizes[2], "listed": sum(sizes[3:])}

    def _rest(self) -> None:
        self.history.write("rest", **self.rest())
        found = []
        for key in self.store.raw(lambda client: list(client.scan_iter(count=1000))):
            kind, ttl = self.store.pipelined([("TYPE", key), ("TTL", key)])
            name = text(key)
            if ttl == -1 or not name.startswith("rq:job:"):
                found.append([name, text(kind), int(ttl)])
        self.history.write("keys", found=[row for row in found if row[2] == -1])


def _unix(value: Any) -> float:
    """RQ's text for a moment; 0.0 for none."""
    try:
        return datetime.fromisoformat(text(value)).timestamp()
    except ValueError:
        return 0.0


def _int(value: Any) -> int:
    try:
        return int(value or 0)
    except ValueError:
        return 0
