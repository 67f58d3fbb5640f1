"""Routes: pools, their endpoints and dead letters."""

from __future__ import annotations

import logging
from typing import Any, Final

from broker import admin, registered
from broker.catalog import new_endpoint, unregistered, with_addresses
from broker.deadletters import MOST_SCANNED
from broker.inspect import EndpointStatus, PoolStatus
from broker.taskview import TaskView
from broker.web.errors import ApiError
from broker.web.operations import TASK_ID, Api, Asked, Operation, Param, Schema
from broker.web.schema import array, or_null, record, schema_of

log = logging.getLogger("headrace.api")

MOST_IDS: Final = 10_000

TEXT: Final[Schema] = {"type": "string"}
WHOLE: Final[Schema] = {"type": "integer"}
ENDPOINT: Final = record(
    {
        **schema_of(EndpointStatus)["properties"],
        "url": or_null(TEXT),
        "labels": {"type": "object", "additionalProperties": TEXT},
        "source": {"enum": ["file", "added", None]},
    }
)
POOL: Final = record({**schema_of(PoolStatus)["properties"], "adapter": or_null(TEXT), "endpoints": array(ENDPOINT)})
COUNTS: Final = (
    "waiting", "delayed", "running", "dead", "finished", "canceled", "endpoints", "endpoints_up", "processes",
)  # fmt: skip
POOLS: Final = record(
    {"pools": array(record({"pool": TEXT, "adapter": or_null(TEXT), **dict.fromkeys(COUNTS, WHOLE)}))}
)
NAME: Final[Schema] = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
LABEL: Final[Schema] = {"type": "string", "maxLength": 200}
NEW_ENDPOINT: Final[Schema] = record(
    {
        "id": NAME,
        "url": {"type": "string", "minLength": 8, "maxLength": 2000},
        "priority": {"type": "integer", "minimum": 1, "maximum": 10},
        "max_concurrent": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 65_535}, {"enum": ["auto"]}]},
        "capabilities": {"type": "array", "maxItems": 100, "items": NAME},
        "labels": {"type": "object", "maxProperties": 100, "additionalProperties": LABEL},
    },
    optional=("id", "priority", "max_concurrent", "capabilities", "labels"),
)
FILTER: Final[dict[str, Schema]] = {
    "reason": {"type": "string", "maxLength": 200},
    "endpoint": {"type": "string", "maxLength": 64},
    "outcome": {"enum": ["dead", "poison"]},
}
IDS: Final[Schema] = {"type": "array", "minItems": 1, "maxItems": MOST_IDS, "items": TASK_ID}
CHOICE: Final[Schema] = record(
    {"ids": IDS, "all": {"enum": [True]}, **FILTER},
    optional=("ids", "all", *FILTER),
)


def list_pools(api: Api, asked: Asked) -> Any:
    return {"pools": [_brief(api, admin.status(api.store, pool)) for pool in api.catalog.pools(api.store)]}


def pool_stats(api: Api, asked: Asked) -> Any:
    status = admin.status(api.store, api.pool(asked))
    return {**status.to_dict(), "adapter": _adapter(api, status.pool), "endpoints": _endpoints(api, status)}


def list_endpoints(api: Api, asked: Asked) -> Any:
    return {"endpoints": _endpoints(api, admin.status(api.store, api.pool(asked)))}


def add_endpoint(api: Api, asked: Asked) -> Any:
    pool = api.pool(asked)
    endpoint = new_endpoint(pool, asked.body, "request")
    known = api.catalog.endpoints(api.store, pool)
    if endpoint.id in known:
        where = api.catalog.place(pool, endpoint.id) or "added at run time"
        raise ApiError(409, "exists", f"endpoint {endpoint.id!r} of pool {pool!r} is there already ({where})")
    registered.add_endpoint(api.store, pool, endpoint, api.config)
    log.info("pool %s: endpoint %s added at run time", pool, endpoint.id)
    known[endpoint.id] = (endpoint, "added")
    status = admin.status(api.store, pool)
    (row,) = [each for each in with_addresses(status, known) if each["id"] == endpoint.id]
    return row


