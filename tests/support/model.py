"""What every verb must do, in plain Python.

A Model and Redis are given the same calls at the same time and must give the same answers and hold the same state. Who
gets which task is decided by `reference.py`. Times are integer milliseconds by the server's clock; verbs take what the
wrappers in `broker/scripts.py` take.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from broker.adminscripts import EndpointRow
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
from tests.support.adapting import Adapting
from tests.support.model_admin import Administration
from tests.support.model_state import Task, ms, score
from tests.support.reference import Endpoint, claim


class Model(Administration):
    def register(self, endpoints: Sequence[EndpointRow]) -> set[str]:
        for name, priority, cap, on, capabilities, *span in endpoints:
            endpoint = self.pool.endpoints.setdefault(name, Endpoint(name))
            endpoint.priority, endpoint.on, endpoint.gone = priority, on, False
            endpoint.capabilities, endpoint.seen = frozenset(capabilities), self.now
            adapting = self.adapting.setdefault(name, Adapting(endpoint=endpoint))
            if span:
                adapting.free(cap, *span)
            else:
                adapting.fix(cap)
        gone = set(self.pool.endpoints) - {row[0] for row in endpoints}
        for name in gone:
            self.pool.endpoints[name].on, self.pool.endpoints[name].gone = False, True
            self._forget_if_free(name)
        self._announce()
        return gone

    def _forget_if_free(self, name: str) -> None:
        if self.pool.endpoints[name].gone and not self.pool.endpoints[name].slots:
            del self.pool.endpoints[name]
            self.rates.pop(name, None)
            del self.adapting[name]

    def _earlier(self, new: NewTask) -> tuple[str, str] | None:
        found = self.idem.get(new.idempotency_key) if new.idempotency_key else None
        if found is not None:
            return ("already" if found[1] == new.digest else "conflict"), found[0]
        if new.id not in self.tasks:
            return None
        digest = self.tasks[new.id].digest
        same = digest == new.digest or "" in (digest, new.digest)  # all data are the same
        return ("already" if same else "conflict"), new.id

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
                self.idem[task.idem], self.idem_days[task.idem] = (task.id, task.digest), 14
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
        ends = [pool.endpoints[one.endpoint] for one in offers if one.room > 0 and one.endpoint in pool.endpoints]
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
        wake = self._wake(process, [one.id for one in ends], batch.left, len(batch.tasks) >= most, batch.reserved)
        tasks = [self._claimed(self.tasks[task_id]) for task_id, _ in batch.tasks]
        return Claims(None if wake < 0 else wake / 1000, batch.left, tasks, stale if batch.left > 0 else ())

    def _claimed(self, task: Task) -> Claimed:
        lease = Lease(task.id, task.lease, task.endpoint)
        return Claimed(
            lease, task.attempts, task.max_attempts, task.deadline / 1000, task.born / 1000, self.now / 1000, b"{}",
            plain=False, lost=task.lost,
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
            for endpoint in map(self.pool.endpoints.__getitem__, offered):
                times += [endpoint.pause - self.now] if endpoint.pause > self.now else []
                if endpoint.state == "open" and endpoint.opens > self.now:
                    times.append(endpoint.opens - self.now)
        return max(1, min(times)) if times else -1

    def renew(self, process: str, endpoints: Sequence[str], leases: Sequence[Lease], lease: int) -> list[str]:
        self._in_contact(lease)
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
        replies: list[str] = []
        good: dict[tuple[str, str], list[Lease]] = {}  # by endpoint and epoch, as they come
        answered: Counter[str] = Counter()
        for item in items:
            endpoint = self.pool.endpoints.get(item.lease.endpoint)
            word = self._settle(item.lease)
            if word == "held":
                assert endpoint is not None
                task = self.tasks[item.lease.id]
                task.attempts += 1
                task.answer, task.body = item.answer, item.body
                self._conclude(task, "ok", "finished", ttl)
                endpoint.served += 1
                if endpoint.healthy is not None:
                    endpoint.checked = self.now
                name = (endpoint.id, item.lease.token.split(".")[1])
                good.setdefault(name, []).append(item.lease)
                answered[endpoint.id] += 1
                word = "done"
            replies.append(word)
        for name, leases in good.items():
            for lease in leases:
                self._breaker(lease, "good")
            in_flight = len(self.pool.endpoints[name[0]].slots) + answered[name[0]]
            self.adapting[name[0]].answer(self.now, len(leases), in_flight)
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
            if self._is_news(item.lease, word):
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
            if item.pause and self._is_news(item.lease, word):
                self._pause(item.lease, item.pause)
                if item.lease.endpoint in self.adapting:
                    self.adapting[item.lease.endpoint].too_much(self.now)
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
            if self._is_news(item.lease, word):
                self._attempted(item.lease, item.verdict, served=item.verdict == "good")
            replies.append(word)
        return replies

    def promote(self) -> int:
        count = self._promote_due()
        if count:
            self._announce()
        return count

    def reap(self, max_deliveries: int, dead_ttl: int, lease: int) -> Reaped:
        requeued = poisoned = freed = 0
        amnesty = self.now < self._in_contact(lease)
        for name, one in list(self.pool.listeners.items()):
            if self.now - one.spoke > 60_000:
                del self.pool.listeners[name]
        for name, endpoint in list(self.pool.endpoints.items()):
            expired = [] if amnesty else [name for name, expiry in endpoint.slots.items() if expiry <= self.now]
            for task in [self.tasks[task_id] for task_id in expired]:
                del endpoint.slots[task.id]
                self.wip.pop(f"{task.id}:{task.lease}", None)
                task.late = (*task.late, task.lease)[-8:]
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
        task.suspect = task.suspect or 2 <= task.lost == max_deliveries - 1
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

    def leave(self, process: str) -> None:
        self.pool.listeners.pop(process, None)
        self._announce()
