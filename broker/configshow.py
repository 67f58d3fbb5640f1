"""A configuration written out as in its file: durations and sizes with units, secrets masked unless asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.configendpoints import ENDPOINT
from broker.configmodel import Config, Endpoint, Pool, RedisSettings
from broker.configschema import BREAKER, CONNECTION, HEALTH, PROBE, QUEUE, TIMEOUT
from broker.durations import format_seconds, format_size
from broker.secret import MASK, Secret
from broker.task import Request


def config_dict(config: Config, masked: bool) -> dict[str, Any]:
    """Every key of the YAML file but those that have no value."""
    shown: dict[str, Any] = _escape(_whole(config, masked))
    return shown


def _escape(value: Any) -> Any:
    """A literal `${` must not be taken for a reference when the output is read again."""
    if isinstance(value, dict):
        return {name: _escape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return value.replace("${", "$${") if isinstance(value, str) else value


def _whole(config: Config, masked: bool) -> dict[str, Any]:
    return {
        "redis": _redis(config.redis, masked),
        "processes": config.processes,
        "api": _set(host=config.api.host, port=config.api.port, token=_secret(config.api.token, masked)),
        "log": {"level": config.log.level, "format": config.log.format},
        "pools": {name: _pool(pool, masked) for name, pool in config.pools.items()},
    }


def _set(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != {} and value != []}


def _secret(secret: Secret | None, masked: bool) -> str | None:
    if secret is None:
        return None
    return MASK if masked else secret.reveal()


def _redis(redis: RedisSettings, masked: bool) -> dict[str, Any]:
    return _set(
        url=redis.url, username=redis.username, password=_secret(redis.password, masked), data_dir=redis.data_dir,
        sentinel_username=redis.sentinel_username, sentinel_password=_secret(redis.sentinel_password, masked),
    )  # fmt: skip


def _pool(pool: Pool, masked: bool) -> dict[str, Any]:
    backoff = {"initial": format_seconds(pool.retry.backoff_initial), "max": format_seconds(pool.retry.backoff_max)}
    return {
        "adapter": pool.adapter,
        "endpoints": [_endpoint(endpoint, masked) for endpoint in pool.endpoints],
        "retry": {"max_attempts": pool.retry.max_attempts, "backoff": backoff},
        "timeout": _group(pool.timeout, TIMEOUT),
        "health": {**_group(pool.health, HEALTH), **_probe(pool.health.probe, masked)},
        "breaker": _group(pool.breaker, BREAKER),
        "queue": _group(pool.queue, QUEUE),
        "connection": _group(pool.connection, CONNECTION),
        "drain": format_seconds(pool.queue.drain),
    }


def _probe(probe: Request | None, masked: bool) -> dict[str, Any]:
    if probe is None:
        return {}
    return {"probe": {**_group(probe, PROBE), **_set(headers=_headers(probe.headers, masked))}}


def _headers(headers: Mapping[str, str], masked: bool) -> dict[str, str]:
    return {name: MASK if masked else value for name, value in headers.items()}


def _group(values: object, names: tuple[str, ...]) -> dict[str, Any]:
    """In the model every float is a duration, and every `_limit` a size."""
    return _set(**{name: _written(name, getattr(values, name)) for name in names})


def _written(name: str, value: Any) -> Any:
    if isinstance(value, float):
        return format_seconds(value)
    return format_size(value) if name.endswith("_limit") else value


def _endpoint(endpoint: Endpoint, masked: bool) -> dict[str, Any]:
    hidden = {
        "api_key": _secret(endpoint.api_key, masked),
        "hmac_secret": _secret(endpoint.hmac_secret, masked),
        "headers": _headers(endpoint.headers, masked),
        "capabilities": list(endpoint.capabilities),
        "labels": dict(endpoint.labels),
    }
    names = (name for name in ENDPOINT if not name.endswith("_file"))
    return _set(**{name: hidden.get(name, getattr(endpoint, name)) for name in names})
