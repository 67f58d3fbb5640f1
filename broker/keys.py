"""Every Redis key headrace touches: name, type, lifetime, owner. Lua builds the same names in `lua/common.lua`.

RQ's own keys (same names, types and meaning as RQ gives them; prefix `rq` or RQ_KEY_PREFIX)
    rq:queues                      SET    names of all lists below                       permanent
    rq:queue:<pool>                LIST   waiting tasks, normal priority                 gone when empty
    rq:queue:<pool>:<variant>      LIST   waiting tasks of another priority, or that only some endpoints may take
                                          (`high`, `low`, `normal+vision`, `normal!vm1`) gone when empty
    rq:job:<id>                    HASH   the task; own fields start with `x_`           TTL once it has an outcome
    rq:wip:<pool>                  ZSET   mirror of the leases for RQ's readers, +60 s   gone when empty
    rq:scheduled:<pool>            ZSET   delayed tasks by due time, Unix seconds        gone when empty
    rq:finished:<pool>             ZSET   tasks with outcome ok, by expiry               gone when empty
    rq:failed:<pool>               ZSET   dead letters, by expiry                        gone when empty
    rq:canceled:<pool>             ZSET   canceled tasks                                 gone when empty
    rq:results:<id>                STREAM answer for a plain RQ producer                 TTL
    rq:workers, rq:workers:<pool>  SET    worker names                                   permanent while workers live
    rq:worker:<name>               HASH   one worker, for `rq info`; `x_lag_ms`: how late its process's event loop was,
                                          at most, in the last minute                       TTL 60 s
    rq:worker:<name>:executions    SET    what it runs (rq 3), up to 20                  TTL 60 s
    rq:execution:<id>:<lease>      HASH   one of those                                   TTL 60 s
Not ours: rq:job:<id>:dependents and rq:deferred:<pool>. A finished job releases no dependents of plain RQ jobs; their
producer does, by `Queue.enqueue_dependents(job)`.

Own keys
    rq:x:pools                     SET    pool names                                     permanent, one a broker
    rq:x:pool:<pool>               HASH   policies and counters                          permanent, one a pool
    rq:x:lists:<pool>              SET    variants that are not empty                    gone when empty
    rq:x:endpoints:<pool>          SET    endpoint ids                                   permanent, one a pool
    rq:x:endpoint:<pool>:<id>      HASH   one endpoint: settings, breaker, counters      permanent, one an endpoint
    rq:x:slots:<pool>:<id>         ZSET   leases on the endpoint: task id by expiry, ms  gone when empty
    rq:x:deadlines:<pool>          ZSET   task id by deadline, ms                        gone when empty
    rq:x:ghosts:<pool>             HASH   entries of tasks that wait no longer, by variant gone when empty
    rq:x:waiting:<pool>            HASH   processes that will answer a doorbell          swept after 60 s of silence
    rq:x:bell:<process>            LIST   doorbell of one process                        TTL 60 s
    rq:x:idem:<pool>:<key>         STRING task id and digest of an idempotency key       TTL
    rq:x:parts:<call>              STRING the last part of an enqueue call that was done   TTL 60 s
    rq:x:reply:<name>              LIST   ids of tasks that got an outcome               TTL
    rq:x:registered:<pool>         HASH   endpoints added at run time, JSON by id        permanent while there are any
    rq:x:ticket:<pool>:<what>      STRING who does a periodic duty now                   TTL

Fields of rq:x:pool:<pool>: the policies as registered (`max_depth`, `failures`, ...; durations in ms), counters
(`n_ok`, `n_dead`, ...), `contact` and `amnesty` (when a process was last heard of, until when nothing is reaped),
`suspect` (the task that may lose no further lease and has the turn to run, and since when), `seq` and `turn` (order of
claims), `revision` (endpoints added or removed at run time), `configured` (the configuration in force: since when, ms,
and its digest), `reload_asked` and `reload_result`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

LAG_FIELD: Final = "x_lag_ms"  # of rq:worker:<name>


def default_prefix() -> str:
    """RQ's key prefix: `RQ_KEY_PREFIX` as rq 3 reads it, else `rq`. In Redis Cluster it holds one {tag}."""
    return os.environ.get("RQ_KEY_PREFIX", "rq")


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of keys under one prefix."""

    prefix: str = "rq"

    def queues(self) -> str:
        return f"{self.prefix}:queues"

    def queue(self, pool: str, variant: str = "") -> str:
        return f"{self.prefix}:queue:{pool}:{variant}" if variant else f"{self.prefix}:queue:{pool}"

    def job(self, task_id: str) -> str:
        return f"{self.prefix}:job:{task_id}"

    def registry(self, name: str, pool: str) -> str:
        """`name` is wip, scheduled, finished, failed or canceled."""
        return f"{self.prefix}:{name}:{pool}"

    def results(self, task_id: str) -> str:
        return f"{self.prefix}:results:{task_id}"

    def workers(self, pool: str = "") -> str:
        return f"{self.prefix}:workers:{pool}" if pool else f"{self.prefix}:workers"

    def worker(self, name: str) -> str:
        return f"{self.prefix}:worker:{name}"

    def pools(self) -> str:
        return f"{self.prefix}:x:pools"

    def pool(self, pool: str) -> str:
        return f"{self.prefix}:x:pool:{pool}"

    def lists(self, pool: str) -> str:
        return f"{self.prefix}:x:lists:{pool}"

    def endpoints(self, pool: str) -> str:
        return f"{self.prefix}:x:endpoints:{pool}"

    def endpoint(self, pool: str, endpoint: str) -> str:
        return f"{self.prefix}:x:endpoint:{pool}:{endpoint}"

    def slots(self, pool: str, endpoint: str) -> str:
        return f"{self.prefix}:x:slots:{pool}:{endpoint}"

    def deadlines(self, pool: str) -> str:
        return f"{self.prefix}:x:deadlines:{pool}"

    def ghosts(self, pool: str) -> str:
        return f"{self.prefix}:x:ghosts:{pool}"

    def waiting(self, pool: str) -> str:
        return f"{self.prefix}:x:waiting:{pool}"

    def bell(self, process: str) -> str:
        return f"{self.prefix}:x:bell:{process}"

    def reply(self, name: str) -> str:
        return f"{self.prefix}:x:reply:{name}"

    def idempotency(self, pool: str, key: str) -> str:
        return f"{self.prefix}:x:idem:{pool}:{key}"

    def parts(self, call: str) -> str:
        return f"{self.prefix}:x:parts:{call}"

    def ticket(self, pool: str, duty: str) -> str:
        return f"{self.prefix}:x:ticket:{pool}:{duty}"
