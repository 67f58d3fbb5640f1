"""Dead letters: what goes back, what goes for good, and the idempotency key of both."""

from __future__ import annotations

import pytest

from tests.support.verbs import DAY, POOL, Verbs, new, run_one


def key_ttl(verbs: Verbs) -> int:
    """Of idempotency key `k`, in days; -2: it is not there."""
    ttl = int(verbs.store.redis.pttl(verbs.store.keys.idempotency(POOL, "k")))
    return ttl if ttl < 0 else round(ttl / DAY)


def dead(verbs: Verbs, task: str = "t", key: str = "k") -> None:
    verbs.enqueue(new(task, key=key))
    assert verbs.dead_letter(*verbs.claim("p1", a=1)) == ["done"]


def test_a_redriven_task_holds_its_idempotency_key_as_a_new_one_does(verbs: Verbs) -> None:
    dead(verbs)
    assert key_ttl(verbs) == 2
    assert verbs.redrive("t") == ["queued"]
    assert key_ttl(verbs) == 14
    assert [reply.word for reply in verbs.enqueue(new("other", key="k"))] == ["already"]


def test_a_redriven_task_takes_back_a_key_that_has_run_out(verbs: Verbs) -> None:
    dead(verbs)
    verbs.store.redis.delete(verbs.store.keys.idempotency(POOL, "k"))
    verbs.redrive("t")
    assert [reply.id for reply in verbs.enqueue(new("other", key="k"))] == ["t"]


def test_a_key_that_a_later_task_has_taken_stays_its_own(verbs: Verbs) -> None:
    dead(verbs)
    verbs.store.redis.delete(verbs.store.keys.idempotency(POOL, "k"))
    verbs.enqueue(new("later", key="k"))
    assert verbs.redrive("t") == ["queued"]
    assert [reply.id for reply in verbs.enqueue(new("other", key="k"))] == ["later"]
    verbs.dead_letter(*[lease for lease in verbs.claim("p1", a=5) if lease.id == "t"])
    assert verbs.purge("t") == ["purged"]
    assert [reply.id for reply in verbs.enqueue(new("other", key="k"))] == ["later"]


@pytest.mark.parametrize(
    ("status", "word"), [("failed", "queued"), ("stopped", "queued"), ("canceled", "queued"), ("finished", "done")]
)
def test_redrive_knows_how_a_stock_rq_worker_ended_a_task(verbs: Verbs, status: str, word: str) -> None:
    """RQ writes a status and no outcome of ours. The deadline must not end a redriven task either."""
    verbs.enqueue(new("t", deadline=10))
    store = verbs.store
    store.redis.lrem(store.keys.queue(POOL), 0, "t")
    store.redis.hset(store.keys.job("t"), "status", status)
    store.redis.zadd(store.keys.registry("failed", POOL), {"t": 2e9})
    assert verbs.redrive("t") == [word]
    if word == "queued":
        assert store.redis.zcard(store.keys.registry("failed", POOL)) == 0
        verbs.clock.advance(10_000)
        verbs.expire()
        assert [lease.id for lease in verbs.claim("p1", a=1)] == ["t"]
    store.redis.delete(store.keys.job("t"))


def test_redrive_leaves_alone_what_an_rq_reader_only_took_for_abandoned(verbs: Verbs) -> None:
    lease = run_one(verbs)
    verbs.store.redis.hset(verbs.store.keys.job("t"), "status", "failed")
    assert verbs.redrive("t") == ["unsettled"]
    assert verbs.finish(lease) == ["done"]


def test_purge_takes_all_of_a_task(verbs: Verbs) -> None:
    dead(verbs)
    assert verbs.purge("t", "nobody") == ["purged", "unknown"]
    assert key_ttl(verbs) == -2
    assert verbs.store.redis.exists(verbs.store.keys.job("t"), verbs.store.keys.registry("failed", POOL)) == 0


def test_purge_leaves_what_waits_or_runs(verbs: Verbs) -> None:
    dead(verbs)
    verbs.redrive("t")
    assert verbs.purge("t") == ["unsettled"], "it was redriven after somebody saw it dead"
    (lease,) = verbs.claim("p1", a=1)
    assert verbs.purge("t") == ["unsettled"]
    assert verbs.cancel("t") == ["running"]
    assert verbs.purge("t") == ["unsettled"], "while its connection is open"
    assert verbs.finish(lease) == ["canceled"]
    assert verbs.purge("t") == ["purged"]


def test_purge_leaves_the_tasks_of_other_pools(verbs: Verbs) -> None:
    dead(verbs)
    assert verbs.run(verbs.scripts.purge("other", ["t"])) == ["unknown"]
    assert verbs.outcome("t") == "dead"