def remove_endpoint(api: Api, asked: Asked) -> Any:
    pool, endpoint = api.pool(asked), asked.path["endpoint"]
    place = api.catalog.place(pool, endpoint)
    if not registered.was_added(api.store, pool, endpoint):
        if place:
            raise ApiError(409, "in_file", f"endpoint {endpoint!r} is in {place}: remove it there, or drain it")
        raise _unknown_endpoint(pool, endpoint)
    registered.remove_endpoint(api.store, pool, endpoint)
    stays = f"; that of {place} stays" if place else ""
    log.info("pool %s: endpoint %s, added at run time, is removed%s", pool, endpoint, stays)
    return {"id": endpoint, "removed": True}


def drain_endpoint(api: Api, asked: Asked) -> Any:
    return _change(api, asked, "drained")


def undrain_endpoint(api: Api, asked: Asked) -> Any:
    return _change(api, asked, "put back in use")


def reset_endpoint(api: Api, asked: Asked) -> Any:
    return _change(api, asked, "reset: breaker closed, pause ended")


def _change(api: Api, asked: Asked, what: str) -> Any:
    pool, endpoint, scripts = api.pool(asked), asked.path["endpoint"], api.store.scripts
    if what.startswith("reset"):
        word = api.store.run(scripts.reset(pool, endpoint))
    else:
        word = api.store.run(scripts.drain(pool, endpoint, what == "drained"))
    if word == "unknown":
        if endpoint in api.catalog.endpoints(api.store, pool):
            raise ApiError(409, "not_registered", f"endpoint {endpoint!r}: no worker has registered it in Redis yet")
        raise _unknown_endpoint(pool, endpoint)
    log.info("pool %s: endpoint %s is %s", pool, endpoint, what)
    rows = _endpoints(api, admin.status(api.store, pool))
    return next(row for row in rows if row["id"] == endpoint)


def list_dead(api: Api, asked: Asked) -> Any:
    query = asked.query
    match = admin.Filter(query["reason"], query["endpoint"], query["outcome"])
    page = admin.dead_list(api.store, api.pool(asked), query["limit"], match=match, cursor=query["cursor"])
    return page.to_dict()


def show_dead(api: Api, asked: Asked) -> Any:
    pool, task = api.pool(asked), asked.path["task"]
    found = admin.dead_show(api.store, task)
    if found.pool != pool or found.state not in ("dead", "poison"):
        raise ApiError(404, "unknown_task", f"task {task}: no dead letter of pool {pool!r}; it is {found.state}")
    return found.to_dict()


def redrive_dead(api: Api, asked: Asked) -> Any:
    pool, (ids, match) = api.pool(asked), _choice(asked)
    done = admin.redrive(api.store, pool, ids, match=match)
    log.info("pool %s: %d dead letters queued again", pool, done.queued)
    return done.to_dict()


def purge_dead(api: Api, asked: Asked) -> Any:
    pool, (ids, match) = api.pool(asked), _choice(asked)
    deleted = admin.purge(api.store, pool, ids, match=match)
    log.info("pool %s: %d dead letters deleted", pool, deleted)
    return {"deleted": deleted}


def _choice(asked: Asked) -> tuple[list[str] | None, admin.Filter]:
    ids, everything = asked.body.get("ids"), asked.body.get("all", False)
    words = {name: asked.body[name] for name in FILTER if name in asked.body}
    if (ids is None) == (not everything):
        raise ApiError(400, "invalid", 'name the tasks: {"ids": [...]}, or {"all": true}, with a filter if you like')
    if ids is not None and words:
        raise ApiError(400, "invalid", f"{', '.join(words)}: a filter goes with all, not with ids")
    return ids, admin.Filter(**words)


