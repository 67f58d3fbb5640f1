"""headrace, the queue side: enqueue once, capacity pulls.

>>> from broker import Broker, Request
>>> with Broker("redis://localhost:6379/0") as broker:
...     task = broker.enqueue("llm", Request("POST", "/v1/chat/completions", json={...}))
...     result = task.result(timeout=60)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from broker.client import AsyncBroker, AsyncTask, Broker, Task
    from broker.errors import (
        BrokerError,
        BrokerUnavailable,
        Canceled,
        ConfigError,
        DeadLettered,
        Expired,
        HeadraceError,
        IdempotencyConflict,
        InvalidTask,
        PayloadTooLarge,
        Poisoned,
        QueueFull,
        ResultTimeout,
        TaskFailed,
        UnknownTask,
    )
    from broker.task import NpuTask, Request, Result, TaskOptions

_HOMES = {
    "broker.client": ("AsyncBroker", "AsyncTask", "Broker", "Task"),
    "broker.errors": (
        "BrokerError", "BrokerUnavailable", "Canceled", "ConfigError", "DeadLettered", "Expired", "HeadraceError",
        "IdempotencyConflict", "InvalidTask", "PayloadTooLarge", "Poisoned", "QueueFull", "ResultTimeout", "TaskFailed",
        "UnknownTask",
    ),
    "broker.task": ("NpuTask", "Request", "Result", "TaskOptions"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncBroker", "AsyncTask", "Broker", "BrokerError", "BrokerUnavailable", "Canceled", "ConfigError", "DeadLettered",
    "Expired", "HeadraceError", "IdempotencyConflict", "InvalidTask", "NpuTask", "PayloadTooLarge", "Poisoned",
    "QueueFull", "Request", "Result", "ResultTimeout", "Task", "TaskFailed", "TaskOptions", "UnknownTask",
]  # fmt: skip


def __getattr__(name: str) -> Any:  # loaded on first use: `headrace --version` needs neither redis nor asyncio
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'broker' has no attribute {name!r}")
