"""What the scripts and producers need to know of a pool, as the register script takes it. Durations in ms."""

from __future__ import annotations

from broker.configmodel import Endpoint, Pool
from broker.scripts import EndpointRow

CHECK_GRACE = 2  # an idle endpoint is checked before its next task when its last check is this many intervals old


def policies(pool: Pool) -> dict[str, int]:
    """Fields of rq:x:pool:<pool>."""
    queue, breaker, health = pool.queue, pool.breaker, pool.health
    return {
        "max_depth": queue.max_depth,
        "payload_limit": queue.payload_limit,
        "spill_after": round(queue.spill_after * 1000),
        "result_ttl": round(queue.result_ttl * 1000),
        "dead_letter_ttl": round(queue.dead_letter_ttl * 1000),
        "max_attempts": pool.retry.max_attempts,
        "failures": breaker.failures,
        "failure_rate": breaker.failure_percent,
        "minimum_volume": breaker.minimum_volume,
        "rate_window": round(breaker.rate_window * 1000) if breaker.failure_percent else 0,
        "cooldown": round(breaker.cooldown * 1000),
        "cooldown_max": round(breaker.cooldown_max * 1000),
        "half_open_successes": breaker.half_open_successes,
        "slow_start": int(breaker.slow_start),
        "check_after": round(health.interval * 1000 * CHECK_GRACE) if health.enabled else 0,
    }


def endpoint_rows(pool: Pool) -> list[EndpointRow]:
    """The pool's endpoints."""
    return [_row(endpoint) for endpoint in pool.endpoints]


def _row(endpoint: Endpoint) -> EndpointRow:
    head = (endpoint.id, endpoint.priority)
    tail = (endpoint.enabled, endpoint.capabilities)
    if endpoint.max_concurrent != "auto":
        return (*head, endpoint.max_concurrent, *tail)
    start = min(max(endpoint.auto_min, 2), endpoint.auto_max)
    return (*head, start, *tail, endpoint.auto_min, endpoint.auto_max)


def most_slots(endpoint: Endpoint) -> int:
    """Requests the endpoint may ever have in flight: what a process must be ready to open connections for."""
    return endpoint.auto_max if endpoint.max_concurrent == "auto" else endpoint.max_concurrent


