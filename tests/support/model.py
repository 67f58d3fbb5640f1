"""What every verb must do, in plain Python: tasks, leases, endpoints, breakers, delays, deadlines.

A Model and Redis are given the same calls at the same time and must give the same answers and hold the same state.
`render` writes the model's state in the form `snapshot.read` gives to what Redis holds. Who gets which task is decided by
`reference.py`. Times are integer milliseconds by the server's clock; verbs take what the wrappers in
`broker/scripts.py` take.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.scripts import (
    Claimed,
    Claims,
    DeadLetter,
    Enqueued,
    Finish,
    Lease,
    NewTask,
    Offer,
    Reaped,
    Release,
    Retry,
)
from tests.support.reference import Endpoint, Pool, Variant, announce, claim

DAY = 86_400_000
LATE = "expired: its deadline passed while it waited"


def ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def score(due: int) -> float:
    """RQ's registries hold Unix seconds."""
    return float(f"{due / 1000:.3f}")


@dataclass
class Task:
    id: str
    digest: str
    priority: str
    requires: tuple[str, ...]
    born: int
    at: int
    deadline: int
    max_attempts: int
    reply: str
    idem: str
    status: str = "queued"
    attempts: int = 0
    lost: int = 0
    fence: int = 0
    lease: str = ""
    endpoint: str = ""
    run: int = 0
    done: str = ""
    excluded: tuple[str, ...] = ()
    outcome: str = ""
    why: str = ""
    ended: int = 0
    answer: str = ""
    body: bytes = b""
    history: str = ""

    @property
    def variant(self) -> Variant:
        return Variant(self.priority, self.requires, self.excluded)


@dataclass
class Policies:
    max_depth: int = 100_000
    spill_after: int = 100
    failures: int = 5
    cooldown: int = 60_000
    cooldown_max: int = 600_000
    half_open_successes: int = 1
    result_ttl: int = DAY
    slow_start: int = 0
    check_after: int = 0


