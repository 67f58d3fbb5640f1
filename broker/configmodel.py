"""The configuration as frozen values. Durations are float seconds, sizes are bytes. `broker.config` loads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from broker.addresses import EMBEDDED, redis_url_with
from broker.errors import ConfigError, Problem
from broker.secret import MASK, Secret
from broker.task import Request

Adapter = Literal["http", "npu"]
ADAPTERS: tuple[Adapter, ...] = ("http", "npu")
TransportName = Literal["auto", "httptools", "pyreqwest", "aiohttp", "httpx"]
TRANSPORTS: tuple[TransportName, ...] = ("auto", "httptools", "pyreqwest", "aiohttp", "httpx")
DATA_FOLDER = ".headrace"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server. `url` has no trailing slash; `priority` 1-10, 10 is preferred; `max_concurrent` is its slots in all;
    with "auto" they are found out, from `auto_min` to `auto_max`.

    `headers` go out with every request (lower-case names; they may carry credentials, so they are never shown).
    """

    id: str
    url: str
    priority: int = 5
    max_concurrent: int | Literal["auto"] = 8
    capabilities: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    enabled: bool = True
    api_key: Secret | None = None
    hmac_secret: Secret | None = None
    headers: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    auto_min: int = 1
    auto_max: int = 256


@dataclass(frozen=True, slots=True)
class Retry:
    """`max_attempts` counts the first one. Backoff doubles from `initial` to `max`, with full jitter; seconds."""

    max_attempts: int = 3
    backoff_initial: float = 0.5
    backoff_max: float = 30.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: to connect; until the answer's first byte; between two pieces of it; for one whole attempt."""

    connect: float = 5.0
    first_byte: float = 60.0
    idle: float = 30.0
    attempt: float = 300.0


