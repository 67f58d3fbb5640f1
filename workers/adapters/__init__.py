"""How a task becomes a request to one endpoint, and what its answer means. One adapter per endpoint, built once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from broker.configmodel import Endpoint, Pool
from broker.task import Work
from workers.adapters.http import HttpAdapter
from workers.adapters.npu import NpuAdapter
from workers.errors import AttemptFailed
from workers.transport.types import Answer, Call

__all__ = ["Adapter", "HttpAdapter", "NpuAdapter", "make_adapter"]


class Adapter(Protocol):
    """Does no I/O."""

    def call(self, work: Work, task_id: str, attempt: int) -> Call:
        """The request of the `attempt`-th (1-based) attempt. Raises AttemptFailed 'task_error' if there can be none."""

    def check_answer(self, work: Work, answer: Answer) -> None:
        """Returns if the answer is a success; raises AttemptFailed otherwise."""

    def blame(self, work: Work, failure: AttemptFailed) -> AttemptFailed:
        """The failure, with the kind that fits this task: a limit it chose itself is not the endpoint's fault."""


def make_adapter(endpoint: Endpoint, pool: Pool, *, clock: Callable[[], float] = time.time) -> Adapter:
    """The adapter the pool names. `clock` gives Unix seconds, for signatures and Retry-After dates."""
    make = NpuAdapter if pool.adapter == "npu" else HttpAdapter
    return make(endpoint, pool, clock=clock)
