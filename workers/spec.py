"""What a worker process is told: a line of JSON when it starts, another whenever that changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from broker.configmodel import Endpoint, Pool


@dataclass(frozen=True, slots=True)
class Spec:
    """Redis, and per pool the endpoints that the process attaches to. `number` grows with every change.

    sharing   `pool/endpoint` to how many processes attach to it, this one included; 1 where it is not named
    data_dir  of the embedded server that `redis_url` leads to; the process is one of its users, so that it does not end
              before the process has released what it runs. None for a server of one's own
    """

    redis_url: str
    pools: tuple[Pool, ...]
    attach: Mapping[str, tuple[str, ...]]
    burst: bool = False
    prefix: str | None = None
    log_level: str = "info"
    log_format: str = "text"
    number: int = 1
    sharing: Mapping[str, int] = field(default_factory=dict)
    data_dir: str | None = None

    def attached(self, pool: Pool) -> tuple[Endpoint, ...]:
        """The pool's endpoints that this process serves."""
        ids = self.attach.get(pool.name, ())
        return tuple(endpoint for endpoint in pool.enabled if endpoint.id in ids)

    def sharers(self, pool: Pool) -> dict[str, int]:
        """Of the endpoints of a pool: how many processes attach to each."""
        return {each.id: self.sharing.get(f"{pool.name}/{each.id}", 1) for each in self.attached(pool)}

    def to_json(self) -> str:
        return json.dumps(
            {
                "redis_url": self.redis_url,
                "pools": [pool.to_wire() for pool in self.pools],
                "attach": {pool: list(endpoints) for pool, endpoints in self.attach.items()},
                "burst": self.burst,
                "prefix": self.prefix,
                "log_level": self.log_level,
                "log_format": self.log_format,
                "number": self.number,
                "sharing": dict(self.sharing),
                "data_dir": self.data_dir,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Spec:
        raw = json.loads(text)
        raw["pools"] = tuple(Pool.from_wire(pool) for pool in raw["pools"])
        raw["attach"] = {pool: tuple(endpoints) for pool, endpoints in raw["attach"].items()}
        return cls(**raw)
