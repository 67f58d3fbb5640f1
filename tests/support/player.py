"""Plays a worker process with the scripts alone: no HTTP, no event loop. For tests of the producers' side."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from broker.outcome import encode_answer
from broker.rqjob import decode_data
from broker.scripts import Claimed, DeadLetter, Finish, Offer, Retry, Settled
from broker.store import Store
from broker.task import Request

Settle = Finish | DeadLetter | Retry
Act = Callable[[Claimed], Settle]



def echo(claimed: Claimed) -> Finish:
    """Outcome ok; the body is the request's JSON."""
    work = decode_data(claimed.data, 1 << 30).work
    body = json.dumps(work.json if isinstance(work, Request) else dict(work.data)).encode()
    answer = encode_answer(200, {"content-type": "application/json"}, claimed.lease.endpoint)
    return Finish(claimed.lease, answer, body)


def refuse(claimed: Claimed, reason: str = "http_400: no such model", status: int = 400) -> DeadLetter:
    """A dead letter with an answer, a body and a line of history."""
    answer = encode_answer(status, {}, claimed.lease.endpoint)
    at = round(claimed.claimed_at, 3)
    history = {"attempt": claimed.attempts + 1, "endpoint": claimed.lease.endpoint, "kind": "http_4xx"}
    history |= {"status": status, "error": reason, "started": at, "ended": at}
    return DeadLetter(claimed.lease, "ignore", reason, answer, b'{"error": "no"}', json.dumps(history))


def register(store: Store, pool: str, slots: int = 64, endpoints: Sequence[str] = ("vm1",), **policies: int) -> None:
    """Endpoints of priority 5 and no capabilities."""
    rows = [(endpoint, 5, slots, True, ()) for endpoint in endpoints]
    store.run(store.scripts.register(pool, policies, rows))


def listen(store: Store, pool: str) -> None:
    """A process that waits for tasks, and has no room for any: nothing is decided by it."""
    store.pipelined([("HSET", store.keys.waiting(pool), "listener", f"{int(time.time() * 1000)}|0|")])


def claim(store: Store, pool: str, most: int = 64, endpoint: str = "vm1", process: str = "p1") -> list[Claimed]:
    offers = [Offer(endpoint, most, 0)]
    command = store.scripts.claim(pool, process, offers, lease=30.0, most=most)
    return store.run(command).tasks


def settle(store: Store, pool: str, items: Sequence[Settle]) -> list[Settled]:
    """The words that the scripts answered, kind by kind."""
    scripts = store.scripts
    finished = [item for item in items if isinstance(item, Finish)]
    dead = [item for item in items if isinstance(item, DeadLetter)]
    retried = [item for item in items if isinstance(item, Retry)]
    commands = []
    if finished:
        commands.append(scripts.finish(pool, finished, result_ttl=60.0))
    if dead:
        commands.append(scripts.dead_letter(pool, dead, dead_letter_ttl=600.0, result_ttl=60.0))
    if retried:
        commands.append(scripts.retry(pool, retried))
    return [word for words in store.run_many(commands) for word in words]


def serve(store: Store, pool: str, act: Act = echo, most: int = 64) -> int:
    """Runs what waits now; returns how many."""
    claimed = claim(store, pool, most)
    settle(store, pool, [act(task) for task in claimed])
    return len(claimed)


@contextmanager
def serving(url: str, pool: str, act: Act = echo, most: int = 64) -> Iterator[None]:
    """A thread that answers its doorbell until the block ends."""
    store = Store(url)
    over = threading.Event()
    bell = store.keys.bell("p1")

    def loop() -> None:
        while not over.is_set():
            if not serve(store, pool, act, most):
                store.raw(lambda client: client.blpop([bell], 1))

    register(store, pool)
    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        store.pipelined([("RPUSH", bell, "work"), ("EXPIRE", bell, 60)])
        thread.join(10)
        store.close()
        assert not thread.is_alive()
