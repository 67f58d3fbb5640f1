"""From the tree of nodes to the model: every key, its unit, its limits, and what contradicts what."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from broker.addresses import RedisAddress, is_host, redis_address
from broker.configendpoints import EndpointReader, read_headers
from broker.configfile import Findings, Node
from broker.configmodel import (
    ADAPTERS,
    TRANSPORTS,
    Adapter,
    Api,
    Breaker,
    Config,
    Connection,
    Health,
    Log,
    Pool,
    QueuePolicy,
    RedisSettings,
    Retry,
    Timeouts,
    TransportName,
    folder_of,
)
from broker.configreader import Section
from broker.errors import InvalidTask
from broker.quoting import scheme_hint
from broker.secret import Secret
from broker.task import METHODS, Request, check_path, check_pool

TOP = ("redis", "pools", "processes", "api", "log")
REDIS = (
    "url", "username", "password", "password_file", "sentinel_username", "sentinel_password", "sentinel_password_file",
    "data_dir",
)  # fmt: skip
API = ("host", "port", "token", "token_file")
LOG = ("level", "format")
POOL = ("endpoints", "adapter", "retry", "timeout", "health", "breaker", "queue", "connection", "drain")
RETRY = ("max_attempts", "backoff")
BACKOFF = ("initial", "max")
TIMEOUT = ("connect", "first_byte", "idle", "attempt")
HEALTH = ("enabled", "path", "interval", "timeout", "probe")
PROBE = ("method", "path", "json", "body", "headers", "timeout")
BREAKER = (
    "failures", "failure_percent", "minimum_volume", "rate_window", "cooldown", "cooldown_max", "half_open_successes",
    "slow_start",
)  # fmt: skip
QUEUE = (
    "max_depth", "result_ttl", "dead_letter_ttl", "payload_limit", "result_limit", "spill_after", "lease",
    "max_deliveries",
)  # fmt: skip
CONNECTION = ("transport", "idle_discard")

MAX_PROCESSES = 1024


def build(tree: Node, source: Path | None, findings: Findings) -> Config:
    """The model. What is wrong goes to `findings`; then the result is not to be used."""
    top = Section(tree, TOP, findings, folder_of(source))
    pools: dict[str, Pool] = {}
    endpoints = EndpointReader(findings)
    pools_node = top.get("pools")
    names = list(pools_node.value) if pools_node is not None and isinstance(pools_node.value, dict) else []
    pools_section = top.section("pools", names)
    for name in names:
        try:
            check_pool(name)
        except InvalidTask:
            pools_section.problem(name, "a pool's name is 1 to 64 letters, digits, '_', '.' or '-'")
        pools[name] = _pool(name, pools_section.section(name, POOL), endpoints)
        if not pools[name].enabled:
            findings.warn(pools_section.entries[name], "has no enabled endpoint: its tasks wait until it has one")
    return Config(
        redis=_redis(top.section("redis", REDIS)),
        pools=pools,
        processes=top.whole_or_auto("processes", "auto", MAX_PROCESSES),
        api=_api(top.section("api", API)),
        log=_log(top.section("log", LOG)),
        source=str(source) if source else None,
        warnings=tuple(findings.warnings),
        origins=_origins(tree),
    )


def _origins(tree: Node) -> dict[str, str]:
    origins: dict[str, str] = {}
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node.value, (dict, list)):
            pending.extend(reversed(node.children()))
        elif node.value is not None:
            origins[node.key] = node.where()
    return origins


def _redis(section: Section) -> RedisSettings:
    node = section.get("url")
    address = RedisAddress(RedisSettings().url)
    if node is not None:
        try:
            address = redis_address(section.text("url", address.url))
        except ValueError as error:
            section.findings.problem(node, f"{error}, not {node.show()}{scheme_hint(node.raw, 'redis')}")
    data_dir = section.text("data_dir", "") or None
    if data_dir is not None and "\0" in data_dir:
        section.problem("data_dir", "must be the path of a folder")
    username = section.identifier("username") or address.username
    of_sentinels = section.identifier("sentinel_username") or address.sentinel_username
    password = _redis_password(section, "password", address.password)
    sentinel_password = _redis_password(section, "sentinel_password", address.sentinel_password)
    return RedisSettings(address.url, username, password, data_dir, of_sentinels, sentinel_password)


def _redis_password(section: Section, name: str, in_url: str | None) -> Secret | None:
    node, own = section.get("url"), section.secret(name)
    twice = section.get(name) or section.get(f"{name}_file")
    if in_url is not None and node is not None and twice is not None and twice.file == node.file:
        section.findings.problem(twice, "a password is given in the URL too; keep one")
    if in_url is not None and node is not None and not node.loose:
        section.findings.warn(node, f"a password in clear text; use ${{VARIABLE}} or {name}_file")
    return own or (Secret(in_url) if in_url else None)


def _api(section: Section) -> Api:
    host = section.text("host", Api().host)
    api = Api(host, section.whole("port", Api().port, 0, 65_535), section.secret("token"))
    if not is_host(host):
        section.problem("host", "must be a host name or address, without port or scheme")
    elif api.token is None and not api.on_loopback and not section.given("token") | section.given("token_file"):
        node = section.entries.get("host", section.node)
        section.findings.warn(node, f"{host} is not loopback and there is no api.token: serve will not listen there")
    return api


def _log(section: Section) -> Log:
    level = section.choice("level", ("debug", "info", "warning", "error"), "info")
    form = section.choice("format", ("text", "json"), "text")
    return Log(cast(Any, level), cast(Any, form))


def _pool(name: str, section: Section, endpoints: EndpointReader) -> Pool:
    adapter = section.choice("adapter", ADAPTERS, "npu" if name == "npu" else "http")
    connection = section.section("connection", CONNECTION)
    return Pool(
        name=name,
        endpoints=endpoints.read(name, section),
        adapter=cast(Adapter, adapter),
        retry=_retry(section.section("retry", RETRY)),
        timeout=_timeouts(section.section("timeout", TIMEOUT)),
        health=_health(section.section("health", HEALTH)),
        breaker=_breaker(section.section("breaker", BREAKER)),
        queue=_queue(section.section("queue", QUEUE), section),
        connection=Connection(
            cast(TransportName, connection.choice("transport", TRANSPORTS, "auto")),
            connection.seconds("idle_discard", Connection().idle_discard, 0.1, 3600),
        ),
    )


def _retry(section: Section) -> Retry:
    backoff, default = section.section("backoff", BACKOFF), Retry()
    initial = backoff.seconds("initial", default.backoff_initial, 0, 86_400)
    longest = backoff.seconds("max", max(default.backoff_max, initial), 0, 7 * 86_400)
    if longest < initial:
        backoff.problem("max", f"is less than initial ({initial:g}s)")
    return Retry(section.whole("max_attempts", default.max_attempts, 1, 100), initial, longest)


def _timeouts(section: Section) -> Timeouts:
    default = Timeouts()
    timeouts = Timeouts(
        connect=section.seconds("connect", default.connect, 0.001, 3600),
        first_byte=section.seconds("first_byte", default.first_byte, 0.001, 86_400),
        idle=section.seconds("idle", default.idle, 0.001, 86_400),
        attempt=section.seconds("attempt", default.attempt, 0.001, 86_400),
    )
    for name in ("connect", "first_byte", "idle"):
        node = section.get(name)
        if node is not None and section.has("attempt") and getattr(timeouts, name) > timeouts.attempt:
            section.findings.warn(node, f"longer than the whole attempt ({timeouts.attempt:g}s), so it never applies")
    return timeouts


def _health(section: Section) -> Health:
    default = Health()
    return Health(
        path=_path(section, default.path),
        interval=section.seconds("interval", default.interval, 0.1, 86_400),
        timeout=section.seconds("timeout", default.timeout, 0.001, 3600),
        probe=_request(section.section("probe", PROBE)) if section.has("probe") else None,
        enabled=section.flag("enabled", default.enabled),
    )


def _path(section: Section, default: str) -> str:
    path, node = section.text("path", default), section.get("path")
    try:
        return check_path(path)
    except InvalidTask:
        if node is not None:
            rule = "must be a path that starts with '/', without host, '..', spaces or '#'"
            section.findings.problem(node, f"{rule}, not {node.show()}")
        return default


def _request(section: Section) -> Request | None:
    if isinstance(section.node.value, dict) and not section.given("path"):
        section.problem("path", "is missing: the path of the request, such as /v1/chat/completions")
    method = section.choice("method", [method.lower() for method in sorted(METHODS)], "post").upper()
    path, headers, body = _path(section, "/"), read_headers(section), section.text("body", "") or None
    timeout, json = section.seconds("timeout", 0, 0.001, 86_400) or None, section.get("json")
    if json is not None and body is not None:
        section.problem("body", "is given although json is; keep one")
        return None
    return Request(method, path, None if json is None else _python(json), body, headers, timeout)


def _python(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {name: _python(child) for name, child in node.value.items()}
    if isinstance(node.value, list):
        return [_python(child) for child in node.value]
    return node.value


def _breaker(section: Section) -> Breaker:
    default = Breaker()
    cooldown = section.seconds("cooldown", default.cooldown, 0.01, 86_400)
    longest = section.seconds("cooldown_max", max(default.cooldown_max, cooldown), 0.01, 7 * 86_400)
    if longest < cooldown:
        section.problem("cooldown_max", f"is less than cooldown ({cooldown:g}s)")
    return Breaker(
        failures=section.whole("failures", default.failures, 1, 1000),
        cooldown=cooldown,
        cooldown_max=longest,
        half_open_successes=section.whole("half_open_successes", default.half_open_successes, 1, 100),
        failure_percent=section.whole("failure_percent", default.failure_percent, 0, 100),
        minimum_volume=section.whole("minimum_volume", default.minimum_volume, 1, 1_000_000),
        rate_window=section.seconds("rate_window", default.rate_window, 1, 86_400),
        slow_start=section.flag("slow_start", default.slow_start),
    )


def _queue(section: Section, pool: Section) -> QueuePolicy:
    default = QueuePolicy()
    return QueuePolicy(
        max_depth=section.whole("max_depth", default.max_depth, 1, 1_000_000_000),
        result_ttl=section.seconds("result_ttl", default.result_ttl, 1),
        dead_letter_ttl=section.seconds("dead_letter_ttl", default.dead_letter_ttl, 1),
        payload_limit=section.size("payload_limit", default.payload_limit, 1, 512 << 20),
        result_limit=section.size("result_limit", default.result_limit, 1, 512 << 20),
        spill_after=section.seconds("spill_after", default.spill_after, 0, 3600),
        lease=section.seconds("lease", default.lease, 0.5, 3600),
        max_deliveries=section.whole("max_deliveries", default.max_deliveries, 1, 100),
        drain=pool.seconds("drain", default.drain, 0, 86_400),
    )
