"""What the configuration says of pools and endpoints, as the file now stands: Redis keeps no addresses of those.

A file that is broken or gone changes nothing here either: the last good one stays.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from broker import admin
from broker.addresses import endpoint_id, endpoint_url
from broker.config import Config, Endpoint
from broker.errors import ConfigError, unforeseen
from broker.inspect import EndpointStatus, PoolStatus
from broker.registered import endpoint_from, registered

if TYPE_CHECKING:
    from broker.store import Store

log = logging.getLogger("headrace.api")

Stamp = tuple[int, int, int]


class Catalog:
    """`reload` reads the configuration again; it is called when the file has changed. Any thread may use it."""

    def __init__(self, config: Config, reload: Callable[[], Config]) -> None:
        self._config = config
        self._reload = reload
        self._stamp = _stamp(config.source)

    @property
    def config(self) -> Config:
        stamp = _stamp(self._config.source)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._config = self._reload()
            except ConfigError as error:
                log.warning("the configuration is kept as it was: %s", str(error).splitlines()[0])
            except Exception as error:
                log.warning("the configuration is kept as it was: %s: %s", self._config.source, unforeseen(error))
        return self._config

    def pools(self, store: Store) -> list[str]:
        """Of the configuration and of Redis, sorted."""
        return sorted({*self.config.pools, *admin.pools(store)})

    def endpoints(self, store: Store, pool: str) -> dict[str, tuple[Endpoint, str]]:
        """By id: the endpoint, and where it comes from: `file`, or `added` at run time (a file's wins)."""
        found = {endpoint.id: (endpoint, "added") for endpoint in registered(store, pool)}
        configured = self.config.pools.get(pool)
        if configured is not None:
            found |= {endpoint.id: (endpoint, "file") for endpoint in configured.endpoints}
        return found

    def place(self, pool: str, endpoint: str) -> str:
        """Where the configuration has it: `headrace.yaml:7`; "" if it does not."""
        configured = self.config.pools.get(pool)
        for at, each in enumerate(configured.endpoints if configured is not None else ()):
            if each.id == endpoint:
                key = f"pools.{pool}.endpoints[{at}].id"
                return self.config.origins.get(key) or self.config.source or "the configuration"
        return ""


def new_endpoint(pool: str, values: Mapping[str, Any], place: str) -> Endpoint:
    """What is to be added at run time; without an `id` one is made of host and port. Raises ConfigError."""
    given = {name: value for name, value in values.items() if value is not None}
    if "id" not in given:
        given["id"] = "endpoint"  # for a URL that is refused anyway
        with suppress(ValueError):
            given["id"] = endpoint_id(endpoint_url(str(given.get("url", ""))))
    return endpoint_from(pool, given, place)


def with_addresses(status: PoolStatus, known: dict[str, tuple[Endpoint, str]]) -> list[dict[str, object]]:
    """Endpoints of a pool as JSON: what Redis knows, with `url`, `labels`, `source` beside it, preferred first.

    One that no worker has registered yet is `absent` (or `disabled`); one that is in Redis only has no url.
    """
    rows = {each.id: each for each in status.endpoints}
    for endpoint, _ in known.values():
        rows.setdefault(endpoint.id, unregistered(endpoint))
    ordered = sorted(rows.values(), key=lambda each: (-each.priority, each.id))
    return [{**each.to_dict(), **_address(known.get(each.id))} for each in ordered]


def unregistered(endpoint: Endpoint) -> EndpointStatus:
    """The status of an endpoint that Redis does not know."""
    cap = endpoint.auto_min if endpoint.max_concurrent == "auto" else endpoint.max_concurrent
    return EndpointStatus(
        id=endpoint.id,
        state="absent" if endpoint.enabled else "disabled",
        priority=endpoint.priority,
        max_concurrent=cap,
        in_flight=0,
        capabilities=endpoint.capabilities,
        enabled=endpoint.enabled,
        served=0,
        failed=0,
        breaker="closed",
        fails=0,
        opened=0,
        reason="",
        open_until=None,
        paused_until=None,
        age=None,
        slots=cap,
        adapts=endpoint.max_concurrent == "auto",
    )


def _address(known: tuple[Endpoint, str] | None) -> dict[str, object]:
    if known is None:
        return {"url": None, "labels": {}, "source": None}
    endpoint, source = known
    return {"url": endpoint.url, "labels": dict(endpoint.labels), "source": source}


def _stamp(source: str | None) -> Stamp | None:
    if source is None:
        return None
    try:
        found = os.stat(source)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
