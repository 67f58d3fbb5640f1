"""The two shapes that NPU deployments have, and their relatives, become the pool `npu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.config import Breaker, Config, Endpoint, Health, Retry, load_config
from broker.errors import ConfigError

NESTED = """\
npu:
  load_balancing:
    strategy: priority_first
    max_retries: 4
    retry_backoff_ms: 250
    health_check_timeout: 3
  health_monitoring: {check_interval_seconds: 15, health_endpoint: /health}
  circuit_breaker:
    failure_threshold: 7
    recovery_timeout: 90
    half_open_success_threshold: 2
  workers:
    - id: vm2-npu
      host: 172.16.168.22
      port: 8081
      enabled: true
      priority: 10
      max_concurrent_tasks: 10
      capabilities: [llm, vision]
      platform: linux
    - {id: windows-npu, url: "http://172.16.168.20:8082/", priority: 5, max_concurrent: 2, enabled: false}
"""


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "npu.yaml"
    path.write_text(text)
    return load_config(path, {})


def test_sections_and_workers(tmp_path: Path) -> None:
    config = load(tmp_path, NESTED)
    pool = config.pools["npu"]
    assert pool.adapter == "npu"
    assert pool.endpoints == (
        Endpoint("vm2-npu", "http://172.16.168.22:8081", 10, 10, ("llm", "vision"), {"platform": "linux"}),
        Endpoint("windows-npu", "http://172.16.168.20:8082", 5, 2, enabled=False),
    )
    assert pool.retry == Retry(4, 0.25, 30.0)
    assert pool.health == Health("/health", 15.0, 3.0)
    assert pool.breaker == Breaker(7, 90.0, 600.0, 2)
    assert config.warnings == ()


WORKERS = "workers: [{id: a, host: 10.0.0.1, port: 8081, priority: 7}, {id: b, host: 10.0.0.2, port: 8081}]"


@pytest.mark.parametrize(
    "text",
    [
        f"npu_workers:\n  {WORKERS}\n",
        "npu_workers: [{id: a, host: 10.0.0.1, port: 8081, priority: 7}, {id: b, host: 10.0.0.2, port: '8081'}]\n",
        f"{WORKERS}\nload_balancing: {{strategy: least-loaded}}\n",
        f"npu: {{{WORKERS}}}\n",
    ],
)
def test_other_shapes(tmp_path: Path, text: str) -> None:
    config = load(tmp_path, text)
    assert [endpoint.url for endpoint in config.pools["npu"].order] == ["http://10.0.0.1:8081", "http://10.0.0.2:8081"]
    assert config.warnings == ()


def test_our_own_keys_may_stand_beside_and_other_pools_too(tmp_path: Path) -> None:
    text = f"npu:\n  {WORKERS}\n  drain: 3s\n  retry: {{max_attempts: 2}}\npools: {{llm: {{endpoints: [{{id: c, url: 'http://c'}}]}}}}\n"
    config = load(tmp_path, text)
    assert set(config.pools) == {"npu", "llm"}
    assert (config.pools["npu"].queue.drain, config.pools["npu"].retry.max_attempts) == (3.0, 2)


def test_hosts(tmp_path: Path) -> None:
    workers = "{id: a, host: '::1', port: 1}, {id: b, host: 'https://x/v1'}, {id: c, host: y, scheme: https}"
    text = f"npu: {{workers: [{workers}]}}\n"
    endpoints = load(tmp_path, text).pools["npu"].endpoints
    assert [endpoint.url for endpoint in endpoints] == ["http://[::1]:1", "https://x/v1", "https://y"]


def test_what_has_no_counterpart_is_warned_of(tmp_path: Path) -> None:
    text = """\
npu:
  load_balancing: {strategy: round-robin, retry_failed_workers: true}
  circuit_breaker: {half_open_max_calls: 3}
  workers:
    - {id: a, host: h, port: 1, weight: 50}