@dataclass(frozen=True, slots=True)
class Health:
    """`GET path` each `interval` seconds, at most `timeout` seconds long. `probe` is a real request, None for none."""

    path: str = "/health"
    interval: float = 30.0
    timeout: float = 5.0
    probe: Request | None = field(default=None, hash=False)
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Breaker:
    """Opens after `failures` in a row, for `cooldown` seconds, doubling to `cooldown_max`.

    It opens too when `failure_percent` of at least `minimum_volume` attempts failed within one to two `rate_window`
    seconds (0 percent: never). With `slow_start` a recovered endpoint is given 1, 2, 4 ... slots.
    """

    failures: int = 5
    cooldown: float = 60.0
    cooldown_max: float = 600.0
    half_open_successes: int = 1
    failure_percent: int = 50
    minimum_volume: int = 20
    rate_window: float = 30.0
    slow_start: bool = True


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Limits in tasks and bytes; TTLs, `spill_after`, `lease` and `drain` in seconds."""

    max_depth: int = 100_000
    result_ttl: float = 86_400.0
    dead_letter_ttl: float = 1_209_600.0
    payload_limit: int = 262_144
    result_limit: int = 1_048_576
    spill_after: float = 0.1
    lease: float = 30.0
    max_deliveries: int = 5
    drain: float = 30.0


@dataclass(frozen=True, slots=True)
class Connection:
    """`transport` is the HTTP client; connections idle for `idle_discard` seconds are closed by us."""

    transport: TransportName = "auto"
    idle_discard: float = 4.0


@dataclass(frozen=True, slots=True)
class Pool:
    """A named group of endpoints that can serve the same tasks, with its policies."""

    name: str
    endpoints: tuple[Endpoint, ...] = ()
    adapter: Adapter = "http"
    retry: Retry = Retry()
    timeout: Timeouts = Timeouts()
    health: Health = Health()
    breaker: Breaker = Breaker()
    queue: QueuePolicy = QueuePolicy()
    connection: Connection = Connection()

    @property
    def enabled(self) -> tuple[Endpoint, ...]:
        """The enabled endpoints, in the order of the configuration."""
        return tuple(endpoint for endpoint in self.endpoints if endpoint.enabled)

    @property
    def order(self) -> tuple[Endpoint, ...]:
        """The enabled endpoints as tasks prefer them: priority 10 first, then by id (within one, load decides)."""
        return tuple(sorted(self.enabled, key=lambda endpoint: (-endpoint.priority, endpoint.id)))

    def endpoint(self, endpoint_id: str) -> Endpoint | None:
        return next((endpoint for endpoint in self.endpoints if endpoint.id == endpoint_id), None)

    def to_wire(self) -> dict[str, Any]:
        """JSON-able, with the secrets in clear: for the pipe to a worker process, nothing else."""
        wire: dict[str, Any] = to_plain(self)
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Pool:
        """The equal of what `to_wire` was called on."""
        health = dict(wire["health"])
        probe = health.pop("probe")
        return cls(
            name=wire["name"],
            endpoints=tuple(_endpoint_from(endpoint) for endpoint in wire["endpoints"]),
            adapter=wire["adapter"],
            retry=Retry(**wire["retry"]),
            timeout=Timeouts(**wire["timeout"]),
            health=Health(**health, probe=None if probe is None else Request(**probe)),
            breaker=Breaker(**wire["breaker"]),
            queue=QueuePolicy(**wire["queue"]),
            connection=Connection(**wire["connection"]),
        )


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """`url` never carries credentials (or is `embedded`): it may be shown. They stand in `username` and `password`;
    those for Sentinels in `sentinel_username` and `sentinel_password`.
    """

    url: str = EMBEDDED
    username: str | None = None
    password: Secret | None = None
    data_dir: str | None = None
    sentinel_username: str | None = None
    sentinel_password: Secret | None = None

    @property
    def embedded(self) -> bool:
        return self.url == EMBEDDED

    def connection_url(self) -> str:
        """The URL with its credentials in clear: to connect with, never to show."""
        password, of_sentinels = (each.reveal() if each else None for each in (self.password, self.sentinel_password))
        return redis_url_with(self.url, self.username, password, self.sentinel_username, of_sentinels)

    @property
    def shown(self) -> str:
        """For people: the URL, credentials masked, as errors of the connection show it."""
        return redis_url_with(self.url, None, "x").replace(":x@", f"{MASK}@", 1) if self.password else self.url


@dataclass(frozen=True, slots=True)
class Api:
    """Where `serve` listens, and the bearer token it asks for. Without a token it must stay on loopback."""

    host: str = "127.0.0.1"
    port: int = 8080
    token: Secret | None = None

    @property
    def on_loopback(self) -> bool:
        return self.host == "localhost" or self.host == "::1" or self.host.startswith("127.")


@dataclass(frozen=True, slots=True)
class Log:
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything. `source` is the file it was read from; `warnings` are lines for people.

    `origins` tells, for each key that was set, where: `headrace.yaml:12`, `environment REDIS_URL`, `--processes`. A
    key that is not in it has its default.
    """

    redis: RedisSettings = RedisSettings()
    pools: Mapping[str, Pool] = field(default_factory=dict, hash=False)
    processes: int | Literal["auto"] = "auto"
    api: Api = Api()
    log: Log = Log()
    source: str | None = None
    warnings: tuple[str, ...] = field(default=(), compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def data_dir(self) -> Path:
        """Where the embedded server keeps its data: as configured, else `.headrace/` beside the file or here."""
        return folder_of(self.source) / (self.redis.data_dir or DATA_FOLDER)

    def to_dict(self, masked: bool = True) -> dict[str, Any]:
        """As in the YAML file, every key written out. Loaded again, `masked=False` gives an equal configuration."""
        from broker.configshow import config_dict

        return config_dict(self, masked)

    def to_wire(self) -> dict[str, Any]:
        """JSON-able, with the secrets in clear: for the pipe to a worker process, nothing else."""
        wire: dict[str, Any] = to_plain(self)
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Config:
        """The equal of what `to_wire` was called on."""
        return cls(
            redis=_redis_from(wire["redis"]),
            pools={name: Pool.from_wire(pool) for name, pool in wire["pools"].items()},
            processes=wire["processes"],
            api=Api(**{**wire["api"], "token": _secret_from(wire["api"]["token"])}),
            log=Log(**wire["log"]),
            source=wire["source"],
            warnings=tuple(wire["warnings"]),
            origins=wire["origins"],
        )


def folder_of(source: str | Path | None) -> Path:
    """Where relative paths of a configuration start: its file's folder, or the current one. Raises ConfigError."""
    try:
        return Path(source).absolute().parent if source else Path.cwd()
    except OSError as error:
        message = f"{error.strerror or 'cannot be found'}; go to a folder that exists"
        raise ConfigError([Problem("current folder", None, "", message)]) from None


def to_plain(value: Any) -> Any:
    """Dataclasses, mappings and tuples as dicts and lists; secrets in clear."""
    if isinstance(value, Secret):
        return value.reveal()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def _secret_from(value: str | None) -> Secret | None:
    return None if value is None else Secret(value)


def _redis_from(wire: Mapping[str, Any]) -> RedisSettings:
    return RedisSettings(**{**wire, **{name: _secret_from(wire[name]) for name in ("password", "sentinel_password")}})


def _endpoint_from(wire: Mapping[str, Any]) -> Endpoint:
    changed = {
        "capabilities": tuple(wire["capabilities"]),
        "api_key": _secret_from(wire["api_key"]),
        "hmac_secret": _secret_from(wire["hmac_secret"]),
    }
    return Endpoint(**{**wire, **changed})
