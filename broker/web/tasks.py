"""Routes: one task."""

from __future__ import annotations

import logging
from typing import Any, Final

from broker import admin
from broker.core import unknown
from broker.web.operations import Api, Asked, Operation, Param
from broker.web.schema import record, schema_of

log = logging.getLogger("headrace.api")

TEXT: Final = {"type": "string"}


def show_task(api: Api, asked: Asked) -> Any:
    return admin.task_show(api.store, asked.path["task"], payload=asked.query["payload"]).to_dict()


def explain_task(api: Api, asked: Asked) -> Any:
    return admin.task_explain(api.store, asked.path["task"]).to_dict()


def cancel_task(api: Api, asked: Asked) -> Any:
    task = asked.path["task"]
    count = admin.cancel(api.store, [task])
    if count.unknown:
        raise unknown(task)
    if count.canceled:
        log.info("task %s is canceled", task)
    state = "canceled" if count.canceled else admin.task_show(api.store, task).state
    return {"id": task, "canceled": bool(count.canceled), "state": state}


_AT = "/api/tasks/{task}"

OPERATIONS: Final = (
    Operation(
        "GET", _AT, show_task, "What became of a task, attempt by attempt", schema_of(admin.TaskView),
        query=(Param("payload", "flag", "with its work and its last answer", False),), errors=(404,),
    ),
    Operation("GET", f"{_AT}/explain", explain_task, "Why it waits", schema_of(admin.Explanation), errors=(404,)),
    Operation(
        "POST", f"{_AT}/cancel", cancel_task, "Take it back, running or not; see `canceled`",
        record({"id": TEXT, "canceled": {"type": "boolean"}, "state": TEXT}), errors=(404,),
    ),
)  # fmt: skip
