"""The shapes that existing NPU deployments have, read as the pool `npu`.

    npu:         {load_balancing: ..., health_monitoring: ..., circuit_breaker: ..., workers: [...]}
    npu_workers: {workers: [...], ...}         or a list of workers at once
    workers: [...]                             at the top, with the same sections beside it

A worker has `url`, or `host` and `port`. Other systems' words for our keys are accepted (the tables below); what has
no counterpart here is accepted with a warning where it is known, and is an error where it is not. A number is
seconds, unless the key ends in `_ms`. Nodes keep their place, so problems name the keys as they were written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from broker.configfile import Findings, Node
from broker.configreader import tell_unknown
from broker.configschema import POOL

POOL_NAME = "npu"
SECTIONS = ("load_balancing", "health_monitoring", "circuit_breaker", "workers")
_SHAPES = ("npu", "npu_workers")
_OWN = tuple(name for name in POOL if name != "endpoints")

# Ours: what others call it. A target in parentheses is a reason why there is no counterpart.
_STRATEGY = "(headrace always takes priority first, then load)"
_WORKER = {
    "id": "id worker_id",
    "url": "url base_url endpoint address",
    "host": "host ip hostname ip_address",
    "port": "port",
    "scheme": "scheme protocol",
    "priority": "priority",
    "max_concurrent": "max_concurrent max_concurrent_tasks max_concurrency concurrency max_tasks "
    "max_connections capacity",
    "capabilities": "capabilities",
    "enabled": "enabled active",
    "labels": "labels",
    "headers": "headers",
    "api_key": "api_key token",
    "api_key_file": "api_key_file token_file",
    "hmac_secret": "hmac_secret secret",
    "hmac_secret_file": "hmac_secret_file secret_file",
    "labels.*": "name description platform type device location zone region model",
    "(shares follow free slots; a weight is not used)": "weight",
}
_BALANCING = {
    _STRATEGY: "strategy algorithm policy mode tie_breaker",
    "retry.max_attempts": "max_attempts max_retries retries retry_attempts max_retry_attempts retry_count",
    "retry.backoff.initial": "retry_delay retry_backoff backoff initial_backoff backoff_initial "
    "backoff_base base_delay",
    "retry.backoff.max": "max_backoff backoff_max max_retry_delay max_delay",
    "breaker.cooldown": "retry_cooldown cooldown worker_cooldown",
    "health.interval": "health_check_interval",
    "health.timeout": "timeout health_check_timeout",
    "timeout.attempt": "request_timeout task_timeout inference_timeout",
    "timeout.connect": "connect_timeout connection_timeout",
    "(a failed endpoint is always tried again after its cooldown)": "retry_failed_workers enabled failover",
    "(a retry always goes to another endpoint)": "exclude_failed_workers retry_on_different_worker",
}
_HEALTH = {
    "health.enabled": "enabled",
    "health.path": "path endpoint health_path health_endpoint health_check_path",
    "health.interval": "interval check_interval health_check_interval background_interval background_check_interval",
    "health.timeout": "timeout check_timeout health_check_timeout",
    "(a check older than the interval is repeated before a claim)": "stale_after stale_threshold staleness_threshold "
    "on_demand on_demand_check on_demand_threshold max_age",
    "(the backoff is x1, 2, 4, 8)": "backoff backoff_multiplier max_backoff max_backoff_multiplier",
    "(one failed check marks an endpoint unhealthy, one good check healthy)": "failure_threshold unhealthy_threshold "
    "healthy_threshold success_threshold retries",
}
_BREAKER = {
    "breaker.failures": "failures failure_threshold max_failures threshold failure_count consecutive_failures",
    "breaker.cooldown": "cooldown cooldown_period recovery_timeout reset_timeout open_timeout open_duration timeout "
    "recovery_time",
    "breaker.cooldown_max": "cooldown_max max_cooldown max_recovery_timeout",
    "breaker.half_open_successes": "half_open_successes success_threshold half_open_success_threshold "
    "half_open_required_successes",
    "(one probe at a time, always)": "half_open_max_calls half_open_max_requests half_open_requests half_open_limit "
    "half_open_max_tasks half_open_max_attempts half_open_probes",
    "(the breaker is always on)": "enabled",
}
_TABLES = {"load_balancing": _BALANCING, "health_monitoring": _HEALTH, "circuit_breaker": _BREAKER}
_UNIT = re.compile(r"_(seconds|secs|sec|s|ms|millis|milliseconds)$")
_LEAST_LOADED = re.compile(r"(?i).*(priority|least).*")


def translate(tree: Node, findings: Findings) -> None:
    """Replaces legacy shapes in the tree, in place, by `pools: {npu: ...}`."""
    top = tree.value
    if not isinstance(top, dict):
        return
    shapes = [top.pop(name) for name in _SHAPES if name in top]
    loose = {name: top.pop(name) for name in SECTIONS if name in top} if _has_bare_workers(top) else {}
    if loose:
        first = next(iter(loose.values()))
        shapes.append(Node(loose, tree.key, first.file, first.line))
    for extra in shapes[1:]:
        findings.problem(extra, "the NPU workers are described twice; keep one of the sections")
    if not shapes:
        return
    pools = top.setdefault("pools", Node({}, "pools", tree.file, tree.line))
    if pools.value is None:
        pools.value = {}
    if isinstance(pools.value, dict):
        if POOL_NAME in pools.value:
            findings.problem(shapes[0], "pool 'npu' is also given under pools; keep one of the two")
        else:
            pools.value[POOL_NAME] = _Translator(findings).pool(shapes[0])


def _has_bare_workers(top: Mapping[str, Node]) -> bool:
    workers = top.get("workers")
    return workers is not None and isinstance(workers.value, list) and "pools" not in top


def _spellings(table: Mapping[str, str]) -> dict[str, str]:
    return {word: target for target, words in table.items() for word in words.split()}


class _Translator:
    def __init__(self, findings: Findings) -> None:
        self.findings = findings

    def pool(self, node: Node) -> Node:
        pool = Node({}, node.key, node.file, node.line)
        if isinstance(node.value, list):
            _put(pool, "endpoints", self._workers(node, None), self.findings)
            return pool
        if not isinstance(node.value, dict):
            self.findings.problem(node, f"must be a mapping with a list of workers, not {node.kind()}")
            return pool
        known = (*SECTIONS, *_OWN, "enabled")
        switch = node.value.get("enabled")
        for name, child in node.value.items():
            if name == "workers":
                _put(pool, "endpoints", self._workers(child, switch), self.findings)
            elif name in _TABLES:
                self._section(child, _TABLES[name], pool)
            elif name in _OWN:
                _put(pool, name, child, self.findings)
            elif name != "enabled":
                tell_unknown(self.findings, node, name, child, known)
        return pool

    def _section(self, node: Node, table: Mapping[str, str], pool: Node) -> None:
        if node.value is None:
            return
        if not isinstance(node.value, dict):
            self.findings.problem(node, f"must be a mapping of keys to values, not {node.kind()}")
            return
        words = _spellings(table)
        for name, child in node.value.items():
            target = words.get(_plain_name(name))
            if target is None:
                tell_unknown(self.findings, node, name, child, words, _plain_name(name))
            elif target.startswith("("):
                if not (target == _STRATEGY and _LEAST_LOADED.fullmatch(child.raw)):
                    self.findings.warn(child, f"has no effect {target}")
            else:
                _put(pool, target, _in_seconds(child, name), self.findings)

    def _workers(self, node: Node, switch: Node | None) -> Node:
        if not isinstance(node.value, list):
            return node
        return Node([self._worker(item, switch) for item in node.value], node.key, node.file, node.line)

    def _worker(self, node: Node, switch: Node | None) -> Node:
        if not isinstance(node.value, dict):
            return node
        words = _spellings(_WORKER)
        worker = Node({}, node.key, node.file, node.line)
        parts: dict[str, Node] = {}
        for name, child in node.value.items():
            target = words.get(_plain_name(name))
            if target is None:
                tell_unknown(self.findings, node, name, child, words, _plain_name(name))
            elif target.startswith("("):
                self.findings.warn(child, f"has no effect {target}")
            elif target in ("host", "port", "scheme"):
                parts[target] = child
            else:
                _put(worker, target.replace("*", _plain_name(name)), child, self.findings)
        self._add_url(worker, parts)
        if switch is not None and switch.value is False and isinstance(worker.value, dict):
            worker.value["enabled"] = switch
        return worker

    def _add_url(self, worker: Node, parts: Mapping[str, Node]) -> None:
        if not parts or not isinstance(worker.value, dict):
            return
        if "url" in worker.value:
            for child in parts.values():
                self.findings.problem(child, "is given although url is; keep one")
            return
        host, port = parts.get("host"), parts.get("port")
        if host is None or host.value is None:
            self.findings.problem(worker, "is missing; a worker needs url, or host and port", worker.child_key("host"))
            worker.value["url"] = Node(None, "", worker.file, broken=True)
            return
        if isinstance(host.value, (dict, list)):
            self.findings.problem(host, f"must be text, not {host.kind()}")
            worker.value["url"] = Node(None, "", worker.file, broken=True)
            return
        name = host.value if isinstance(host.value, str) else host.raw
        if port is not None and not (port.broken or re.fullmatch(r"\s*\d{1,5}\s*", _text(port))):
            self.findings.problem(port, f"must be a number from 1 to 65535, not {port.show()}")
            port = None
        scheme = _text(parts["scheme"]) if "scheme" in parts else "http"
        url = name if "://" in name else f"{scheme}://{f'[{name}]' if name.count(':') > 1 and name[0] != '[' else name}"
        if port is not None and port.value is not None:
            url += f":{_text(port).strip()}"
        raw = url if host.raw == name else host.raw  # what a variable gave is not repeated
        worker.value["url"] = Node(url, host.key, host.file, host.line, raw=raw, loose=host.loose, broken=host.broken)


def _text(node: Node) -> str:
    return node.value if isinstance(node.value, str) else node.raw


def _plain_name(name: str) -> str:
    """`Check-Interval-Seconds` is `check_interval`."""
    return _UNIT.sub("", name.lower().replace("-", "_"))


def _in_seconds(node: Node, name: str) -> Node:
    if not re.search(r"_(ms|millis|milliseconds)$", name) or isinstance(node.value, (bool, str)):
        return node
    if not isinstance(node.value, (int, float)):
        return node
    return Node(node.value / 1000, node.key, node.file, node.line, node.raw, node.plain, node.loose, node.broken)


def _put(root: Node, path: str, node: Node, findings: Findings) -> None:
    """Sets `path` below `root`. Two spellings of one key are a problem, told at the second."""
    *folders, name = path.split(".")
    place = root
    for folder in folders:
        if not isinstance(place.value, dict):
            return
        place = place.value.setdefault(folder, Node({}, node.key, node.file, node.line))
        if place.value is None:
            place.value = {}
    if isinstance(place.value, dict):
        if (first := place.value.get(name)) is None:
            place.value[name] = node
        elif isinstance(first.value, dict) and isinstance(node.value, dict):
            for inner, child in node.value.items():
                _put(first, inner, child, findings)
        else:
            findings.problem(node, f"says the same as {first.key}; keep one")