@dataclass
class Model:
    policies: Policies = field(default_factory=Policies)
    now: int = 0
    pool: Pool = field(default_factory=Pool)
    tasks: dict[str, Task] = field(default_factory=dict)
    scheduled: dict[str, int] = field(default_factory=dict)
    deadlines: dict[str, int] = field(default_factory=dict)
    wip: dict[str, int] = field(default_factory=dict)
    registries: dict[str, dict[str, int]] = field(
        default_factory=lambda: {"finished": {}, "failed": {}, "canceled": {}}
    )
    idem: dict[str, tuple[str, str]] = field(default_factory=dict)
    replies: dict[str, list[str]] = field(default_factory=dict)
    bells: dict[str, list[str]] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    events: list[str] = field(default_factory=list)

    # -- pieces that several verbs share

    def _ring(self, rung: Sequence[str]) -> None:
        for process in rung:
            self.bells.setdefault(process, []).insert(0, "work")

    def _announce(self) -> None:
        self._ring(announce(self.pool, self.now))

    def _make_ready(self, task: Task, front: bool = False) -> None:
        task.status = "queued"
        if not front:
            task.at = self.now
        self.pool.at[task.id] = task.at
        self.pool.push(task.variant, task.id, front)

    def _schedule(self, task: Task, due: int) -> None:
        task.status = "scheduled"
        self.scheduled[task.id] = due

    def _promote_due(self) -> int:
        due = sorted((at, task_id) for task_id, at in self.scheduled.items() if at <= self.now)[:100]
        for _, task_id in due:
            del self.scheduled[task_id]
            self._make_ready(self.tasks[task_id])
        return len(due)

    def _conclude(self, task: Task, outcome: str, status: str, ttl: int, why: str = "") -> None:
        self.deadlines.pop(task.id, None)
        task.status, task.outcome, task.ended = status, outcome, self.now
        task.lease, task.endpoint, task.run = "", "", 0
        task.why = why or task.why
        registry = {"ok": "finished", "dead": "failed", "poison": "failed", "canceled": "canceled"}.get(outcome)
        if registry:
            self.registries[registry][task.id] = self.now + ttl
        if task.reply:
            self.replies.setdefault(task.reply, []).append(task.id)
        self.counters[f"n_{outcome}"] += 1

    def _free_slot(self, lease: Lease) -> None:
        if lease.endpoint in self.pool.endpoints:
            self.pool.endpoints[lease.endpoint].slots.pop(lease.id, None)
        self.wip.pop(f"{lease.id}:{lease.token}", None)

    def _fence(self, lease: Lease) -> str:
        task = self.tasks.get(lease.id)
        if task is None:
            return "lost"
        if task.lease == lease.token and task.status in ("started", "canceled"):
            return "held" if task.status == "started" else "canceled"
        return "already" if task.done == lease.token else "lost"

    def _settle(self, lease: Lease) -> str:
        """The word; what is held or canceled has left its slot."""
        word = self._fence(lease)
        if word in ("held", "canceled"):
            task = self.tasks[lease.id]
            self._free_slot(lease)
            task.done, task.lease, task.endpoint = lease.token, "", ""
            if word == "held":
                task.run = 0
        return word

    def _expire(self, task: Task, ttl: int) -> None:
        self._conclude(task, "expired", "failed", ttl, LATE)

    # -- the breaker

    def _open(self, endpoint: Endpoint, again: bool) -> None:
        cooldown = self.policies.cooldown
        if again:
            cooldown = min((endpoint.cooldown or cooldown) * 2, self.policies.cooldown_max)
        endpoint.state, endpoint.opens, endpoint.cooldown, endpoint.good = "open", self.now + cooldown, cooldown, 0
        endpoint.ramp, endpoint.ramp_ok = None, 0
        endpoint.epoch += 1
        self.events.append(f"opened {endpoint.id} {cooldown}")

    def _close(self, endpoint: Endpoint) -> None:
        endpoint.state, endpoint.fails, endpoint.good, endpoint.opens = "closed", 0, 0, 0
        endpoint.cooldown, endpoint.probe = 0, ""
        self._recover(endpoint)
        endpoint.epoch += 1
        self.events.append(f"closed {endpoint.id}")

    def _recover(self, endpoint: Endpoint) -> None:
        if self.policies.slow_start:
            endpoint.ramp, endpoint.ramp_ok = 1, 0

    def _ramp_up(self, endpoint: Endpoint) -> None:
        """One slot, then twice as many each time as many attempts as that have succeeded."""
        if endpoint.ramp is None:
            return
        endpoint.ramp_ok += 1
        while endpoint.ramp_ok >= endpoint.ramp and endpoint.ramp < endpoint.cap:
            endpoint.ramp, endpoint.ramp_ok = endpoint.ramp * 2, endpoint.ramp_ok - endpoint.ramp
        if endpoint.ramp >= endpoint.cap:
            endpoint.ramp, endpoint.ramp_ok = None, 0

    def _breaker(self, lease: Lease, verdict: str) -> None:
        endpoint = self.pool.endpoints.get(lease.endpoint)
        epoch = int(lease.token.split(".")[1])
        if endpoint is None or verdict == "ignore" or endpoint.state == "open" or endpoint.epoch != epoch:
            return
        if verdict == "good":
            if endpoint.state == "closed":
                endpoint.fails = 0
                self._ramp_up(endpoint)
                return
            endpoint.good += 1
            if endpoint.good >= self.policies.half_open_successes:
                self._close(endpoint)
            return
        endpoint.fails += 1
        if endpoint.state == "half_open":
            self._open(endpoint, again=True)
        elif verdict == "open" or endpoint.fails >= self.policies.failures:
            self._open(endpoint, again=False)

    def _attempted(self, lease: Lease, verdict: str, served: bool) -> None:
        endpoint = self.pool.endpoints.get(lease.endpoint)
        if endpoint is not None:
            endpoint.served += served
            endpoint.failed += not served
        self._breaker(lease, verdict)

    def _pause(self, lease: Lease, pause: float) -> None:
        endpoint = self.pool.endpoints.get(lease.endpoint)
        if endpoint is not None and pause > 0:
            endpoint.pause = max(endpoint.pause, self.now + ms(pause))

    # -- verbs

    def register(self, endpoints: Sequence[tuple[str, int, int, bool, tuple[str, ...]]]) -> set[str]:
        for name, priority, cap, on, capabilities in endpoints:
            endpoint = self.pool.endpoints.setdefault(name, Endpoint(name))
            endpoint.priority, endpoint.cap, endpoint.on, endpoint.gone = priority, cap, on, False
            endpoint.capabilities, endpoint.seen = frozenset(capabilities), self.now
        gone = set(self.pool.endpoints) - {name for name, *_ in endpoints}
        for name in gone:
            self.pool.endpoints[name].on, self.pool.endpoints[name].gone = False, True
            self._forget_if_free(name)
        self._announce()
        return gone

    def _forget_if_free(self, name: str) -> None:
        if self.pool.endpoints[name].gone and not self.pool.endpoints[name].slots:
            del self.pool.endpoints[name]

    def _earlier(self, new: NewTask) -> tuple[str, str] | None:
        found = self.idem.get(new.idempotency_key) if new.idempotency_key else None
        if found is None and new.id in self.tasks:
            found = (new.id, self.tasks[new.id].digest)
        if found is None:
            return None
        return ("already" if found[1] == new.digest else "conflict"), found[0]

    def enqueue(self, news: Sequence[NewTask], max_depth: int) -> list[Enqueued]:
        depth = sum(map(len, self.pool.lists.values())) + len(self.scheduled)
        room = (max_depth or self.policies.max_depth) - depth
        replies, queued, pushed = [], 0, False
        for new in news:
            word, known = self._earlier(new) or ("queued" if room > 0 else "full", new.id)
            replies.append(Enqueued(word, known))
            if word != "queued":
                continue
            room -= 1
            queued += 1
            deadline = self.now + ms(new.deadline) if new.deadline else 0
            task = Task(
                new.id, new.digest, new.priority, new.requires, self.now, self.now, deadline, new.max_attempts,
                new.reply, new.idempotency_key,
            )  # fmt: skip
            self.tasks[task.id] = task
            if task.idem:
                self.idem[task.idem] = (task.id, task.digest)
            if deadline:
                self.deadlines[task.id] = deadline
            if new.delay:
                self._schedule(task, self.now + ms(new.delay))
            else:
                self._make_ready(task)
                pushed = True
        self.counters["n_enqueued"] += queued
        if pushed:
            self._announce()
        return replies

    def claim(self, process: str, offers: Sequence[Offer], lease: int, most: int) -> Claims:
        pool = self.pool
        ends = [pool.endpoints[offer.endpoint] for offer in offers if offer.endpoint in pool.endpoints]
        stale = tuple(one.id for one in ends if one.stale(self.now, pool.check_after))
        self.bells[process] = [word for word in self.bells.get(process, []) if word != "work"]
        self._promote_due()
        rooms = {offer.endpoint: offer.room for offer in offers}
        held = {offer.endpoint: offer.held for offer in offers}

        def admit(task_id: str, endpoint: Endpoint) -> bool:
            task = self.tasks[task_id]
            if task.deadline and task.deadline <= self.now:
                self._expire(task, self.policies.result_ttl)
                return False
            self._start(task, endpoint, process, lease)
            return True

        batch = claim(pool, self.now, process, rooms, held, most, admit)
        self._ring(batch.rung)
        wake = self._wake(process, list(rooms), batch.left, len(batch.tasks) >= most, batch.reserved)
        tasks = [self._claimed(self.tasks[task_id]) for task_id, _ in batch.tasks]
        return Claims(None if wake < 0 else wake / 1000, batch.left, tasks, stale if batch.left > 0 else ())

    def _claimed(self, task: Task) -> Claimed:
        lease = Lease(task.id, task.lease, task.endpoint)
        return Claimed(
            lease, task.attempts, task.max_attempts, task.deadline / 1000, task.born / 1000, self.now / 1000, b"{}", False,
            task.lost,
        )  # fmt: skip

    def _start(self, task: Task, endpoint: Endpoint, process: str, lease: int) -> None:
        if endpoint.state != "closed":
            if endpoint.state == "open":
                endpoint.state, endpoint.good = "half_open", 0
                endpoint.epoch += 1
            endpoint.probe = task.id
        task.fence += 1
        task.status, task.endpoint, task.run = "started", endpoint.id, self.now
        task.lease = f"{task.fence}.{endpoint.epoch}.{process}"
        endpoint.slots[task.id] = self.now + lease
        self.wip[f"{task.id}:{task.lease}"] = self.now + lease + 60_000

    def _wake(self, process: str, offered: Sequence[str], left: int, full: bool, reserved: bool) -> int:
        times = [math.ceil(score(min(self.scheduled.values())) * 1000) - self.now] if self.scheduled else []
        if left > 0 and process in self.pool.listeners:
            times += [1] if full else []
            times += [self.pool.spill] if reserved else []
            for endpoint in (self.pool.endpoints[name] for name in offered if name in self.pool.endpoints):
                times += [endpoint.pause - self.now] if endpoint.pause > self.now else []
                if endpoint.state == "open" and endpoint.opens > self.now:
                    times.append(endpoint.opens - self.now)
        return max(1, min(times)) if times else -1

    def renew(self, process: str, endpoints: Sequence[str], leases: Sequence[Lease], lease: int) -> list[str]:
        for name in endpoints:
            if name in self.pool.endpoints:
                self.pool.endpoints[name].seen = self.now
        replies = []
        for held in leases:
            word = self._fence(held)
            if word in ("held", "canceled"):
                self.pool.endpoints[held.endpoint].slots[held.id] = self.now + lease
            if word == "held":
                self.wip[f"{held.id}:{held.token}"] = self.now + lease + 60_000
            replies.append(word)
        return replies

    def finish(self, items: Sequence[Finish], ttl: int) -> list[str]:
        replies, good = [], []
        for item in items:
            word = self._settle(item.lease)
            if word == "held":
                task = self.tasks[item.lease.id]
                task.attempts += 1
                task.answer, task.body = item.answer, item.body
                self._conclude(task, "ok", "finished", ttl)
                endpoint = self.pool.endpoints[item.lease.endpoint]
                endpoint.served += 1
                if endpoint.healthy is not None:
                    endpoint.checked = self.now
                good.append(item.lease)
                word = "done"
            replies.append(word)
        for lease in good:
            self._breaker(lease, "good")
        return replies

    def retry(self, items: Sequence[Retry]) -> list[str]:
        replies, ready = [], False
        for item in items:
            word = self._settle(item.lease)
            if word == "held":
                task = self.tasks[item.lease.id]
                task.attempts += 1
                task.history += item.history + "\n"
                if item.exclude:
                    task.excluded = tuple(sorted({*task.excluded, item.lease.endpoint}))
                if item.delay:
                    self._schedule(task, self.now + ms(item.delay))
                else:
                    self._make_ready(task)
                    ready = True
                self.counters["n_retried"] += 1
                word = "done"
            if word != "already":
                self._attempted(item.lease, item.verdict, served=False)
                self._pause(item.lease, item.pause)
            replies.append(word)
        if ready:
            self._announce()
        return replies

    def release(self, items: Sequence[Release]) -> list[str]:
        replies = []
        for item in reversed(items):  # so that the first comes to stand at the head
            word = self._settle(item.lease)
            if word == "held":
                self._make_ready(self.tasks[item.lease.id], front=True)
                self.counters["n_released"] += 1
                word = "done"
            self._pause(item.lease, item.pause)
            replies.append(word)
        if "done" in replies:
            self._announce()
        return replies[::-1]

    def dead_letter(self, items: Sequence[DeadLetter], dead_ttl: int, result_ttl: int) -> list[str]:
        replies = []
        for item in items:
            word = self._settle(item.lease)
            if word == "held":
                task = self.tasks[item.lease.id]
                task.attempts += 1
                task.history += item.history + "\n"
                task.answer, task.body = item.answer, item.body
                late = item.reason.startswith("expired")
                outcome, ttl = ("expired", result_ttl) if late else ("dead", dead_ttl)
                self._conclude(task, outcome, "failed", ttl, item.reason)
                word = "done"
            if word != "already":
                self._attempted(item.lease, item.verdict, served=item.verdict == "good")
            replies.append(word)
        return replies

    def promote(self) -> int:
        count = self._promote_due()
        if count:
            self._announce()
        return count

    def reap(self, max_deliveries: int, dead_ttl: int) -> Reaped:
        requeued = poisoned = freed = 0
        for name, one in list(self.pool.listeners.items()):
            if self.now - one.spoke > 60_000:
                del self.pool.listeners[name]
        for name, endpoint in list(self.pool.endpoints.items()):
            for task in [self.tasks[task_id] for task_id, expiry in endpoint.slots.items() if expiry <= self.now]:
                del endpoint.slots[task.id]
                self.wip.pop(f"{task.id}:{task.lease}", None)
                if task.status == "canceled":
                    task.lease, task.endpoint = "", ""
                    freed += 1
                elif self._lose(task, max_deliveries, dead_ttl):
                    poisoned += 1
                else:
                    requeued += 1
            self._forget_if_free(name)
        return Reaped(requeued, poisoned, freed)

    def _lose(self, task: Task, max_deliveries: int, dead_ttl: int) -> bool:
        """A lease ended without a settle. True: once too often."""
        task.lost += 1
        task.history += f'{{"endpoint":"{task.endpoint}","kind":"lease_lost","at":{self.now}}}\n'
        if task.lost >= max_deliveries:
            why = f"poison: delivered {task.lost} times and no process lived to settle it"
            self._conclude(task, "poison", "failed", dead_ttl, why)
            return True
        task.lease, task.endpoint, task.run = "", "", 0
        self._schedule(task, self.now + min(30_000, 500 * 2 ** (task.lost - 1)))
        self.counters["n_reaped"] += 1
        return False

    def expire(self, ttl: int) -> int:
        due = sorted((at, task_id) for task_id, at in self.deadlines.items() if at <= self.now)[:100]
        for task in (self.tasks[task_id] for _, task_id in due):
            if task.status == "started":
                self.deadlines[task.id] = self.now + 5000
                continue
            if task.status == "scheduled":
                del self.scheduled[task.id]
            else:
                self.pool.remove(task.variant, task.id)
            self._expire(task, ttl)
        for name, registry in self.registries.items():
            self.registries[name] = {task_id: at for task_id, at in registry.items() if at > self.now}
        return len(due)

    def cancel(self, ids: Sequence[str], ttl: int) -> list[str]:
        return [self._cancel(self.tasks.get(task_id), ttl) for task_id in ids]

    def _cancel(self, task: Task | None, ttl: int) -> str:
        if task is None:
            return "unknown"
        if task.outcome:
            return "settled"
        status, lease, endpoint = task.status, task.lease, task.endpoint
        if status == "queued":
            self.pool.remove(task.variant, task.id)
        self.scheduled.pop(task.id, None)
        self._conclude(task, "canceled", "canceled", ttl, "canceled")
        if status != "started":
            return "canceled"
        task.lease, task.endpoint = lease, endpoint  # its slot stays taken until its process has closed the connection
        self.wip.pop(f"{task.id}:{lease}", None)
        self.bells.setdefault(lease.split(".", 2)[2], []).append(f"cancel {task.id} {lease}")
        return "running"

    def redrive(self, ids: Sequence[str]) -> list[str]:
        replies = []
        for task in map(self.tasks.get, ids):
            if task is None:
                word = "unknown"
            elif task.outcome == "ok":
                word = "done"
            elif not task.outcome or task.lease:
                word = "unsettled"
            else:
                word = "queued"
                self.registries["failed"].pop(task.id, None)
                self.registries["canceled"].pop(task.id, None)
                task.outcome = task.why = task.answer = ""
                task.attempts = task.lost = task.deadline = task.ended = 0
                task.excluded, task.body = (), b""
                self._make_ready(task)
                self.counters["n_redriven"] += 1
            replies.append(word)
        if "queued" in replies:
            self._announce()
        return replies

    def health(self, name: str, ok: bool) -> str:
        endpoint = self.pool.endpoints.get(name)
        if endpoint is None:
            return "unknown"
        was, endpoint.healthy, endpoint.checked = endpoint.healthy, ok, self.now
        if ok:
            if was is False:
                self._recover(endpoint)
            if not was:
                self._announce()
            return "recovered" if was is False else "same"
        return {None: "down", False: "same", True: "failed"}[was]

    def drain(self, name: str, on: bool) -> str:
        if name not in self.pool.endpoints:
            return "unknown"
        self.pool.endpoints[name].drain = on
        self._announce()
        return "done"

    def reset(self, name: str) -> str:
        endpoint = self.pool.endpoints.get(name)
        if endpoint is None:
            return "unknown"
        self._close(endpoint)
        self.events.pop()  # who resets knows
        endpoint.pause, endpoint.healthy, endpoint.checked = 0, None, 0
        endpoint.ramp, endpoint.ramp_ok = None, 0
        self._announce()
        return "done"

    def leave(self, process: str) -> None:
        self.pool.listeners.pop(process, None)
        self._announce()