def _unknown_endpoint(pool: str, endpoint: str) -> ApiError:
    return ApiError(404, "unknown_endpoint", f"pool {pool!r} has no endpoint {endpoint[:80]!r}")


def _adapter(api: Api, pool: str) -> str | None:
    configured = api.config.pools.get(pool)
    return None if configured is None else configured.adapter


def _endpoints(api: Api, status: PoolStatus) -> list[dict[str, Any]]:
    return with_addresses(status, api.catalog.endpoints(api.store, status.pool))


def _brief(api: Api, status: PoolStatus) -> dict[str, Any]:
    known = api.catalog.endpoints(api.store, status.pool)
    rows = {each.id: each for each in status.endpoints}
    rows |= {name: unregistered(endpoint) for name, (endpoint, _) in known.items() if name not in rows}
    return {
        "pool": status.pool,
        "adapter": _adapter(api, status.pool),
        "waiting": status.backlog,
        "delayed": status.delayed,
        "running": status.running,
        "dead": status.dead,
        "finished": status.finished,
        "canceled": status.canceled,
        "endpoints": len(rows),
        "endpoints_up": sum(each.up for each in rows.values()),
        "processes": len(status.processes),
    }


_AT = "/api/pools/{pool}"
_ONE = f"{_AT}/endpoints/{{endpoint}}"
_DEAD_QUERY: Final = (
    Param("limit", "whole", "at most so many", 100, 1, MOST_SCANNED // 10),
    Param("cursor", "text", "from an earlier page; it continues there"),
    Param("reason", "text", "a part of the reason", ""),
    Param("endpoint", "text", "a part of the endpoint's id", ""),
    Param("outcome", "text", "dead or poison", "", words=("dead", "poison")),
)
_PAGE: Final = schema_of(admin.Page)
_LIST: Final = record({"endpoints": array(ENDPOINT)})
_SEEN: Final = (404, 409)

OPERATIONS: Final = (
    Operation("GET", "/api/pools", list_pools, "Every pool, in numbers", POOLS),
    Operation("GET", f"{_AT}/stats", pool_stats, "A pool: queue, counters, endpoints", POOL, errors=(404,)),
    Operation(
        "GET", f"{_AT}/endpoints", list_endpoints, "Its endpoints, preferred first", _LIST, errors=(404,),
    ),
    Operation(
        "POST", f"{_AT}/endpoints", add_endpoint, "Add an endpoint at run time; it survives restarts", ENDPOINT, 201,
        body=NEW_ENDPOINT, errors=_SEEN,
    ),
    Operation(
        "DELETE", _ONE, remove_endpoint, "Remove one that was added at run time; what runs on it finishes",
        record({"id": TEXT, "removed": {"enum": [True]}}), errors=_SEEN,
    ),
    Operation("POST", f"{_ONE}/drain", drain_endpoint, "No more tasks; what runs finishes", ENDPOINT, errors=_SEEN),
    Operation("POST", f"{_ONE}/undrain", undrain_endpoint, "Tasks again", ENDPOINT, errors=_SEEN),
    Operation("POST", f"{_ONE}/reset", reset_endpoint, "Close its breaker, end its pause", ENDPOINT, errors=_SEEN),
    Operation("GET", f"{_AT}/dead", list_dead, "Dead letters, newest first", _PAGE, query=_DEAD_QUERY, errors=(404,)),
    Operation(
        "POST", f"{_AT}/dead/redrive", redrive_dead, "Put dead letters back on the queue", schema_of(admin.Redriven),
        body=CHOICE, errors=(404,), bulk=True,
    ),
    Operation(
        "POST", f"{_AT}/dead/purge", purge_dead, "Delete dead letters for good", record({"deleted": WHOLE}),
        body=CHOICE, errors=(404,), bulk=True,
    ),
    Operation(
        "GET", f"{_AT}/dead/{{task}}", show_dead, "One of them, with its work and its last answer", schema_of(TaskView),
        errors=(404,),
    ),
)  # fmt: skip
