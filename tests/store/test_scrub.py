"""scrub repairs what others broke, and touches nothing that is whole."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from broker import Broker, Request
from broker.scripts import SCRUB_START, Claimed, Finish, Offer
from broker.store import Store

POOL, LEASE_S = "llm", 30.0
WORK = Request("POST", "/v1/chat/completions", json={})


@dataclass
class Bench:
    store: Store
    broker: Broker

    def raw(self, *words: Any) -> Any:
        return self.store.pipelined([words])[0]

    def tasks(self, count: int, **options: Any) -> list[str]:
        return [self.broker.enqueue(POOL, WORK, **options).id for _ in range(count)]

    def claim(self, room: int) -> list[Claimed]:
        return list(self.claims(room).tasks)

    def claims(self, room: int, **more: Any) -> Any:
        offers = [Offer("e0", room, 0)]
        claim = self.store.scripts.claim
        return self.store.run(claim(POOL, "p-1-x", offers, lease=LEASE_S, most=room, **more))

    def scrub(self) -> dict[str, int]:
        """A whole pass; repairs by name."""
        at = SCRUB_START
        while not at.done:
            at = self.store.run(self.store.scripts.scrub(POOL, at, lease=LEASE_S, dead_letter_ttl=60))
        found = self.raw("HGETALL", self.store.keys.pool(POOL))
        pairs = found.items() if isinstance(found, dict) else zip(found[::2], found[1::2], strict=True)
        return {name.decode()[2:]: int(value) for name, value in pairs if name.startswith(b"r_")}

    def status(self, task: str) -> str:
        return self.broker.task(POOL, task).status()


@pytest.fixture
def bench(redis_url: str) -> Iterator[Bench]:
    store = Store(redis_url)
    store.run(store.scripts.register(POOL, {"max_depth": 10_000}, [("e0", 5, 100, True, ())]))
    with Broker(redis_url) as broker:
        yield Bench(store, broker)
    store.close()


def test_what_is_whole_stays_as_it_is(bench: Bench) -> None:
    bench.tasks(300)
    bench.tasks(20, delay=60.0, deadline=600.0)
    bench.tasks(20, priority="high")
    running = bench.claim(5)
    before = bench.raw("LRANGE", bench.store.keys.queue(POOL), 0, -1)
    assert bench.scrub() == {}
    assert bench.raw("LRANGE", bench.store.keys.queue(POOL), 0, -1) == before
    assert len(running) == 5


def test_ghosts_and_doubled_entries_go(bench: Bench) -> None:
    ids = bench.tasks(10)
    queue = bench.store.keys.queue(POOL)
    bench.raw("RPUSH", queue, "ghost", ids[3], ids[4])
    assert bench.scrub() == {"ghost": 1, "double": 2}
    assert [entry.decode() for entry in bench.raw("LRANGE", queue, 0, -1)] == ids


def test_a_task_that_no_list_has_is_queued_again(bench: Bench) -> None:
    (lost,) = bench.tasks(1, priority="low")
    bench.raw("LREM", bench.store.keys.queue(POOL, "low"), 0, lost)
    assert bench.scrub() == {"unlisted": 1}
    assert [claimed.lease.id for claimed in bench.claim(5)] == [lost]


def test_a_list_outside_the_index_is_found(bench: Bench) -> None:
    scripts = bench.store.scripts
    bench.store.run(scripts.register(POOL, {"max_depth": 10_000}, [("e0", 5, 100, True, ("vision",))]))
    (hidden,) = bench.tasks(1, requires=["vision"])
    assert bench.raw("SREM", bench.store.keys.lists(POOL), "normal+vision") == 1
    assert bench.claim(5) == []
    assert bench.scrub() == {"list": 1}
    assert [claimed.lease.id for claimed in bench.claim(5)] == [hidden]


def test_a_delayed_task_without_its_date_is_queued(bench: Bench) -> None:
    (lost,) = bench.tasks(1, delay=600.0)
    bench.raw("ZREM", bench.store.keys.registry("scheduled", POOL), lost)
    assert bench.scrub() == {"undelayed": 1}
    assert bench.status(lost) == "queued"


def test_a_lease_without_its_slot_gets_it_back_and_its_holder_settles(bench: Bench) -> None:
    bench.tasks(1)
    (claimed,) = bench.claim(1)
    bench.raw("DEL", bench.store.keys.slots(POOL, "e0"))
    assert bench.scrub() == {"slot": 1}
    assert bench.raw("ZCARD", bench.store.keys.slots(POOL, "e0")) == 1
    finish = Finish(claimed.lease, "{}", b"")
    assert bench.store.run(bench.store.scripts.finish(POOL, [finish], result_ttl=60)) == ["done"]
    assert bench.raw("ZCARD", bench.store.keys.slots(POOL, "e0")) == 0


def test_a_task_whose_work_is_gone_is_a_dead_letter(bench: Bench) -> None:
    (harmed,) = bench.tasks(1)
    bench.raw("HDEL", bench.store.keys.job(harmed), "data")
    assert bench.scrub()["unreadable"] == 1
    assert bench.status(harmed) == "dead"


@pytest.mark.parametrize("registry", ["failed", "finished", "canceled"])
def test_a_registry_of_outcomes_names_no_task_that_is_gone(bench: Bench, registry: str) -> None:
    """Over two pages, the second of which has what is whole, too."""
    keys = bench.store.keys
    name, soon = keys.registry(registry, POOL), time.time() + 60
    (whole,) = bench.tasks(1)
    gone = [f"gone-{n:04}" for n in range(1500)]
    bench.raw("SET", keys.job(gone[0]), "another type")
    bench.raw("ZADD", name, *itertools.chain(*((soon, each) for each in gone)), "+inf", whole, 1.0, "expired")
    assert bench.scrub() == {"gone": 1500}
    assert bench.raw("ZRANGE", name, 0, -1) == [b"expired", whole.encode()]  # that one leaves by its time
    assert bench.raw("GET", keys.job(gone[0])) == b"another type"


@pytest.mark.parametrize("words", [("HDEL", "status"), ("HSET", "status", "confused")])
def test_a_task_in_no_known_state_is_queued(bench: Bench, words: tuple[str, ...]) -> None:
    (harmed,) = bench.tasks(1)
    bench.raw(words[0], bench.store.keys.job(harmed), *words[1:])
    assert bench.scrub()["confused"] == 1
    assert [claimed.lease.id for claimed in bench.claim(5)] == [harmed]


def test_the_holder_settles_a_task_that_an_rq_reader_took_for_abandoned(bench: Bench) -> None:
    bench.tasks(1)
    (claimed,) = bench.claim(1)
    keys = bench.store.keys
    bench.raw("HSET", keys.job(claimed.lease.id), "status", "failed")
    bench.raw("ZADD", keys.registry("failed", POOL), 1e12, claimed.lease.id)
    assert bench.scrub() == {}
    finish = Finish(claimed.lease, "{}", b"")
    assert bench.store.run(bench.store.scripts.finish(POOL, [finish], result_ttl=60)) == ["done"]
    assert bench.status(claimed.lease.id) == "ok"
    assert bench.raw("ZCARD", keys.registry("failed", POOL)) == 0


def test_what_a_lost_reply_gave_is_given_again_and_nothing_else(bench: Bench) -> None:
    bench.tasks(6)
    kept, lost = bench.claim(2), bench.claim(2)
    again = bench.claims(4, known=[claimed.lease for claimed in kept]).tasks
    assert {claimed.lease for claimed in again[:2]} == {claimed.lease for claimed in lost}
    assert len(again) == 4
    assert len({claimed.lease for claimed in kept + again}) == 6
