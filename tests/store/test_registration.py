"""workers.registration: the newest configuration stands, whoever looks; what Redis forgot is written again, once."""

from __future__ import annotations

import pytest

from broker.configmodel import Config, Endpoint, Pool
from broker.registered import add_endpoint, endpoint_from, registered, remove_endpoint
from broker.store import Store
from workers.registration import CHECK_S, Registration

POOL = "llm"


def pool(*ids: str, slots: int = 8) -> Pool:
    return Pool(POOL, tuple(Endpoint(each, f"http://{each}:1", max_concurrent=slots) for each in ids))


def extra(name: str) -> Endpoint:
    return endpoint_from(POOL, {"id": name, "url": f"http://{name}:1"})


class Worker:
    """One that serves a pool by a file of its own. Its looks are a check apart."""

    def __init__(self, store: Store, *ids: str, slots: int = 8) -> None:
        self.store, self.now = store, 1000.0
        self.registration = Registration(store, lambda: self.now)
        self.file = pool(*ids, slots=slots)
        self.take(self.file)

    def take(self, file: Pool) -> None:
        """The file, and what was added at run time."""
        self.file = file
        whole = self.registration.with_added(Config(pools={POOL: file}))
        self.registration.serve(whole.pools.values())
        self.registration.ask([POOL])
        self.registration.register()

    def leave(self) -> None:
        self.registration.leave(POOL)
        self.registration.register()

    def look(self) -> None:
        """As often as it takes until nothing is new, which it must not take long."""
        self.now += CHECK_S
        for _ in range(3):
            revised = self.registration.look()[POOL].revised
            if revised:
                self.take(self.file)
            self.registration.register()
            if not revised:
                return
        raise AssertionError("new at each look")


def endpoints(store: Store) -> dict[str, str]:
    """Those in use, with their slots."""
    found = {}
    for name in sorted(store.pipelined([("SMEMBERS", store.keys.endpoints(POOL))])[0]):
        on, cap = store.pipelined([("HMGET", store.keys.endpoint(POOL, name.decode()), "on", "cap")])[0]
        if on == b"1":
            found[name.decode()] = cap.decode()
    return found


def wiped(store: Store) -> None:
    store.pipelined([("FLUSHALL",)])


def test_the_newest_configuration_stands_whoever_looks_first(store: Store) -> None:
    old, new = Worker(store, "a", "b"), Worker(store, "b", "c", slots=3)
    for first, second in ((old, new), (new, old)):
        wiped(store)
        for _ in range(3):
            first.look()
            second.look()
        assert endpoints(store) == {"b": "3", "c": "3"}


def test_workers_with_one_configuration_stand_in_for_each_other(store: Store) -> None:
    """The first to have it is gone; the second repairs what a third, with an older one, must not."""
    third, first, second = Worker(store, "a"), Worker(store, "b"), Worker(store, "b")
    del first
    store.pipelined([("DEL", store.keys.endpoint(POOL, "b"))])
    third.look()
    assert endpoints(store) == {}
    second.look()
    assert endpoints(store) == {"b": "8"}


def test_who_takes_an_earlier_configuration_again_has_the_newest(store: Store) -> None:
    one, other = Worker(store, "a"), Worker(store, "b")
    one.take(pool("b"))
    one.take(pool("a"))
    other.look()
    assert endpoints(store) == {"a": "8"}


def test_a_pool_that_left_one_file_is_kept_by_who_serves_it(store: Store) -> None:
    leaver, stayer = Worker(store, "a"), Worker(store, "a")
    leaver.leave()
    assert endpoints(store) == {}
    stayer.look()
    assert endpoints(store) == {"a": "8"}
    leaver.leave()  # what still ran there made it say so again
    leaver.registration.forget(POOL)
    assert endpoints(store) == {"a": "8"}


def test_who_leaves_an_old_configuration_takes_nothing_from_the_newer_one(store: Store) -> None:
    leaver = Worker(store, "a")
    Worker(store, "a", "b")
    leaver.leave()
    assert endpoints(store) == {"a": "8", "b": "8"}


def test_looking_writes_nothing_where_nothing_is_lost(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    workers = [Worker(store, "a", "b"), Worker(store, "a", "b"), Worker(store, "a", slots=4)]
    workers.append(Worker(store, "a", "b"))
    add_endpoint(store, POOL, extra("late"))
    for worker in workers:
        worker.look()
    changes = store.raw(lambda client: client.info()["rdb_changes_since_last_save"])
    caplog.clear()
    for worker in workers * 3:
        worker.look()
    assert store.raw(lambda client: client.info()["rdb_changes_since_last_save"]) == changes
    assert caplog.messages == []


def test_an_older_worker_that_sees_an_added_endpoint_first_leaves_the_rest_alone(store: Store) -> None:
    old, new = Worker(store, "a"), Worker(store, "b")
    add_endpoint(store, POOL, extra("late"))
    old.look()
    assert endpoints(store) == {"b": "8"}
    new.look()
    old.look()
    assert endpoints(store) == {"b": "8", "late": "8"}


def test_what_was_added_since_the_look_is_not_taken_for_gone(store: Store) -> None:
    slow, quick = Worker(store, "a"), Worker(store, "a")
    slow.registration.look()
    add_endpoint(store, POOL, extra("late"))
    quick.look()
    slow.registration.ask([POOL])
    slow.registration.register()
    assert endpoints(store) == {"a": "8", "late": "8"}


def test_what_was_added_at_run_time_and_forgotten_is_put_back(store: Store) -> None:
    workers = [Worker(store, "a"), Worker(store, "a")]
    add_endpoint(store, POOL, extra("late"))
    for worker in workers:
        worker.look()
    wiped(store)
    store.pipelined([("SADD", store.keys.pools(), POOL)])
    add_endpoint(store, POOL, extra("newer"))  # before anybody has seen that all is gone
    for worker in workers * 2:
        worker.look()
    assert endpoints(store) == {"a": "8", "late": "8", "newer": "8"}
    remove_endpoint(store, POOL, "late")
    for worker in workers * 2:
        worker.look()
    assert endpoints(store) == {"a": "8", "newer": "8"}


def test_what_was_removed_at_run_time_does_not_come_back_with_a_backup(store: Store) -> None:
    worker = Worker(store, "a")
    add_endpoint(store, POOL, extra("late"))
    worker.look()
    names = [store.keys.pool(POOL), f"{store.keys.prefix}:x:registered:{POOL}"]
    backup = dict(zip(names, store.pipelined([("DUMP", name) for name in names]), strict=True))
    remove_endpoint(store, POOL, "late")
    worker.look()
    for name, value in backup.items():
        store.pipelined([("RESTORE", name, 0, value, "REPLACE")])
    worker.look()
    assert registered(store, POOL) == ()
    assert endpoints(store) == {"a": "8"}


def test_what_rests_still_rests_when_it_is_written_again(store: Store) -> None:
    worker = Worker(store, "a", "b")
    store.run(store.scripts.drain(POOL, "a", True))
    worker.look()
    wiped(store)
    worker.look()
    drained = [store.pipelined([("HGET", store.keys.endpoint(POOL, each), "drain")])[0] for each in "ab"]
    assert drained == [b"1", None]
    store.run(store.scripts.drain(POOL, "a", False))
    worker.look()
    wiped(store)
    worker.look()
    assert store.pipelined([("HGET", store.keys.endpoint(POOL, "a"), "drain")]) == [None]
