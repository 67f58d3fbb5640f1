"""A fleet in simulated time: processes that claim and settle by the real scripts, endpoints that only take time."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from broker.adminscripts import EndpointRow
from broker.scripts import Lease, Offer
from tests.support.verbs import POOL, Verbs

POLL = 2000  # ms; a process speaks at least so often


def attach(processes: int, endpoints: Sequence[str]) -> dict[str, list[str]]:
    """Every endpoint to a process; with more processes than endpoints, endpoints to several."""
    names = [f"p{one}" for one in range(processes)]
    hosted: dict[str, list[str]] = {name: [] for name in names}
    for one in range(max(processes, len(endpoints))):
        hosted[names[one % processes]].append(endpoints[one % len(endpoints)])
    return hosted


class Playground:
    """`duration(endpoint)`: ms of one request. `dead`: processes that say once that they wait, and never answer.
    `ear`: the process that listens at the queue itself and comes whenever something is put there (workers/doorbell.py).
    `served`: endpoint -> tasks; `waited`: task -> ms until it started.
    """

    def __init__(
        self,
        verbs: Verbs,
        rows: Sequence[EndpointRow],
        hosted: Mapping[str, Sequence[str]],
        duration: Callable[[str], int],
        dead: Sequence[str] = (),
        ear: str = "",
    ) -> None:
        self.verbs, self.hosted, self.duration, self.dead = verbs, hosted, duration, set(dead)
        self.caps = {name: cap for name, _, cap, *_ in rows}
        self.held: Counter[tuple[str, str]] = Counter()
        self.served: Counter[str] = Counter()
        self.waited: dict[str, int] = {}
        self.finished_at: dict[str, int] = {}
        self.left = 0
        self._born: dict[str, int] = {}
        self.ear = ear
        self._events: list[tuple[int, int, str, Lease | None]] = []
        self._count = 0
        verbs.register(*rows)
        for process in hosted:  # all say once that they are here; the dead ones never again
            self._claim(process)

    @property
    def now(self) -> int:
        return self.verbs.clock.now

    def enqueue(self, count: int) -> None:
        """At most 500 in one call, as the client does it."""
        names = [f"t{len(self._born) + one}" for one in range(count)]
        self._born |= dict.fromkeys(names, self.now)
        for at in range(0, count, 500):
            self.verbs.enqueue(*names[at : at + 500])
        self._answer_bells()
        if self.ear:
            self._claim(self.ear)
            self._answer_bells()

    def run(self, until: int | None = None, while_left: bool = False) -> None:
        """Until all tasks are finished, or the time is come; `while_left`: until none waits."""
        while self._events and len(self.finished_at) < len(self._born):
            if while_left and not self.left:
                return
            if until is not None and self._events[0][0] > until:
                self.verbs.clock.set(until)
                return
            at, _, process, lease = heapq.heappop(self._events)
            if at > self.now:
                self.verbs.clock.set(at)
            if lease is not None:
                self._finish(process, lease)
            self._claim(process)
            self._answer_bells()

    def _finish(self, process: str, lease: Lease) -> None:
        assert self.verbs.finish(lease) == ["done"]
        self.held[process, lease.endpoint] -= 1
        self.served[lease.endpoint] += 1
        self.finished_at[lease.id] = self.now

    def _claim(self, process: str) -> None:
        offers = []
        for endpoint in self.hosted[process]:
            held = self.held[process, endpoint]
            offers.append(Offer(endpoint, self.caps[endpoint] - held, held))
        claims = self.verbs.claims(process, offers)
        self.left = claims.left
        for task in claims.tasks:
            endpoint = task.lease.endpoint
            self.held[process, endpoint] += 1
            self.waited[task.lease.id] = self.now - self._born[task.lease.id]
            self._at(self.now + self.duration(endpoint), process, task.lease)
        if process not in self.dead:
            self._at(self.now + min(POLL, round((claims.wake or 10) * 1000)), process, None)

    def _at(self, time: int, process: str, lease: Lease | None) -> None:
        """A process has one alarm at most; what it claims last sets it."""
        if lease is None:
            self._events = [one for one in self._events if one[3] is not None or one[2] != process]
            heapq.heapify(self._events)
        self._count += 1
        heapq.heappush(self._events, (time, self._count, process, lease))

    def _answer_bells(self) -> None:
        names = [name for name in self.hosted if name not in self.dead]
        while True:
            bells = self.verbs.store.pipelined([("LLEN", self.verbs.store.keys.bell(name)) for name in names])
            rung = [name for name, length in zip(names, bells, strict=True) if length]
            if not rung:
                return
            for name in rung:
                self._claim(name)

    def in_flight(self) -> dict[str, int]:
        keys = self.verbs.store.keys
        counts = self.verbs.store.pipelined([("ZCARD", keys.slots(POOL, name)) for name in self.caps])
        return dict(zip(self.caps, counts, strict=True))
