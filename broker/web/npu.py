"""Routes that existing callers of an NPU worker pool know, field for field."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from broker import admin
from broker.catalog import with_addresses
from broker.inspect import PoolStatus
from broker.web.errors import ApiError
from broker.web.operations import Api, Asked, Operation
from broker.web.reload import reload_pool
from broker.web.schema import array, or_null, record

POOL: Final = "npu"
ENDED: Final = ("ok", "dead", "poison")  # what has run to an end; an expired or canceled task says nothing of the pool

WHOLE: Final = {"type": "integer"}
NUMBER: Final = {"type": "number"}
TEXT: Final = {"type": "string"}
FLAG: Final = {"type": "boolean"}


def npu_stats(api: Api, asked: Asked) -> Any:
    pool, rows = _read(api)
    processed = sum(pool.counts.get(outcome, 0) for outcome in ENDED)
    served, run_time = sum(each.served for each in pool.endpoints), sum(each.run_time for each in pool.endpoints)
    return {
        "total_workers": len(rows),
        "healthy_workers": sum(_healthy(row) and row["breaker"] != "open" for row in rows),
        "total_tasks_processed": processed,
        "active_tasks": pool.running,
        "avg_task_duration_ms": round(run_time * 1000 / served, 3) if served else 0.0,
        "success_rate": round(pool.counts.get("ok", 0) / processed, 6) if processed else 1.0,
    }


def npu_workers(api: Api, asked: Asked) -> Any:
    _, rows = _read(api)
    return {
        "workers": [
            {
                "id": row["id"],
                "url": row["url"] or "",
                "priority": row["priority"],
                "enabled": row["enabled"],
                "healthy": _healthy(row),
                "circuit_state": row["breaker"].upper(),
                "active_tasks": row["in_flight"],
                "total_requests": row["served"] + row["failed"],
                "failures": row["failed"],
                "last_health_check": row["checked_at"],
            }
            for row in rows
        ]
    }


async def npu_reload(api: Api, asked: Asked) -> Any:
    def count() -> tuple[str, int]:
        status, rows = _read(api)
        return status.pool, len(rows)

    pool, workers = await asyncio.to_thread(count)
    if pool not in await asyncio.to_thread(admin.pools, api.store):
        message = f"no worker has registered pool {pool!r}; start `headrace worker`"
        return {"success": False, "workers_loaded": 0, "message": message}
    answer = await reload_pool(api.store, pool)
    loaded = answer.loaded if answer.success else workers
    return {"success": answer.success, "workers_loaded": loaded, "message": answer.message}


def _healthy(row: dict[str, Any]) -> bool:
    """Until a check fails an enabled endpoint counts as healthy, as it always did on these routes."""
    return bool(row["enabled"]) and row["healthy"] is not False


def _read(api: Api) -> tuple[PoolStatus, list[dict[str, Any]]]:
    """The pool `npu`, else the only one with the npu adapter. Raises ApiError."""
    adapters = [name for name, pool in api.config.pools.items() if pool.adapter == "npu"]
    known = api.catalog.pools(api.store)
    pool = POOL if POOL in known else adapters[0] if len(adapters) == 1 else None
    if pool is None:
        raise ApiError(404, "unknown_pool", f"no pool is called {POOL!r}, nor is there exactly one with adapter: npu")
    status = admin.status(api.store, pool)
    rows = with_addresses(status, api.catalog.endpoints(api.store, pool))
    return status, [row for row in rows if row["state"] != "removed"]


OPERATIONS: Final = (
    Operation(
        "GET", "/api/npu/pool/stats", npu_stats, "The NPU pool in numbers (as existing callers know it)",
        record(
            {
                "total_workers": WHOLE, "healthy_workers": WHOLE, "total_tasks_processed": WHOLE, "active_tasks": WHOLE,
                "avg_task_duration_ms": NUMBER, "success_rate": NUMBER,
            }
        ),
        errors=(404,),
    ),
    Operation(
        "GET", "/api/npu/pool/workers", npu_workers, "Its endpoints (as existing callers know them)",
        record({"workers": array(record(
            {
                "id": TEXT, "url": TEXT, "priority": WHOLE, "enabled": FLAG, "healthy": FLAG,
                "circuit_state": {"enum": ["CLOSED", "OPEN", "HALF_OPEN"]}, "active_tasks": WHOLE,
                "total_requests": WHOLE, "failures": WHOLE, "last_health_check": or_null(NUMBER),
            }
        ))}),
        errors=(404,),
    ),
    Operation(
        "POST", "/api/npu/pool/reload", npu_reload, "Have its workers read the configuration again; see `success`",
        record({"success": FLAG, "workers_loaded": WHOLE, "message": TEXT}), errors=(404,), waits=True,
    ),
)  # fmt: skip
