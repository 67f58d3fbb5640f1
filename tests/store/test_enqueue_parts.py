"""A call of enqueue_many goes out in parts: it stays one call, whose first tasks are queued, in their order."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from broker import Broker, QueueFull, TaskOptions
from broker.scripts import Finish, Offer
from broker.store import Store
from tests.support.player import register
from tests.support.producer import POOL, ask
from tests.support.verbs import Verbs, new, row, run_one

CALLS = 40


@contextmanager
def draining(url: str) -> Iterator[None]:
    """A worker of its own, that takes and finishes all the time."""
    over = threading.Event()

    def drain() -> None:
        store = Store(url)
        scripts = store.scripts
        while not over.is_set():
            taken = store.run(scripts.claim(POOL, "drainer", [Offer("a", 1000, 0)], lease=30, most=20)).tasks
            if taken:
                store.run(scripts.finish(POOL, [Finish(task.lease, "{}", b"") for task in taken], result_ttl=100))
        store.close()

    thread = threading.Thread(target=drain)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_what_is_queued_when_the_pool_is_full_are_the_first_tasks(
    redis_url: str, broker: Broker, store: Store
) -> None:
    register(store, POOL, max_depth=120)
    with draining(redis_url):
        for call in range(CALLS):
            works = [(ask(n), TaskOptions(id=f"{call}-{n}")) for n in range(500)]
            with pytest.raises(QueueFull) as full:
                broker.enqueue_many(POOL, works)
            queued = [task.id for task in full.value.queued]
            assert queued == [f"{call}-{n}" for n in range(len(queued))]


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
        waiting = store.pipelined([("LRANGE", store.keys.queue(pool), 0, -1)])[0]
        assert [task_id.decode() for task_id in waiting] == expected
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