def render(model: Model) -> dict[str, Any]:
    """The model's state as `snapshot.read` gives that of Redis."""
    pool = model.pool
    return {
        "tasks": {task.id: _render_task(task) for task in model.tasks.values()},
        "lists": {str(variant): tasks for variant, tasks in pool.lists.items()},
        "index": {str(variant) for variant in pool.lists if str(variant)},
        "scheduled": {task_id: score(due) for task_id, due in model.scheduled.items()},
        "deadlines": {task_id: float(due) for task_id, due in model.deadlines.items()},
        "wip": {member: score(due) for member, due in model.wip.items()},
        "registries": {
            name: {task_id: score(due) for task_id, due in registry.items()}
            for name, registry in model.registries.items()
        },
        "endpoints": {name: _render_endpoint(endpoint) for name, endpoint in pool.endpoints.items()},
        "listeners": {name: (one.spoke, one.rung, one.rooms) for name, one in pool.listeners.items()},
        "bells": {name: words for name, words in model.bells.items() if words},
        "idem": {key: f"{task_id} {digest}" for key, (task_id, digest) in model.idem.items()},
        "replies": {name: sorted(ids) for name, ids in model.replies.items() if ids},
        "counters": {name: count for name, count in model.counters.items() if count},
        "turn": pool.turn,
        "seq": pool.seq,
    }


