"""From a configuration to what each process serves. Pure: the supervisor acts on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from broker.configmodel import Config, Pool
from broker.errors import ConfigError, Problem
from workers.plan import Plan, plan
from workers.spec import Spec


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a configuration is served; None for all. `processes` overrides the configuration's."""

    pools: tuple[str, ...] | None = None
    endpoints: tuple[str, ...] | None = None
    processes: int | Literal["auto"] | None = None

    def takes(self, endpoint_id: str, url: str) -> bool:
        return self.endpoints is None or endpoint_id in self.endpoints or url in self.endpoints


@dataclass(frozen=True, slots=True)
class Layout:
    """`plan` is for people; `shares` has for each process its endpoints, as `pool/endpoint`."""

    config: Config
    served: tuple[Pool, ...]
    plan: Plan
    shares: tuple[tuple[str, ...], ...]

    def spec(self, places: Sequence[str], base: Spec) -> Spec:
        """What a process with these places is told; the rest as in `base`."""
        attach = {
            pool.name: here
            for pool in self.served
            if (here := tuple(each.id for each in pool.enabled if place(pool, each.id) in places))
        }
        pools = tuple(pool for pool in self.served if pool.name in attach)
        log = self.config.log
        sharing = {each: sum(each in share for share in self.shares) for each in places}
        return replace(base, sharing=sharing, pools=pools, attach=attach, log_level=log.level, log_format=log.format)


def layout(config: Config, selection: Selection, cpus: int) -> Layout:
    """Raises ConfigError for a pool that the configuration does not have."""
    for name in selection.pools or ():
        if name not in config.pools:
            message = f"no pool is called {name}; there are {', '.join(config.pools) or 'none'}"
            raise unknown(config, message)
    served = tuple(p for name, p in config.pools.items() if selection.pools is None or name in selection.pools)
    slots = [
        (place(pool, endpoint.id), endpoint.max_concurrent, endpoint.priority)
        for pool in served
        for endpoint in pool.enabled
        if selection.takes(endpoint.id, endpoint.url)
    ]
    whole = plan(config.processes if selection.processes is None else selection.processes, slots, cpus)
    shown = _without_pool(whole) if len(served) == 1 else whole
    return Layout(config, served, shown, whole.processes)


def place(pool: Pool, endpoint: str) -> str:
    return f"{pool.name}/{endpoint}"


def unknown(config: Config, message: str) -> ConfigError:
    return ConfigError([Problem(config.source or "configuration", None, "pools", message)])


def _without_pool(whole: Plan) -> Plan:
    """With one pool its name is noise."""

    def short(place: str) -> str:
        return place.partition("/")[2]

    return replace(
        whole,
        processes=tuple(tuple(short(place) for place in places) for places in whole.processes),
        endpoints=tuple(share._replace(id=short(share.id)) for share in whole.endpoints),
    )
