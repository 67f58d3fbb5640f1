"""What is going on in a pool and its endpoints. Everything here reads; nothing changes.

Times are Unix seconds by the server's clock, None for "not"; `age` and `oldest` are seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from broker.fields import as_count, as_fields, as_int, as_list, as_seconds, as_text
from broker.flows import Flow, Plain, drive
from broker.keys import LAG_FIELD, Keys
from broker.task import PRIORITIES, check_pool, is_pool

if TYPE_CHECKING:
    from broker.store import Store

LIVE_FOR: Final = 30.0  # seconds since an endpoint's workers last renewed, as in lua/select.lua

# Of an endpoint, most lasting first; see EndpointStatus.
STATES: Final = ("removed", "disabled", "draining", "absent", "unhealthy", "open", "paused", "probing", "full", "ready")
State = str


class Plainly:
    """A dataclass that can become JSON."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]  # subclasses are dataclasses


@dataclass(frozen=True, slots=True)
class EndpointStatus(Plainly):
    """One endpoint as all processes see it.

    state     ready | full (every slot taken) | probing (half-open) | paused | open (breaker) | unhealthy (by its last
              check) | absent (no worker for 30 s; in a pool's status also: no process serves the pool) | draining |
              disabled | removed (leaving the configuration)
    breaker   closed, open or half_open; `reason` and `open_until` while it is not closed (open past `open_until`: the
              next task is the probe); `fails` in a row, `opened` times in all
    served, failed   attempts that ended well, or not
    age       seconds since one of its workers renewed its leases; None: never
    healthy   by its last check, at `checked_at`, which said `health_detail`; None: never checked
    slots     how many requests it may have in flight now: `max_concurrent`, fewer while it recovers
    adapts    whether `max_concurrent` is found out (`auto`) rather than given
    run_time  seconds that the attempts in `served` ran, all together
    """

    id: str
    state: State
    priority: int
    max_concurrent: int
    in_flight: int
    capabilities: tuple[str, ...]
    enabled: bool
    served: int
    failed: int
    breaker: str
    fails: int
    opened: int
    reason: str
    open_until: float | None
    paused_until: float | None
    age: float | None
    healthy: bool | None = None
    checked_at: float | None = None
    health_detail: str = ""
    slots: int = 1
    adapts: bool = False
    run_time: float = 0.0

    @property
    def up(self) -> bool:
        """Whether it takes tasks, now or as soon as a slot or its pause ends."""
        return self.state in ("ready", "full", "paused", "probing")


@dataclass(frozen=True, slots=True)
class PoolStatus(Plainly):
    """One pool. `waiting`: tasks that could start, by priority; `oldest`: seconds the longest of them has waited.

    `dead`, `finished`, `canceled` are those that still stand in Redis; `counts` is since the pool exists. `lag`: by
    process, the seconds that its event loop was late, at most, in the last minute.
    """

    pool: str
    waiting: dict[str, int]
    delayed: int
    running: int
    dead: int
    finished: int
    canceled: int
    oldest: float | None
    max_depth: int | None
    counts: dict[str, int]
    endpoints: tuple[EndpointStatus, ...]
    processes: tuple[str, ...]
    workers: int
    lag: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def backlog(self) -> int:
        return sum(self.waiting.values())


# Doors


def pools(store: Store) -> list[str]:
    """The names of registered pools, sorted."""
    return drive(store, pool_names(store.keys))


def status(store: Store, pool: str) -> PoolStatus:
    """An empty picture for a pool that nobody uses. Raises InvalidTask for what cannot be a pool's name."""
    return drive(store, pool_status(store.keys, check_pool(pool)))


# Flows


def pool_names(keys: Keys) -> Flow[list[str]]:
    (names,) = yield Plain([("SMEMBERS", keys.pools())])
    return sorted(name for name in map(as_text, names) if is_pool(name))


