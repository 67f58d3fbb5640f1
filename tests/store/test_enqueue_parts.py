"""A call of enqueue_many goes out in parts: it stays one call, whose first tasks are queued, in their order."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from broker import Broker, IdempotencyConflict, QueueFull, TaskOptions
from broker.store import Store
from tests.support.player import register, serving
from tests.support.producer import POOL, ask, waiting
from tests.support.servers import RealServer
from tests.support.verbs import Verbs, new, row, run_one

CALLS = 40


def test_what_is_queued_when_the_pool_is_full_are_the_first_tasks(
    redis_url: str, broker: Broker, store: Store
) -> None:
    with serving(redis_url, POOL, most=20):
        register(store, POOL, max_depth=120)
        for call in range(CALLS):
            works = [(ask(n), TaskOptions(id=f"{call}-{n}")) for n in range(500)]
            with pytest.raises(QueueFull) as full:
                broker.enqueue_many(POOL, works)
            queued = [task.id for task in full.value.queued]
            assert queued == [f"{call}-{n}" for n in range(len(queued))]


def test_a_pool_that_fills_up_on_the_way_keeps_what_it_has(broker: Broker, store: Store) -> None:
    register(store, POOL, max_depth=730)
    with pytest.raises(QueueFull, match="730 of 1300 were queued") as full:
        broker.enqueue_many(POOL, [ask(n) for n in range(1300)])
    assert waiting(store) == [task.id for task in full.value.queued]


def test_a_conflict_on_the_way_is_told_before_a_full_pool(broker: Broker, store: Store) -> None:
    register(store, POOL, max_depth=400)
    broker.enqueue(POOL, ask("other"), id="taken")
    works = [(ask(n), TaskOptions(id="taken" if n == 250 else f"t{n}")) for n in range(500)]
    with pytest.raises(IdempotencyConflict, match="taken"):
        broker.enqueue_many(POOL, works)
    assert waiting(store)[:251] == ["taken", *(f"t{n}" for n in range(250))]
    full = [(ask(n), TaskOptions(id="taken" if n == 450 else f"t{n}")) for n in range(500)]
    with pytest.raises(QueueFull, match="is full"):
        broker.enqueue_many(POOL, full)


def test_redis_that_fills_up_on_the_way_tells_what_it_took(server: RealServer, broker: Broker, store: Store) -> None:
    register(store, POOL)
    broker.enqueue(POOL, ask())
    server.command("CONFIG", "SET", "maxmemory", str(store.raw(lambda client: client.info())["used_memory"] + 500_000))
    try:
        with pytest.raises(QueueFull, match="memory limit") as full:
            broker.enqueue_many(POOL, [ask(f"{n:01000}") for n in range(1500)])
    finally:
        server.command("CONFIG", "SET", "maxmemory", "0")
    assert 0 < len(full.value.queued) < 1500
    assert waiting(store)[1:] == [task.id for task in full.value.queued]


def test_tasks_stay_in_order_while_the_scripts_get_lost(redis_url: str, store: Store) -> None:
    brokers = [Broker(redis_url) for _ in range(4)]
    for number, broker in enumerate(brokers):
        broker.enqueue(f"warm{number}", ask())
    ids: dict[str, list[str]] = {}

    def call(turn: int, number: int) -> None:
        together.wait()
        pool = f"p{turn}-{number}"
        ids[pool] = [task.id for task in brokers[number].enqueue_many(pool, [ask(n) for n in range(300)])]

    for turn in range(CALLS // 2):
        store.redis.script_flush()
        together = threading.Barrier(len(brokers))
        threads = [threading.Thread(target=call, args=(turn, number)) for number in range(len(brokers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for pool, expected in ids.items():
        assert waiting(store, pool) == expected
    for broker in brokers:
        broker.close()


def test_a_part_waits_for_the_one_before_it(verbs: Verbs) -> None:
    verbs.register(row("a", 10))
    scripts = verbs.store.scripts

    def part(number: int, *names: str) -> list[str]:
        tasks = [new(name) for name in names]
        return [each.word for each in verbs.run(scripts.enqueue("p", tasks, part=("call", number)))]

    assert part(1, "c", "d") == ["after", "after"]
    assert verbs.status("c") == ""
    assert part(0, "a", "b") == ["queued", "queued"]
    assert part(2, "e") == ["after"]
    assert part(1, "c", "d") == ["queued", "queued"]
    assert part(0, "a", "b") == ["already", "already"]
    assert part(1, "c", "d") == ["already", "already"]
    assert part(2, "e") == ["queued"]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400", "junk", "1e18"])
def test_a_count_that_is_none_begins_anew(real_store: Store, value: str) -> None:
    verbs = Verbs(real_store)
    verbs.register(row("a", 10))
    lease = run_one(verbs)
    verbs.store.redis.hset(verbs.store.keys.endpoint("p", "a"), mapping={"served": value, "run_ms": value})
    assert verbs.finish(lease) == ["done"]
    assert verbs.endpoint("a", "served") == "1"
    assert 0 <= int(verbs.endpoint("a", "run_ms")) < 60_000


STORM = """
import signal, time
from broker.links import packed

class Stop(Exception): pass

def stop(*_): raise Stop

signal.signal(signal.SIGALRM, stop)
left, words = 4000, ("A", *range(1000, 1500))
while left:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0004)
        while True:
            packed([words])
    except Stop:
        left -= 1
"""


def test_numbers_are_packed_under_exceptions_of_signal_handlers() -> None:
    """hiredis 3.5 ends the process with SIGSEGV when it packs numbers so."""
    assert subprocess.run([sys.executable, "-c", STORM], check=False).returncode == 0
