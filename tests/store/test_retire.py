"""A pool that nobody serves any more leaves the index once it holds nothing."""

from __future__ import annotations

import pytest

from broker import admin
from broker.cli.watch import headline
from tests.support.verbs import DAY, POOL, Verbs, new, run_one

AWAY = DAY  # ms


def retire(verbs: Verbs) -> str:
    return verbs.run(verbs.scripts.retire(POOL, away=AWAY / 1000))


def away(verbs: Verbs, ms: int = AWAY) -> None:
    """Nobody is heard of."""
    verbs.clock.advance(ms)


def hold(verbs: Verbs, state: str) -> None:
    """A task in this state, whose process is gone."""
    verbs.enqueue(new("t", delay=9 * DAY if state == "delayed" else 0))
    if state in ("runs", "dead", "ok"):
        (lease,) = verbs.claim("p1", a=1)
        if state == "ok":
            verbs.finish(lease)
        elif state == "dead":
            verbs.dead_letter(lease)
    elif state == "canceled":
        verbs.cancel("t")


def test_a_pool_that_nobody_served_for_long_is_retired(verbs: Verbs) -> None:
    verbs.finish(run_one(verbs))
    verbs.renew("p1", endpoints=["a"])
    assert retire(verbs) == "served"
    verbs.purge("t")
    away(verbs, AWAY - 1)
    assert retire(verbs) == "served"
    away(verbs, 1)
    assert retire(verbs) == "retired"
    assert admin.pools(verbs.store) == []
    assert verbs.store.redis.keys("rq:*") == []


def test_one_whose_endpoints_a_reload_took_away_is_retired_after_a_minute(verbs: Verbs) -> None:
    verbs.renew("p1", endpoints=["a"])
    verbs.register()
    assert retire(verbs) == "served"
    away(verbs, 60_000)
    assert retire(verbs) == "retired"


@pytest.mark.parametrize("state", ["waits", "delayed", "runs", "dead", "ok", "canceled"])
def test_one_that_holds_tasks_or_results_stays(verbs: Verbs, state: str) -> None:
    hold(verbs, state)
    verbs.register()
    away(verbs, 60_000)
    assert retire(verbs) == "holds"
    if state != "runs":
        verbs.leave("p1")
        assert headline(admin.status(verbs.store, POOL)).endswith("no process serves it")


def test_one_with_endpoints_added_at_run_time_stays(verbs: Verbs) -> None:
    key = f"rq:x:registered:{POOL}"
    verbs.store.redis.hset(key, "b", "{}")
    away(verbs)
    assert retire(verbs) == "holds"
    verbs.store.redis.delete(key)
    assert retire(verbs) == "retired"


def test_results_that_have_run_out_do_not_keep_it(verbs: Verbs) -> None:
    verbs.dead_letter(run_one(verbs))
    away(verbs, 2 * DAY - 1000)
    assert retire(verbs) == "holds", "not yet"
    away(verbs, 1001)
    assert retire(verbs) == "retired"


def test_who_serves_it_again_registers_it_again(verbs: Verbs) -> None:
    away(verbs)
    assert retire(verbs) == "retired"
    verbs.register(("a", 5, 1, True, ()))
    assert admin.pools(verbs.store) == [POOL]
    assert verbs.finish(run_one(verbs)) == ["done"]
