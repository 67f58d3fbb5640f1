"""Redis and the model, given the same calls at the same time. A different answer is an AssertionError at once; `check`
compares all they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from broker.adminscripts import EndpointRow
from broker.scripts import Lease, NewTask, Offer, Release, Verdict
from broker.store import Store
from tests.support.model import Model
from tests.support.model_state import Policies, render
from tests.support.snapshot import leaks, read
from tests.support.stores import CLOCK_KEY
from tests.support.verbs import DAY, LEASE, POOL, Verbs, dead_letter_of, finish_of, retry_of


class Twin:
    """`leases`: all that were ever given, the newest last."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.verbs = Verbs(store)
        self.model = Model(now=self.verbs.clock.now)
        self.leases: list[Lease] = []

    def _same(self, verb: str, got: Any, expected: Any) -> None:
        assert got == expected, f"{verb} answered {got}, the model {expected}"

    def advance(self, ms: int) -> None:
        self.verbs.clock.advance(ms)
        self.model.now = self.verbs.clock.now

    def register(self, rows: Sequence[EndpointRow], policies: Policies) -> None:
        self.model.policies = policies
        self.model.pool.spill, self.model.pool.check_after = policies.spill_after, policies.check_after
        gone = self.verbs.register(*rows, **vars(policies))
        self._same("register", set(gone), self.model.register(rows))

    def enqueue(self, news: Sequence[NewTask], max_depth: int = 0) -> None:
        self._same("enqueue", self.verbs.enqueue(*news, max_depth=max_depth), self.model.enqueue(news, max_depth))

    def held(self, process: str, endpoint: str) -> int:
        running = (
            self.model.tasks[member.split(":")[0]] for member in self.model.wip if member.endswith("." + process)
        )
        return sum(task.endpoint == endpoint for task in running)

    def claim(self, process: str, rooms: Mapping[str, int], most: int = 100) -> list[Lease]:
        offers = [Offer(name, room, self.held(process, name)) for name, room in rooms.items()]
        claims = self.verbs.claims(process, offers, most=most)
        self._same("claim", claims, self.model.claim(process, offers, LEASE, most))
        given = [one.lease for one in claims.tasks]
        self.leases += given
        return given

    def finish(self, leases: Sequence[Lease]) -> None:
        items = [finish_of(lease) for lease in leases]
        self._same("finish", self.verbs.finish(*leases), self.model.finish(items, DAY))

    def retry(self, leases: Sequence[Lease], delay: float, verdict: Verdict, exclude: bool, pause: float) -> None:
        items = [retry_of(lease, delay, verdict, exclude, pause) for lease in leases]
        got = self.verbs.retry(*leases, delay=delay, verdict=verdict, exclude=exclude, pause=pause)
        self._same("retry", got, self.model.retry(items))

    def release(self, leases: Sequence[Lease], pause: float) -> None:
        items = [Release(lease, pause) for lease in leases]
        self._same("release", self.verbs.release(*leases, pause=pause), self.model.release(items))

    def dead_letter(self, leases: Sequence[Lease], verdict: Verdict, reason: str) -> None:
        items = [dead_letter_of(lease, verdict, reason) for lease in leases]
        got = self.verbs.dead_letter(*leases, verdict=verdict, reason=reason)
        self._same("dead_letter", got, self.model.dead_letter(items, 2 * DAY, DAY))

    def renew(self, process: str, leases: Sequence[Lease], endpoints: Sequence[str]) -> None:
        got = self.verbs.renew(process, *leases, endpoints=endpoints)
        self._same("renew", got, self.model.renew(process, endpoints, leases, LEASE))

    def promote(self) -> None:
        self._same("promote", self.verbs.promote(), self.model.promote())

    def pass_time(self, ms: int) -> None:
        """As `Verbs.pass_time`."""
        self.renew("bystander", [], [])
        for step in [LEASE // 2] * (ms // (LEASE // 2)) + [ms % (LEASE // 2)]:
            self.advance(step)
            self.renew("bystander", [], [])

    def reap(self, max_deliveries: int) -> None:
        self._same("reap", self.verbs.reap(max_deliveries), self.model.reap(max_deliveries, 2 * DAY, LEASE))

    def expire(self) -> None:
        self._same("expire", self.verbs.expire(), self.model.expire(DAY))

    def cancel(self, ids: Sequence[str]) -> None:
        self._same("cancel", self.verbs.cancel(*ids), self.model.cancel(ids, DAY))

    def redrive(self, ids: Sequence[str]) -> None:
        self._same("redrive", self.verbs.redrive(*ids), self.model.redrive(ids))

    def purge(self, ids: Sequence[str]) -> None:
        self._same("purge", self.verbs.purge(*ids), self.model.purge(ids))

    def watch(self, reply: str, ids: Sequence[str]) -> None:
        self._same("watch", self.verbs.watch(reply, *ids), self.model.watch(reply, ids))

    def ticket(self, duty: str, process: str, again: bool) -> None:
        self._same("ticket", self.verbs.ticket(duty, process, again), self.model.ticket(duty, process, again))

    def health(self, endpoint: str, ok: bool) -> None:
        self._same("health", self.verbs.health(endpoint, ok), self.model.health(endpoint, ok))

    def drain(self, endpoint: str, on: bool) -> None:
        self._same("drain", self.verbs.drain(endpoint, on), self.model.drain(endpoint, on))

    def reset(self, endpoint: str) -> None:
        self._same("reset", self.verbs.reset(endpoint), self.model.reset(endpoint))

    def leave(self, process: str) -> None:
        self.verbs.leave(process)
        self.model.leave(process)

    def check(self) -> None:
        """The same state; each task in exactly one place; no key that nobody owns."""
        state, expected = read(self.store, POOL), render(self.model)
        for part in expected:
            assert state[part] == expected[part], f"{part}: {_difference(state[part], expected[part])}"
        places = [*(one for ids in state["lists"].values() for one in ids), *state["scheduled"]]
        places += [one for endpoint in state["endpoints"].values() for one in endpoint["slots"]]
        assert len(places) == len(set(places)), f"in two places: {sorted(places)}"
        alive = {name for name, task in state["tasks"].items() if not task["outcome"]}
        assert alive <= set(places), f"lost: {alive - set(places)}"
        assert sorted(self.verbs.events) == sorted(self.model.events)
        assert leaks(self.store, CLOCK_KEY) == []


def _difference(got: Any, expected: Any) -> str:
    if not isinstance(got, dict) or not isinstance(expected, dict):
        return f"Redis has {got}, the model {expected}"
    keys = [key for key in {**got, **expected} if got.get(key) != expected.get(key)]
    return "; ".join(f"{key}: {_difference(got.get(key), expected.get(key))}" for key in keys)
