"""What the model holds: tasks, leases, delays, deadlines, endpoints with their breakers; and steps that verbs share.

`render` writes it in the form `snapshot.read` gives to what Redis holds. Times are integer milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from broker.scripts import Lease
from tests.support.adapting import Adapting
from tests.support.reference import Endpoint, Pool, Variant, announce

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
    suspect: bool = False
    late: tuple[str, ...] = ()  # leases that were lost, and whose attempts have not told how they ended

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
    rate_window: int = 0
    failure_rate: int = 50
    minimum_volume: int = 4


@dataclass(frozen=True)
class Rate:
    """Attempts and failures of one window of an endpoint, and of the window before it."""

    at: int
    attempts: int = 0
    failures: int = 0
    attempts_before: int = 0
    failures_before: int = 0


@dataclass
class State:
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
    idem_days: dict[str, int] = field(default_factory=dict)
    replies: dict[str, list[str]] = field(default_factory=dict)
    bells: dict[str, list[str]] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    events: list[str] = field(default_factory=list)
    contact: int | None = None
    amnesty: int = 0
    suspect: tuple[str, int] = ("", 0)
    tickets: dict[str, str] = field(default_factory=dict)
    rates: dict[str, Rate] = field(default_factory=dict)
    adapting: dict[str, Adapting] = field(default_factory=dict)

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
        again = 200
        for task in (self.tasks[task_id] for _, task_id in due):
            del self.scheduled[task.id]
            if task.suspect and not self._takes_turn(task):
                self._schedule(task, self.now + again)
                again = 2000
            else:
                self._make_ready(task, front=task.suspect)
        return len(due)

    def _takes_turn(self, task: Task) -> bool:
        """Of those whose next lost lease is one too many, one runs at a time."""
        name, since = self.suspect
        other = self.tasks.get(name)
        if other is not None and other is not task and other.suspect:
            queued = other.status == "queued" and self.now - since < 60_000
            if queued or other.status == "started":
                return False
        self.suspect = (task.id, self.now)
        return True

    def _in_contact(self, lease: int) -> int:
        """A process shows that it lives. Until when nothing is reaped: one lease from the end of an outage."""
        if self.contact is None or self.now - self.contact > lease / 2:
            self.amnesty = self.now + lease
        self.contact = self.now
        return self.amnesty

    def _conclude(self, task: Task, outcome: str, status: str, ttl: int, why: str = "") -> None:
        self.deadlines.pop(task.id, None)
        task.status, task.outcome, task.ended = status, outcome, self.now
        task.lease, task.endpoint, task.run = "", "", 0
        task.why = why or task.why
        registry = {"ok": "finished", "dead": "failed", "poison": "failed", "canceled": "canceled"}.get(outcome)
        if registry:
            self.registries[registry][task.id] = self.now + ttl
        if task.idem:
            self.idem_days[task.idem] = ttl // DAY
        for name in filter(None, task.reply.split(",")):
            self.replies.setdefault(name, []).append(task.id)
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

    def _is_news(self, lease: Lease, word: str) -> bool:
        """Whether what an attempt tells of its endpoint counts: once, however often it is told."""
        if word != "lost":
            return word != "already"
        task = self.tasks.get(lease.id)
        if task is None or lease.token not in task.late:
            return False
        task.late = tuple(token for token in task.late if token != lease.token)
        return True

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
        self.rates.pop(endpoint.id, None)
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
                self._count_rate(endpoint, failed=False)
                return
            endpoint.good += 1
            if endpoint.good >= self.policies.half_open_successes:
                self._close(endpoint)
            return
        endpoint.fails += 1
        if endpoint.state == "half_open":
            self._open(endpoint, again=True)
            return
        too_many = self._count_rate(endpoint, failed=True)
        if too_many or verdict == "open" or endpoint.fails >= self.policies.failures:
            self._open(endpoint, again=False)

    def _count_rate(self, endpoint: Endpoint, failed: bool) -> bool:
        """Whether too many attempts of this window and the one before failed."""
        policies = self.policies
        if not policies.rate_window:
            return False
        at, old = self.now // policies.rate_window, self.rates.get(endpoint.id, Rate(-9))
        if old.at == at - 1:
            old = Rate(at, attempts_before=old.attempts, failures_before=old.failures)
        elif old.at != at:
            old = Rate(at)
        new = replace(old, attempts=old.attempts + 1, failures=old.failures + failed)
        self.rates[endpoint.id] = new
        attempts, failures = new.attempts + new.attempts_before, new.failures + new.failures_before
        return attempts >= policies.minimum_volume and failures * 100 >= attempts * policies.failure_rate

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


def render(model: State) -> dict[str, Any]:
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
        "endpoints": {
            name: {
                **_render_endpoint(endpoint),
                "rate": _render_rate(model.rates.get(name)),
                "adapt": _render_adapting(model.adapting[name]),
            }
            for name, endpoint in pool.endpoints.items()
        },
        "tickets": model.tickets,
        "listeners": {name: (one.spoke, one.rung, one.rooms) for name, one in pool.listeners.items()},
        "bells": {name: words for name, words in model.bells.items() if words},
        "idem": {key: (f"{task_id} {digest}", model.idem_days[key]) for key, (task_id, digest) in model.idem.items()},
        "replies": {name: sorted(ids) for name, ids in model.replies.items() if ids},
        "counters": {name: count for name, count in model.counters.items() if count},
        "contact": model.contact or 0,
        "amnesty": model.amnesty,
        "suspect": f"{model.suspect[0]} {model.suspect[1]}" if model.suspect[0] else "",
        "turn": pool.turn,
        "seq": pool.seq,
    }


def _render_task(task: Task) -> dict[str, Any]:
    done = task.done.partition(".")[0] if task.outcome == "ok" else task.done
    return {
        "status": task.status, "attempts": task.attempts, "lost": task.lost, "fence": task.fence, "lease": task.lease,
        "endpoint": task.endpoint, "run": task.run, "done": done, "excluded": ",".join(task.excluded),
        "outcome": task.outcome, "why": task.why, "ended": task.ended, "answer": task.answer, "body": task.body,
        "history": task.history, "deadline": task.deadline, "at": task.at, "born": task.born, "digest": task.digest,
        "priority": task.priority, "requires": ",".join(task.requires), "expires": bool(task.outcome),
        "late": ",".join(task.late), "suspect": task.suspect,
    }  # fmt: skip


def _render_rate(rate: Rate | None) -> str:
    if rate is None:
        return ""
    return f"{rate.at}: {rate.attempts_before} {rate.attempts}, {rate.failures_before} {rate.failures}"


def _render_adapting(one: Adapting) -> tuple[Any, ...]:
    return (
        one.on, one.floor, one.ceiling, one.step, one.phase, one.answered, one.since, one.fewest, one.rate, one.slots,
        one.rounds, one.limit, one.cut,
    )  # fmt: skip


def _render_endpoint(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "priority": endpoint.priority, "cap": endpoint.cap, "on": endpoint.on, "gone": endpoint.gone,
        "capabilities": endpoint.capabilities, "state": endpoint.state, "until": endpoint.opens,
        "pause": endpoint.pause, "last": endpoint.last, "seen": endpoint.seen, "epoch": endpoint.epoch,
        "fails": endpoint.fails, "good": endpoint.good, "cooldown": endpoint.cooldown, "probe": endpoint.probe,
        "served": endpoint.served, "failed": endpoint.failed, "slots": endpoint.slots, "drain": endpoint.drain,
        "healthy": endpoint.healthy, "checked": endpoint.checked, "ramp": endpoint.ramp, "ramp_ok": endpoint.ramp_ok,
    }  # fmt: skip
