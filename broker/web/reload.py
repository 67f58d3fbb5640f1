"""Routes: asking the workers to read their configuration again, and what they said."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final

from broker import admin
from broker.fields import as_number, as_object
from broker.inspect import Plainly
from broker.store import Store
from broker.web.errors import ApiError
from broker.web.operations import Api, Asked, Operation
from broker.web.schema import record, schema_of

PATIENCE_S: Final = 5.0  # supervisors look twice a second
LOOK_EVERY_S: Final = 0.1
NOBODY: Final = "no worker answered within {:g} s; is `headrace worker` running? It reads the file when it starts"


@dataclass(frozen=True, slots=True)
class Reloaded(Plainly):
    """What a pool's workers answered. `loaded`: endpoints in use; `answered`: False when nobody did in time."""

    success: bool
    message: str
    loaded: int
    answered: bool


async def reload_pool(store: Store, pool: str, patience: float = PATIENCE_S) -> Reloaded:
    """Asks the workers of a pool that is in Redis, and waits for the first answer."""
    key = store.keys.pool(pool)
    (asked,) = await asyncio.to_thread(store.pipelined, [("HINCRBY", key, "reload_asked", 1)])
    end = time.monotonic() + patience
    while time.monotonic() < end:
        (told,) = await asyncio.to_thread(store.pipelined, [("HGET", key, "reload_result")])
        answer = as_object(told)
        if (as_number(answer.get("asked")) or 0) >= int(asked):
            message = "; ".join(str(answer.get("message", "")).splitlines())
            return Reloaded(bool(answer.get("success")), message, int(as_number(answer.get("loaded")) or 0), True)
        await asyncio.sleep(LOOK_EVERY_S)
    return Reloaded(False, NOBODY.format(patience), 0, False)


async def reload(api: Api, asked: Asked) -> Any:
    pools = await asyncio.to_thread(admin.pools, api.store)
    if not pools:
        raise ApiError(409, "no_worker", "no pool is registered; start `headrace worker`")
    answers = await asyncio.gather(*(reload_pool(api.store, pool) for pool in pools))
    told = {pool: answer.to_dict() for pool, answer in zip(pools, answers, strict=True)}
    # A pool that nobody serves now (a finished run's, one that left the file) has nobody to refuse.
    heard = {pool: answer for pool, answer in zip(pools, answers, strict=True) if answer.answered}
    if not heard:
        raise ApiError(409, "no_worker", NOBODY.format(PATIENCE_S))
    refused = [f"{pool}: {answer.message}" for pool, answer in heard.items() if not answer.success]
    if refused:
        raise ApiError(409, "refused", "; ".join(refused))
    return {"success": True, "pools": told}


OPERATIONS: Final = (
    Operation(
        "POST", "/api/reload", reload, "Have the workers read their configuration again: all of it, or nothing",
        record({"success": {"enum": [True]}, "pools": {"type": "object", "additionalProperties": schema_of(Reloaded)}}),
        errors=(409,), waits=True,
    ),
)  # fmt: skip