"""
    warnings = load(tmp_path, text).warnings
    assert [warning.split(": ")[1] for warning in warnings] == [
        "npu.load_balancing.strategy",
        "npu.load_balancing.retry_failed_workers",
        "npu.circuit_breaker.half_open_max_calls",
        "npu.workers[0].weight",
    ]
    assert all("has no effect" in warning for warning in warnings)


def test_section_switched_off(tmp_path: Path) -> None:
    config = load(tmp_path, f"npu:\n  enabled: false\n  health_monitoring: {{enabled: false}}\n  {WORKERS}\n")
    pool = config.pools["npu"]
    assert pool.enabled == ()
    assert not pool.health.enabled


# text; line, key and part of the message of every problem
BAD = {
    "section": ("npu:\n  load_balancer: {}\n", [(2, "npu.load_balancer", "'load_balancing'?")]),
    "balancing key": ("npu:\n  load_balancing: {stratagy: x}\n", [(2, "npu.load_balancing.stratagy", "'strategy'?")]),
    "breaker key": (
        "npu:\n  circuit_breaker:\n    failure_treshold: 5\n",
        [(3, "npu.circuit_breaker.failure_treshold", "'failure_threshold'?")],
    ),
    "worker key": ("npu:\n  workers: [{id: a, host: h, prot: 1}]\n", [(2, "npu.workers[0].prot", "did you mean 'p")]),
    "worker id": ("npu:\n  workers:\n    - {host: h, port: 1}\n", [(3, "npu.workers[0].id", "is missing")]),
    "worker host": (
        "npu:\n  workers:\n    - {id: a, port: 1}\n",
        [(3, "npu.workers[0].host", "needs url, or host and port")],
    ),
    "worker address": ("npu:\n  workers:\n    - {id: a}\n", [(3, "npu.workers[0].url", "is missing")]),
    "worker port": (
        "npu:\n  workers:\n    - {id: a, host: h, port: x}\n",
        [(3, "npu.workers[0].port", "from 1 to 65535")],
    ),
    "worker port range": (
        "npu:\n  workers:\n    - {id: a, host: h, port: 70000}\n",
        [(3, "npu.workers[0].host", "port")],
    ),
    "worker priority": (
        "npu_workers:\n  workers:\n    - id: a\n      host: h\n      port: 1\n      priority: 11\n",
        [(6, "npu_workers.workers[0].priority", "from 1 to 10")],
    ),
    "url and host": (
        "npu:\n  workers: [{id: a, url: 'http://h', host: h}]\n",
        [(2, "npu.workers[0].host", "keep one")],
    ),
    "same thing twice": (
        "npu:\n  load_balancing: {health_check_interval: 5}\n  health_monitoring: {interval: 6}\n",
        [(3, "npu.health_monitoring.interval", "the same as npu.load_balancing.health_check_interval")],
    ),
    "bad value": (
        "npu:\n  circuit_breaker: {threshold: none}\n",
        [(2, "npu.circuit_breaker.threshold", "whole number")],
    ),
    "section is text": ("npu:\n  circuit_breaker: on\n", [(2, "npu.circuit_breaker", "must be a mapping")]),
    "workers is text": ("npu:\n  workers: a\n", [(2, "npu.workers", "must be a list")]),
    "npu is text": ("npu: yes\n", [(1, "npu", "a list of workers")]),
    "two shapes": (f"npu: {{{WORKERS}}}\nnpu_workers: []\n", [(2, "npu_workers", "described twice")]),
    "pool and shape": ("npu: {}\npools: {npu: {}}\n", [(1, "npu", "also given under pools")]),
    "workers beside pools": ("workers: []\npools: {}\n", [(1, "workers", "unknown key")]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_with_line_and_key(tmp_path: Path, name: str) -> None:
    text, expected = BAD[name]
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert [(problem.line, problem.key) for problem in caught.value.problems] == [e[:2] for e in expected]
    for problem, (_, _, part) in zip(caught.value.problems, expected, strict=True):
        assert part in problem.message, str(problem)
