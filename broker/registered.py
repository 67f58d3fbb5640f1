"""Endpoints added while the pool runs. They live in Redis beside the pool, so they survive restarts; secrets never do.

    rq:x:registered:<pool>   HASH  endpoint id -> JSON of the keys in FIELDS
    rq:x:pool:<pool>         HASH  its field `revision` counts every change; supervisors look at it twice a second

The pool that is served is the file's endpoints and these; of two with one id the file's wins.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from broker.addresses import server_key
from broker.configendpoints import EndpointReader
from broker.configfile import Findings, from_python
from broker.configmodel import Config, Endpoint, Pool
from broker.configreader import Section
from broker.errors import ConfigError, Problem

if TYPE_CHECKING:
    from broker.keys import Keys
    from broker.store import Store

FIELDS: Final = ("url", "priority", "max_concurrent", "auto_min", "auto_max", "capabilities", "labels")
SECRETS: Final = ("api_key", "api_key_file", "hmac_secret", "hmac_secret_file", "headers")
PLACE: Final = "added endpoint"

log = logging.getLogger("headrace.registered")


def registered_key(keys: Keys, pool: str) -> str:
    return f"{keys.prefix}:x:registered:{pool}"


def endpoint_from(pool: str, values: Mapping[str, Any], place: str = PLACE) -> Endpoint:
    """An endpoint out of what a request or a command gave, by the rules of the configuration file.

    values  `id` and the keys of FIELDS. Raises ConfigError with every problem; `place` stands before each.
    """
    findings = Findings()
    tree = from_python({"endpoints": [dict(values)]}, "", place)
    read = EndpointReader(findings).read(pool, Section(tree, ("endpoints",), findings, Path()))
    problems = [replace(each, key=each.key.removeprefix("endpoints[0].")) for each in findings.problems]
    for name in [name for name in SECRETS if values.get(name)]:
        message = "secrets are never kept in Redis: put this endpoint into the configuration file"
        problems.append(Problem(place, None, name, message))
    if values.get("enabled", True) is not True:
        message = "an added endpoint is enabled; drain it to give it no tasks"
        problems.append(Problem(place, None, "enabled", message))
    if problems:
        raise ConfigError(problems)
    return read[0]


def add_endpoint(
    store: Store, pool: str, endpoint: Endpoint, config: Config | None = None
) -> Literal["added", "changed", "same"]:
    """The pool has this endpoint too, from now on; workers take it up within a second. One added before is replaced.

    config  refuses what the file has already. Raises ConfigError; BrokerError.
    """
    endpoint = _checked(pool, endpoint)
    earlier = {each.id: each for each in registered(store, pool)}
    _refuse_unknown_pool(store, pool, config)
    _refuse_taken(pool, endpoint, earlier, config)
    if earlier.get(endpoint.id) == endpoint:
        return "same"
    _write(store, pool, ("HSET", registered_key(store.keys, pool), endpoint.id, as_kept(endpoint)))
    return "changed" if endpoint.id in earlier else "added"


def was_added(store: Store, pool: str, endpoint_id: str) -> bool:
    """Whether it was added at run time and not removed; the configuration may have that id as well."""
    key = registered_key(store.keys, pool)
    return bool(store.raw(lambda client: client.hexists(key, endpoint_id)))


def remove_endpoint(store: Store, pool: str, endpoint_id: str, where: str = "") -> None:
    """It gets no further task, finishes what runs, and is gone. Only what was added at run time can be removed.

    An endpoint of the configuration with the same id stays as it is.

    where  the place of the configuration that has this id, `headrace.yaml:7`; "" if it has none
    Raises ConfigError for any other endpoint.
    """
    key = registered_key(store.keys, pool)
    if not was_added(store, pool, endpoint_id):
        known, prefix = store.keys.endpoint(pool, endpoint_id), f"pool {pool}"
        if where or store.raw(lambda client: client.exists(known)):
            message = f"endpoint {endpoint_id!r} comes from a configuration file: remove it there, or drain it"
            raise ConfigError([Problem(where or PLACE, None, prefix, message)])
        there = ", ".join(each.id for each in registered(store, pool)) or "none"
        raise ConfigError([Problem(PLACE, None, prefix, f"no endpoint {endpoint_id!r} was added; there is {there}")])
    _write(store, pool, ("HDEL", key, endpoint_id))


def registered(store: Store, pool: str) -> tuple[Endpoint, ...]:
    """What was added to the pool and not removed, by id. What cannot be read is passed over, with a warning."""
    key = registered_key(store.keys, pool)
    rows: Mapping[Any, Any] = store.raw(lambda client: client.hgetall(key))
    found = []
    for name, text in sorted(rows.items()):
        endpoint_id = name.decode("utf-8", "replace")
        try:
            values = json.loads(text)
            found.append(endpoint_from(pool, {**values, "id": endpoint_id}, key))
        except (ValueError, TypeError, ConfigError) as error:
            log.warning("endpoint %s of %s is left out: %s", endpoint_id, key, str(error).splitlines()[0])
    return tuple(found)


def with_registered(config: Config, added: Mapping[str, Sequence[Endpoint]]) -> tuple[Config, tuple[str, ...]]:
    """The configuration as it is served (the added among the file's endpoints), and a line for each left out."""
    pools: dict[str, Pool] = {}
    warnings: list[str] = []
    taken = {endpoint.id: name for name, pool in config.pools.items() for endpoint in pool.endpoints}
    for name, pool in config.pools.items():
        servers = {server_key(endpoint.url): endpoint.id for endpoint in pool.endpoints if endpoint.enabled}
        kept = list(pool.endpoints)
        for endpoint in added.get(name, ()):
            same = servers.setdefault(server_key(endpoint.url), endpoint.id)
            if endpoint.id in taken:
                warnings.append(
                    _left_out(name, endpoint, f"pool {taken[endpoint.id]} of the configuration has that id")
                )
            elif same != endpoint.id:
                warnings.append(_left_out(name, endpoint, f"it is the same server as {same}"))
            else:
                taken[endpoint.id] = name
                kept.append(endpoint)
        pools[name] = replace(pool, endpoints=tuple(kept))
    return replace(config, pools=pools), tuple(warnings)


def as_kept(endpoint: Endpoint) -> str:
    """What stands in Redis under its id."""
    return json.dumps(_values(endpoint), separators=(",", ":"), sort_keys=True)


def _left_out(pool: str, endpoint: Endpoint, why: str) -> str:
    return f"endpoint {endpoint.id}, added to pool {pool} at run time, is left out: {why}; remove it"


def _checked(pool: str, endpoint: Endpoint) -> Endpoint:
    """As it will be read back."""
    values = {**_values(endpoint), "id": endpoint.id, "enabled": endpoint.enabled}
    secrets = {"api_key": endpoint.api_key, "hmac_secret": endpoint.hmac_secret, "headers": dict(endpoint.headers)}
    return endpoint_from(pool, {**values, **{name: "***" for name, value in secrets.items() if value}})


def _refuse_unknown_pool(store: Store, pool: str, config: Config | None) -> None:
    if config is not None and pool in config.pools:
        return
    key = store.keys.pools()
    if not store.raw(lambda client: client.sismember(key, pool)):
        names = sorted(bytes(name).decode() for name in store.pipelined([("SMEMBERS", key)])[0])
        message = f"no pool is called {pool!r}; there is {', '.join(names) or 'none'}"
        raise ConfigError([Problem(PLACE, None, "pool", message)])


def _refuse_taken(pool: str, endpoint: Endpoint, earlier: Mapping[str, Endpoint], config: Config | None) -> None:
    for name, each in (config.pools if config is not None else {}).items():
        if each.endpoint(endpoint.id) is not None:
            source = config.source if config is not None and config.source else "the configuration"
            message = f"{endpoint.id!r} is an endpoint of pool {name!r} in {source}; ids are unique"
            raise ConfigError([Problem(PLACE, None, "id", message)])
    own = config.pools[pool].enabled if config is not None and pool in config.pools else ()
    for other in (*own, *earlier.values()):
        if other.id != endpoint.id and server_key(other.url) == server_key(endpoint.url):
            message = f"the same server as endpoint {other.id!r}; a server counts once"
            raise ConfigError([Problem(PLACE, None, "url", message)])


def _write(store: Store, pool: str, command: tuple[Any, ...]) -> None:
    """With the revision, in one transaction: nobody sees one without the other."""
    bump = ("HINCRBY", store.keys.pool(pool), "revision", 1)
    store.pipelined([("MULTI",), command, bump, ("EXEC",)])


def _values(endpoint: Endpoint) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(endpoint, name) for name in FIELDS}
    return {**values, "capabilities": list(endpoint.capabilities), "labels": dict(endpoint.labels)}