def _render_task(task: Task) -> dict[str, Any]:
    return {
        "status": task.status, "attempts": task.attempts, "lost": task.lost, "fence": task.fence, "lease": task.lease,
        "endpoint": task.endpoint, "run": task.run, "done": task.done, "excluded": ",".join(task.excluded),
        "outcome": task.outcome, "why": task.why, "ended": task.ended, "answer": task.answer, "body": task.body,
        "history": task.history, "deadline": task.deadline, "at": task.at, "born": task.born, "digest": task.digest,
        "priority": task.priority, "requires": ",".join(task.requires), "expires": bool(task.outcome),
    }  # fmt: skip


def _render_endpoint(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "priority": endpoint.priority, "cap": endpoint.cap, "on": endpoint.on, "gone": endpoint.gone,
        "capabilities": endpoint.capabilities, "state": endpoint.state, "until": endpoint.opens,
        "pause": endpoint.pause, "last": endpoint.last, "seen": endpoint.seen, "epoch": endpoint.epoch,
        "fails": endpoint.fails, "good": endpoint.good, "cooldown": endpoint.cooldown, "probe": endpoint.probe,
        "served": endpoint.served, "failed": endpoint.failed, "slots": endpoint.slots, "drain": endpoint.drain,
        "healthy": endpoint.healthy, "checked": endpoint.checked, "ramp": endpoint.ramp, "ramp_ok": endpoint.ramp_ok,
    }  # fmt: skip
