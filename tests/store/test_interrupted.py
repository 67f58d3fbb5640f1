"""An exception out of a signal handler, at every step that the client's Python code takes: it ends its call, no other.

A trace function raises it: the interpreter calls that at the start of functions and of lines. It calls handlers of
signals at fewer places; above all not between the end of a `with` block and the giving back of a lock, where a line
starts as well.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from broker import Broker, ResultTimeout
from broker.mailbox import Mailbox
from broker.store import Store
from tests.support.player import register, serve
from tests.support.producer import POOL, ask

PATIENCE = 100.0  # seconds; far more than all of it takes, less than a test may


class Interrupted(Exception):
    pass


def in_finalizer(frame: FrameType | None) -> bool:
    """The collector may run one at any step, of any object. What is raised there is reported, and ends no call."""
    while frame and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def line_of(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def at_each_step(call: Callable[[], object], files: tuple[str, ...], check: Callable[[], object]) -> int:
    """Calls it again and again, each time interrupted one step later, until it gets to its end. How many steps."""
    step = 0
    while True:
        left = step

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.endswith(files) or in_finalizer(frame):
                return None
            if event == "line" and line_of(frame).startswith("with "):
                return trace
            left -= 1
            if left < 0:
                raise Interrupted
            return trace

        sys.settrace(trace)
        try:
            call()
        except Interrupted:
            pass
        else:
            return step
        finally:
            sys.settrace(None)
        check()
        step += 1


def in_time(work: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)  # it may hang
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "a call never came back"
    assert found, "a call failed; its error stands above"
    return found[0]


def test_no_call_loses_what_the_next_one_needs(broker: Broker, store: Store) -> None:
    """A turn, a connection in order: every answer is that of its own question."""
    register(store, POOL)
    waiting, canceled = broker.enqueue(POOL, ask()), broker.enqueue(POOL, ask())
    assert canceled.cancel()

    def check() -> None:
        assert (canceled.status(), waiting.status()) == ("canceled", "queued")

    files = ("broker/client.py", "broker/connection.py", "broker/links.py", "redis/connection.py", "threading.py")
    assert in_time(lambda: at_each_step(waiting.status, files, check)) > 32


def test_no_wait_keeps_the_messages_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch, broker: Broker, store: Store
) -> None:
    monkeypatch.setattr("broker.core.SILENCE", PATIENCE)  # nobody looks; a message has to come
    register(store, POOL)
    never = broker.enqueue("other", ask())

    def wait() -> None:
        with suppress(ResultTimeout):
            never.result(timeout=0.01)

    def check() -> None:
        task = broker.enqueue(POOL, ask())
        worker = threading.Timer(0.02, lambda: serve(store, POOL))
        worker.start()
        assert task.result(timeout=PATIENCE).ok
        worker.join()

    files = ("broker/client.py", "broker/mailbox.py", "broker/connection.py", "broker/links.py", "threading.py")
    assert in_time(lambda: at_each_step(wait, files, check)) > 50


def test_another_takes_over_from_a_leader_that_never_clears_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread is not seen again, its ticket stays: within some seconds a waiting one pops."""
    monkeypatch.setattr("broker.mailbox.BLOCK", 0.05)
    monkeypatch.setattr("broker.mailbox.LEADS_FOR", 0.1)
    pops: list[float] = []
    mailbox = Mailbox(lambda most, seconds: pops.append(seconds) or ["second"])  # type: ignore[func-returns-value]

    def vanish(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_name == "_hand_over":
            raise Interrupted
        return vanish

    def lead() -> int:
        ticket = mailbox.expect("first").__enter__()
        sys.settrace(vanish)
        with suppress(Interrupted):
            mailbox.wait(ticket, 0.01)
        return 1

    assert in_time(lead) == 1
    before = len(pops)
    with mailbox.expect("second") as ticket:
        assert in_time(lambda: int(mailbox.wait(ticket, PATIENCE / 2))) == 1
    assert len(pops) > before
