"""What operators do and see, over a Store. The command line, the management API and `Broker.store` users call this.

Looking (`pools`, `status`, `task_show`, `task_explain`, `dead_list`, `dead_show`) changes nothing in Redis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker import core
from broker.deadletters import DeadLetter, Filter, Page, Redriven, dead_count, dead_list, purge, redrive
from broker.explain import Explanation, Reason, task_explain
from broker.fields import as_text
from broker.flows import drive
from broker.inspect import EndpointStatus, Plainly, PoolStatus, pools, status
from broker.task import check_task_id
from broker.taskview import Attempt, TaskView, task_show

if TYPE_CHECKING:
    from broker.store import Store

__all__ = [
    "pools",
    "status",
    "PoolStatus",
    "EndpointStatus",
    "task_show",
    "TaskView",
    "Attempt",
    "task_explain",
    "Explanation",
    "Reason",
    "cancel",
    "CancelCount",
    "dead_list",
    "dead_show",
    "dead_count",
    "redrive",
    "purge",
    "DeadLetter",
    "Filter",
    "Page",
    "Redriven",
]


@dataclass(frozen=True, slots=True)
class CancelCount(Plainly):
    """`canceled` now or earlier; `settled`: another outcome stands; `unknown`: no such task."""

    canceled: int = 0
    settled: int = 0
    unknown: int = 0


def dead_show(store: Store, task_id: str) -> TaskView:
    """A task with its work and the last answer's body. Raises UnknownTask."""
    return task_show(store, task_id, payload=True)


def cancel(store: Store, ids: Iterable[str]) -> CancelCount:
    """Cancels tasks, whatever their pools."""
    wanted = [check_task_id(task_id) for task_id in ids]
    by_pool: dict[str, list[str]] = {}
    unknown = 0
    origins = store.pipelined([("HGET", store.keys.job(task_id), "origin") for task_id in wanted])
    for task_id, origin in zip(wanted, origins, strict=True):
        if origin is None:
            unknown += 1
        else:
            by_pool.setdefault(as_text(origin), []).append(task_id)
    canceled = settled = 0
    for pool, named in by_pool.items():
        limits = drive(store, core.pool_limits(store.keys, pool))
        for done in drive(store, core.cancel(store.scripts, pool, named, limits.result_ttl)):
            canceled += done
            settled += not done
    return CancelCount(canceled, settled, unknown)
