"""`/metrics`: what Redis holds at the moment of the scrape, for Prometheus. Nothing is kept between two scrapes.

Labels are pool, endpoint, process and state; ids of tasks never are. Units are seconds and counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from broker import __version__
from broker.inspect import STATES, PoolStatus

PREFIX: Final = "headrace_"
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
OUTCOMES: Final = ("ok", "dead", "expired", "poison", "canceled")
BREAKER: Final = ("closed", "open", "half_open")
# counter of a pool: the field of its hash
FLOW: Final = {
    "tasks_enqueued": ("enqueued", "Tasks put on the queue"),
    "attempts_retried": ("retried", "Failed attempts that were tried again"),
    "tasks_released": ("released", "Attempts given back, not counted"),
    "leases_lost": ("reaped", "Leases that ended without a settle"),
    "tasks_redriven": ("redriven", "Dead letters put back"),
}


def exposition(pools: Sequence[PoolStatus]) -> bytes:
    """The text of one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(pools))
    return generate_latest(registry)


class _Scrape(Collector):
    def __init__(self, pools: Sequence[PoolStatus]) -> None:
        self._pools = pools

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(f"{PREFIX}build_info", "1, with the version", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        yield from _pool_gauges(self._pools)
        yield from _pool_counters(self._pools)
        yield from _endpoint_gauges(self._pools)
        yield from _endpoint_counters(self._pools)


def _gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, about, labels=labels)


def _counter(name: str, about: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, about, labels=labels)


def _pool_gauges(pools: Sequence[PoolStatus]) -> Iterator[Metric]:
    tasks = _gauge("tasks", "Tasks now in Redis: to start, delayed, running, or kept with an outcome", "pool", "state")
    oldest = _gauge("oldest_waiting_seconds", "How long the oldest waiting task has waited; 0 if none waits", "pool")
    limit = _gauge("queue_limit_tasks", "Tasks a pool may hold before enqueue is refused", "pool")
    processes = _gauge("processes", "Worker processes that listen or run tasks", "pool")
    lag = _gauge("process_lag_seconds", "How late an event loop was, at most, in the last minute", "pool", "process")
    for pool in pools:
        for state, number in (
            ("waiting", pool.backlog), ("delayed", pool.delayed), ("running", pool.running), ("dead", pool.dead),
            ("finished", pool.finished), ("canceled", pool.canceled),
        ):  # fmt: skip
            tasks.add_metric([pool.pool, state], number)
        oldest.add_metric([pool.pool], pool.oldest or 0.0)
        processes.add_metric([pool.pool], len(pool.processes))
        for name, seconds in pool.lag.items():
            lag.add_metric([pool.pool, name], seconds)
        if pool.max_depth is not None:
            limit.add_metric([pool.pool], pool.max_depth)
    yield from (tasks, oldest, limit, processes, lag)


def _pool_counters(pools: Sequence[PoolStatus]) -> Iterator[Metric]:
    settled = _counter("tasks_settled", "Tasks that got an outcome", "pool", "state")
    for pool in pools:
        for outcome in OUTCOMES:
            settled.add_metric([pool.pool, outcome], pool.counts.get(outcome, 0))
    yield settled
    for name, (field, about) in FLOW.items():
        family = _counter(name, about, "pool")
        for pool in pools:
            family.add_metric([pool.pool], pool.counts.get(field, 0))
        yield family


def _endpoint_gauges(pools: Sequence[PoolStatus]) -> Iterator[Metric]:
    flight = _gauge("endpoint_in_flight", "Requests in flight, over all processes", "pool", "endpoint")
    slots = _gauge("endpoint_slots", "Requests it may have in flight now", "pool", "endpoint")
    healthy = _gauge("endpoint_healthy", "1 if its last health check was good, 0 if not", "pool", "endpoint")
    state = _gauge("endpoint_state", "1 for the state it is in", "pool", "endpoint", "state")
    breaker = _gauge("endpoint_breaker", "1 for the state its breaker is in", "pool", "endpoint", "state")
    for pool in pools:
        for each in pool.endpoints:
            labels = [pool.pool, each.id]
            flight.add_metric(labels, each.in_flight)
            slots.add_metric(labels, each.slots)
            if each.healthy is not None:
                healthy.add_metric(labels, each.healthy)
            for word in STATES:
                state.add_metric([*labels, word], word == each.state)
            for word in BREAKER:
                breaker.add_metric([*labels, word], word == each.breaker)
    yield from (flight, slots, healthy, state, breaker)


def _endpoint_counters(pools: Sequence[PoolStatus]) -> Iterator[Metric]:
    attempts = _counter("endpoint_attempts", "Attempts that ended: served or failed", "pool", "endpoint", "state")
    run = _counter("endpoint_run_seconds", "Time that its served attempts ran, all together", "pool", "endpoint")
    opened = _counter("endpoint_breaker_opened", "How often its breaker opened", "pool", "endpoint")
    for pool in pools:
        for each in pool.endpoints:
            labels = [pool.pool, each.id]
            attempts.add_metric([*labels, "served"], each.served)
            attempts.add_metric([*labels, "failed"], each.failed)
            run.add_metric(labels, each.run_time)
            opened.add_metric(labels, each.opened)
    yield from (attempts, run, opened)
