"""Slots that adapt (`max_concurrent: auto`), in plain Python: what `broker/lua/adapt.lua` must do.

An endpoint is watched in rounds. A round counts once as many attempts were answered as it has slots, twice over and six
at least; and decides something only if the slots were in use all the while. Then one of four steps looks at the
throughput: `grow` doubles while that pays, `hold` keeps the slots, `up` and `down` try a few more and a few fewer.
Times are integer milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tests.support.reference import Endpoint

UNSEEN = 1_000_000  # more in flight than there ever are
REMEMBERED = 120_000
LOOK_EACH = 8


@dataclass
class Adapting:
    """One endpoint's. `rate`: answers a ms when it had `slots` slots; `limit`: the slots at its last "too much"."""

    on: bool = False
    floor: int = 1
    ceiling: int = 256
    step: str = "grow"
    phase: str = "settle"
    answered: int = 0
    since: int = 0
    fewest: int = UNSEEN
    rate: float | None = None
    slots: int = 0
    rounds: int = 0
    limit: int | None = None
    cut: int = 0
    endpoint: Endpoint = field(default_factory=lambda: Endpoint(""), repr=False)

    def fix(self, slots: int) -> None:
        """Registered with a number. What it found, and what it measured for that, is forgotten."""
        vars(self).update(vars(Adapting(endpoint=self.endpoint)))
        self.endpoint.cap = slots

    def free(self, slots: int, floor: int, ceiling: int) -> None:
        """Registered as `auto`, between the two. What it found is kept."""
        found = self.endpoint.cap if self.on else slots
        self.on, self.floor, self.ceiling = True, floor, ceiling
        self.endpoint.cap = max(floor, min(ceiling, found))

    def _most(self, now: int) -> int:
        if self.limit is not None and now - self.cut < REMEMBERED:
            return min(self.ceiling, self.limit - 1)
        return self.ceiling

    def _set(self, slots: float, step: str, most: int) -> None:
        self.endpoint.cap = max(self.floor, min(most, math.floor(slots)))
        self.step, self.phase = step, "settle"
        self.answered, self.fewest = 0, UNSEEN

    def _measure(self, since: int) -> None:
        self.phase, self.answered, self.since, self.fewest = "measure", 0, since, UNSEEN

    def _keep(self, rate: float) -> None:
        self.rate, self.slots = float(f"{rate:.6g}"), self.endpoint.cap

    # -- what happens

    def answer(self, now: int, count: int, in_flight: int) -> None:
        """`count` attempts succeeded while `in_flight`, they among them, were out."""
        if not self.on:
            return
        cap = self.endpoint.cap
        answered, fewest = self.answered + count, min(self.fewest, in_flight)
        settled = self.phase == "settle" and answered >= cap
        measuring = self.phase == "measure"
        if settled or (measuring and self.since == 0):
            self._measure(now)
        elif not measuring or answered < max(2 * cap, 6) or now == self.since:
            self.answered, self.fewest = answered, fewest
        elif fewest >= 0.7 * cap:
            self._decide(answered / (now - self.since), self._most(now))
        else:
            self._measure(0)

    def too_much(self, now: int) -> None:
        """A 429, or what stands for one. All of a second are one."""
        if not self.on or now - self.cut < 1000:
            return
        most, cap = self._most(now), self.endpoint.cap  # of before: that it is too much is news for the next step
        self.cut, self.limit, self.rounds = now, cap, 0
        if self.rate is not None and self.slots < cap:
            self._set(self.slots, "hold", most)
        else:
            self.rate = None
            self._set(min(cap - 1, cap * 0.85), "hold", most)

    # -- steps

    def _decide(self, rate: float, most: int) -> None:
        {"grow": self._grow, "hold": self._hold, "up": self._up, "down": self._down}[self.step](rate, most)

    def _pays(self, rate: float) -> bool:
        """At least half of the added slots show."""
        assert self.rate is not None
        return rate >= self.rate * (1 + 0.5 * (self.endpoint.cap / self.slots - 1))

    def _grow(self, rate: float, most: int) -> None:
        cap = self.endpoint.cap
        if self.rate is None or self._pays(rate):
            self._keep(rate)
            if cap >= most:
                self.step, self.rounds = "hold", 0
                self._measure(0)
            else:
                self._set(cap * 2, "grow", most)
            return
        best = max(self.slots, math.ceil(self.slots * max(1, rate / self.rate) - 0.2))
        self.rate, self.rounds = None, 0
        self._set(min(best, cap), "hold", most)

    def _hold(self, rate: float, most: int) -> None:
        cap = self.endpoint.cap
        if self.rate is not None and self.slots == cap:
            if rate < self.rate * 0.7:
                fewer = math.ceil(cap * rate / self.rate)
                self._keep(rate)
                self.rate, self.rounds = None, 0
                self._set(fewer, "hold", most)
                return
            rate = self.rate * 0.7 + rate * 0.3
        self._keep(rate)
        self.rounds += 1
        turn = self.rounds % (2 * LOOK_EACH)
        if turn == LOOK_EACH and cap < most:
            self._set(math.ceil(cap * 1.25), "up", most)
        elif turn == 0 and cap > self.floor:
            self._set(min(cap - 1, cap * 0.8), "down", most)
        else:
            self._measure(0)

    def _up(self, rate: float, most: int) -> None:
        if self._pays(rate):
            self._keep(rate)
            self._set(self.endpoint.cap * 2, "grow", most)
        else:
            self._set(self.slots, "hold", most)

    def _down(self, rate: float, most: int) -> None:
        assert self.rate is not None
        if rate >= self.rate * 0.97:
            self._keep(rate)
            self._set(self.endpoint.cap, "hold", most)
        else:
            self._set(self.slots, "hold", most)