def pool_status(keys: Keys, pool: str) -> Flow[PoolStatus]:
    now, endpoints = yield from endpoint_states(keys, pool)
    registries = ("finished", "failed", "canceled")
    record, variants, delayed, waiters, leases, workers, *kept = yield Plain(
        [
            ("HGETALL", keys.pool(pool)),
            ("SMEMBERS", keys.lists(pool)),
            ("ZCARD", keys.registry("scheduled", pool)),
            ("HKEYS", keys.waiting(pool)),
            ("ZRANGE", keys.registry("wip", pool), 0, -1),
            ("SMEMBERS", keys.workers(pool)),
            *(("ZCOUNT", keys.registry(name, pool), f"{now:.3f}", "+inf") for name in registries),
        ]
    )
    waiting, oldest = yield from _waiting(keys, pool, ["", *(as_text(variant) for variant in variants)])
    names = process_names(waiters, leases)
    lag = yield from _lag(keys, [as_text(worker) for worker in workers])
    fields = as_fields(record)
    if not names:
        endpoints = unattended(endpoints)
    return PoolStatus(
        pool=pool,
        waiting=waiting,
        delayed=delayed,
        running=sum(endpoint.in_flight for endpoint in endpoints),
        dead=kept[1],
        finished=kept[0],
        canceled=kept[2],
        oldest=None if oldest is None else round(max(0.0, now - oldest), 3),
        max_depth=as_int(fields.get("max_depth")),
        counts={name[2:]: as_count(value) for name, value in sorted(fields.items()) if name.startswith("n_")},
        endpoints=endpoints,
        processes=tuple(sorted(names)),
        workers=len(workers),
        lag=lag,
    )


def _lag(keys: Keys, workers: Sequence[str]) -> Flow[dict[str, float]]:
    """By process; every worker of a process says the same. `workers`: keys, `<prefix>:worker:<process>.<endpoint>`."""
    mark = keys.worker("")
    by_process = {worker.removeprefix(mark).rpartition(".")[0]: worker for worker in workers}
    replies = yield Plain([("HGET", worker, LAG_FIELD) for worker in by_process.values()])
    found = zip(by_process, replies, strict=True)
    return {process: as_count(late) / 1000 for process, late in sorted(found) if process and late is not None}


def _waiting(keys: Keys, pool: str, variants: Sequence[str]) -> Flow[tuple[dict[str, int], float | None]]:
    """Tasks by priority, and since when the oldest head waits."""
    lists = [keys.queue(pool, variant) for variant in variants]
    ghosts, *replies = yield Plain(
        [
            ("HGETALL", keys.ghosts(pool)),
            *(("LLEN", name) for name in lists),
            *(("LINDEX", name, 0) for name in lists),
        ]
    )
    lengths, heads = replies[: len(lists)], replies[len(lists) :]
    left = {name: as_count(count) for name, count in as_fields(ghosts).items()}
    found: dict[str, int] = dict.fromkeys(PRIORITIES, 0)
    for variant, length in zip(variants, lengths, strict=True):
        priority = variant.partition("+")[0].partition("!")[0] or "normal"
        found[priority] = found.get(priority, 0) + max(0, length - left.get(variant, 0))
    times = yield Plain([("HMGET", keys.job(as_text(head)), "x_at", "x_born") for head in heads if head is not None])
    since = [as_seconds(at or born) for at, born in times]
    return found, min((seen for seen in since if seen is not None), default=None)


def endpoint_states(keys: Keys, pool: str) -> Flow[tuple[float, tuple[EndpointStatus, ...]]]:
    """The server's time, and the endpoints as tasks prefer them: best priority first, then by id."""
    members, (seconds, micros) = yield Plain([("SMEMBERS", keys.endpoints(pool)), ("TIME",)])
    now = int(seconds) + int(micros) / 1e6
    ids = sorted(as_text(member) for member in members)
    replies = yield Plain(
        [
            *(("HGETALL", keys.endpoint(pool, endpoint)) for endpoint in ids),
            *(("ZCARD", keys.slots(pool, endpoint)) for endpoint in ids),
        ]
    )
    rows = zip(ids, replies[: len(ids)], replies[len(ids) :], strict=True)
    found = [_endpoint(endpoint, as_fields(record), in_flight, now) for endpoint, record, in_flight in rows]
    return now, tuple(sorted(found, key=lambda endpoint: (-endpoint.priority, endpoint.id)))


