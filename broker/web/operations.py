"""What one route of the API is, for the router and for its description: both are made from the same table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from broker.catalog import Catalog
from broker.config import Config
from broker.store import Store
from broker.web.errors import ApiError, invalid

Schema = dict[str, Any]

POOL_NAME: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 64}
ENDPOINT_ID: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 64}
TASK_ID: Final[Schema] = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"}
PATH: Final = {"pool": POOL_NAME, "endpoint": ENDPOINT_ID, "task": TASK_ID}


@dataclass(frozen=True, slots=True)
class Param:
    """A query parameter. `least` and `most` are for whole numbers."""

    name: str
    kind: Literal["text", "whole", "flag"]
    about: str
    default: Any = None
    least: int = 1
    most: int = 1
    words: tuple[str, ...] = ()

    def read(self, given: str | None) -> Any:
        """Raises ApiError."""
        if given is None:
            return self.default
        if self.kind == "text":
            if self.words and given not in self.words:
                raise invalid(f"{self.name}: must be one of {', '.join(self.words)}, not {given[:40]!r}")
            return given
        if self.kind == "flag":
            if given not in ("true", "false"):
                raise invalid(f"{self.name}: must be true or false, not {given[:40]!r}")
            return given == "true"
        if not (given.isascii() and given.isdigit() and len(given) < 10 and self.least <= int(given) <= self.most):
            raise invalid(f"{self.name}: must be a whole number from {self.least} to {self.most}, not {given[:40]!r}")
        return int(given)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: what its path, query and JSON body said, checked for type but not for sense."""

    path: Mapping[str, str]
    query: Mapping[str, Any]
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Api:
    """What the routes work with."""

    store: Store
    catalog: Catalog

    @property
    def config(self) -> Config:
        return self.catalog.config

    def pool(self, asked: Asked) -> str:
        """The pool in the path. Raises ApiError if nobody knows it."""
        pool = asked.path["pool"]
        known = self.catalog.pools(self.store)
        if pool not in known:
            there = f"there is {', '.join(known[:10])}" if known else "there is none yet"
            raise ApiError(404, "unknown_pool", f"no pool is called {pool[:80]!r}; {there}")
        return pool


# JSON-able, or (status, JSON-able). A blocking one runs in a thread.
Handler = Callable[[Api, Asked], Any]
AsyncHandler = Callable[[Api, Asked], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Operation:
    """`answer`: schema of the JSON it answers with `status`; `body`: schema of what it takes, None for nothing;
    `errors`: further statuses; `waits`: an async handler; `bulk`: may go through a whole queue, in its own time."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler | AsyncHandler
    about: str
    answer: Schema
    status: int = 200
    body: Schema | None = None
    query: tuple[Param, ...] = ()
    errors: tuple[int, ...] = ()
    waits: bool = field(default=False)
    bulk: bool = field(default=False)

    @property
    def name(self) -> str:
        return self.handler.__name__

    @property
    def path_names(self) -> list[str]:
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]
