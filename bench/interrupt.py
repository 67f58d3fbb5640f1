"""Ctrl-C, `kill` and a closed terminal end a run in order: its servers and its folder go with it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_deferring = 0
_pending = False


def arm() -> None:
    """From here the first of SIGNALS raises KeyboardInterrupt; those that follow find the clean-up under way."""
    for each in SIGNALS:
        signal.signal(each, _interrupt)


@contextmanager
def deferred() -> Iterator[None]:
    """For the moment in which a process runs already but nobody has noted yet that it is to be ended."""
    global _deferring
    _deferring += 1
    try:
        yield
    finally:
        _deferring -= 1
    if _pending and not _deferring:
        raise KeyboardInterrupt


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    global _pending
    for each in SIGNALS:
        signal.signal(each, _ignore)  # not SIG_IGN, which processes started from here would inherit
    if _deferring:
        _pending = True
        return
    raise KeyboardInterrupt


def _ignore(_signum: int, _frame: FrameType | None) -> None:
    return