def why_down(keys: Keys, pool: str) -> Flow[str]:
    """Why no endpoint of the pool can take a task, in a few words; "" if one can."""
    _, endpoints = yield from endpoint_states(keys, pool)
    if not endpoints:
        return "none is registered"
    if any(endpoint.up for endpoint in endpoints):
        return ""
    return ", ".join(f"{endpoint.id} {endpoint.state}" for endpoint in endpoints[:5])


# Reading


def _endpoint(endpoint: str, row: Mapping[str, str], in_flight: int, now: float) -> EndpointStatus:
    seen, pause, until = as_seconds(row.get("seen")), as_seconds(row.get("pause")), as_seconds(row.get("until"))
    breaker = row.get("state") or "closed"
    return EndpointStatus(
        id=endpoint,
        state=_state(row, in_flight, now),
        priority=as_count(row.get("priority"), 5),
        max_concurrent=as_count(row.get("cap"), 1),
        in_flight=in_flight,
        capabilities=as_list(row.get("capabilities")),
        enabled=row.get("on") == "1",
        served=as_count(row.get("served")),
        failed=as_count(row.get("failed")),
        breaker=breaker,
        fails=as_count(row.get("fails")),
        opened=as_count(row.get("opened")),
        reason=row.get("reason", "") if breaker != "closed" else "",
        open_until=until if breaker == "open" else None,
        paused_until=pause if pause and pause > now else None,
        age=round(max(0.0, now - seen), 3) if seen else None,
        healthy={"1": True, "0": False}.get(row.get("healthy", "")),
        checked_at=as_seconds(row.get("checked")),
        health_detail=row.get("health_detail", ""),
        slots=_slots(row),
        adapts=row.get("auto") == "1",
        run_time=as_count(row.get("run_ms")) / 1000,
    )


def process_names(waiters: Iterable[Any], leases: Iterable[Any]) -> set[str]:
    """Processes that wait for tasks of a pool (fields of `Keys.waiting`) or run some (its registry `wip`)."""
    return ({as_text(name) for name in waiters} | {_process_of(as_text(lease)) for lease in leases}) - {""}


def unattended(endpoints: Iterable[EndpointStatus]) -> tuple[EndpointStatus, ...]:
    """No process waits for tasks or runs one: whatever else is true of the endpoints, nobody sends to them."""
    return tuple(map(_absent, endpoints))


def _absent(endpoint: EndpointStatus) -> EndpointStatus:
    more_lasting = STATES.index(endpoint.state) <= STATES.index("absent")
    return endpoint if more_lasting else dataclasses.replace(endpoint, state="absent")


def _slots(row: Mapping[str, str]) -> int:
    cap = as_count(row.get("cap"), 1)
    return min(cap, as_count(row.get("ramp"), cap))


def _state(row: Mapping[str, str], in_flight: int, now: float) -> State:
    """The first thing that keeps tasks away, most lasting first."""
    breaker, seen = row.get("state") or "closed", as_seconds(row.get("seen"))
    table = (
        ("removed", row.get("gone") == "1"),
        ("disabled", row.get("on") != "1"),
        ("draining", row.get("drain") == "1"),
        ("absent", seen is None or now - seen > LIVE_FOR),
        ("unhealthy", row.get("healthy") == "0"),
        ("open", breaker == "open" and (as_seconds(row.get("until")) or 0.0) > now),
        ("paused", (as_seconds(row.get("pause")) or 0.0) > now),
        ("probing", breaker != "closed"),
        ("full", in_flight >= _slots(row)),
    )
    return next((state for state, holds in table if holds), "ready")


def _process_of(lease: str) -> str:
    """From an entry of rq:wip:<pool>, "<id>:<fence>.<epoch>.<process>"; "" if RQ wrote it."""
    token = lease.partition(":")[2].split(".", 2)
    return token[2] if len(token) == 3 else ""
