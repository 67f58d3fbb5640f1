"""How a simulated endpoint behaves, and what follows for one request. Pure: time and chance are arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from broker.durations import parse_seconds

MODES: Final = (
    "ok",
    "status",  # answers `status`
    "hang",  # never answers
    "drip",  # answers one byte every `drip_interval`
    "reset",  # resets the connection instead of answering
    "close",  # closes it instead of answering
    "cut",  # closes it in the middle of the body
    "malformed",  # sends a chunk whose size is no number
    "gzip_bomb",  # 64 MiB of zeros in 300 KB, marked as gzip
    "huge",  # a body of `huge_bytes`
    "bad_json",  # 200, and a body that is no JSON
    "unsuccessful",  # 200, and `"success": false`
    "events_cut",  # an event stream that ends, properly framed, before its last event
)
HEALTH: Final = ("ok", "fail", "hang")
_DURATIONS: Final = frozenset({"latency", "jitter", "fail_for", "drip_interval", "retry_after"})
_WORDS: Final = {"mode": MODES, "health": HEALTH}


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The settings. Durations in seconds; in options and control also "200ms". `latency_ms`, `jitter_ms` work too.

    latency        before an answer, of whatever kind
    jitter         the latency varies evenly by this much up and down
    slots          requests at a time; over it 429. 0: no limit
    knee           above so many at a time the latency grows in proportion. 0: never
    mode           how it fails, see MODES; 'ok' does not
    status         for mode 'status'
    retry_after    sent as Retry-After with every error. 0: not sent
    fail_first     only so many requests fail from now on. 0: no such limit
    fail_for       it fails only so long from now on. 0: no such limit
    fail_rate      the share of requests that fail, 0 to 1
    health         GET /health: 'ok', 'fail' (503), 'hang'; independent of `mode`
    drip_interval  for mode 'drip'
    huge_bytes     for mode 'huge'
    max_prompt     characters; a longer prompt is answered 400. 0: no limit
    api_key        a request without this bearer key is answered 401. "": none needed
    """

    latency: float = 0.0
    jitter: float = 0.0
    slots: int = 0
    knee: int = 0
    mode: str = "ok"
    status: int = 503
    retry_after: float = 0.0
    fail_first: int = 0
    fail_for: float = 0.0
    fail_rate: float = 1.0
    health: str = "ok"
    drip_interval: float = 0.1
    huge_bytes: int = 5_000_000_000
    max_prompt: int = 0
    api_key: str = ""

    def changed(self, settings: Mapping[str, Any]) -> Behaviour:
        """With these settings. A limit on failures without a mode means mode 'status'. Raises ValueError."""
        known = {field.name: field.type for field in fields(self)}
        checked: dict[str, Any] = {}
        for name, value in settings.items():
            if name in ("latency_ms", "jitter_ms"):
                name, value = name.removesuffix("_ms"), _number(name, value) / 1000
            if name not in known:
                raise ValueError(f"{name}: unknown; there are {', '.join(known)}")
            checked[name] = _checked(name, value, known[name])
        limited = checked.get("fail_first") or checked.get("fail_for") or "status" in checked
        if limited and "mode" not in checked and self.mode == "ok":
            checked["mode"] = "status"
        return replace(self, **checked)

    def latency_of(self, in_flight: int, chance: float) -> float:
        """Seconds this request takes. `in_flight` with it; `chance` from 0 to 1."""
        seconds = max(0.0, self.latency + self.jitter * (2 * chance - 1))
        return seconds * max(1.0, in_flight / self.knee) if self.knee else seconds


def _checked(name: str, value: Any, kind: object) -> Any:
    if name in _WORDS:
        if value not in _WORDS[name]:
            raise ValueError(f"{name} {value!r}: must be one of {', '.join(_WORDS[name])}")
        return value
    if name == "api_key":
        return str(value)
    if name in _DURATIONS:
        try:
            return parse_seconds(value)
        except ValueError as error:
            raise ValueError(f"{name} {value!r}: {error}") from None
    number = _number(name, value)
    if kind == "int" and number != int(number):
        raise ValueError(f"{name} {value!r}: must be a whole number")
    return int(number) if kind == "int" else number


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < 1e15:
        raise ValueError(f"{name} {value!r}: must be a number, 0 or more")
    return number


@dataclass(frozen=True, slots=True)
class Asked:
    """What matters of a request: the prompt's length, the bearer key, `x_sim` of its body, X-Task-Attempt."""

    prompt_chars: int
    bearer: str
    wishes: Mapping[str, Any]
    attempt: int


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a request: after `delay` seconds, `mode` with `status`."""

    delay: float
    mode: str
    status: int
    retry_after: float


@dataclass(frozen=True, slots=True)
class Moment:
    """When a request came: seconds and requests since the last control, requests in flight with it, two chances."""

    since_control: float
    earlier: int
    in_flight: int
    chance: float
    second_chance: float


def fate(behaviour: Behaviour, asked: Asked, moment: Moment) -> Fate:
    """Limits first, then what the request itself wishes, then the mode. Raises ValueError for a bad `x_sim`."""
    delay = behaviour.latency_of(moment.in_flight, moment.second_chance)
    if behaviour.api_key and asked.bearer != behaviour.api_key:
        return Fate(0.0, "status", 401, 0.0)
    if behaviour.slots and moment.in_flight > behaviour.slots:
        return Fate(0.0, "status", 429, behaviour.retry_after)
    if behaviour.max_prompt and asked.prompt_chars > behaviour.max_prompt:
        return Fate(delay, "status", 400, 0.0)
    if asked.wishes:
        return _wished(behaviour, asked, delay)
    if behaviour.mode == "ok" or not _fails(behaviour, moment):
        return Fate(delay, "ok", 200, 0.0)
    return Fate(delay, behaviour.mode, behaviour.status, behaviour.retry_after)


def _fails(behaviour: Behaviour, moment: Moment) -> bool:
    if behaviour.fail_first and moment.earlier >= behaviour.fail_first:
        return False
    if behaviour.fail_for and moment.since_control >= behaviour.fail_for:
        return False
    return moment.chance < behaviour.fail_rate


def _wished(behaviour: Behaviour, asked: Asked, delay: float) -> Fate:
    """`x_sim` takes mode, status, retry_after, latency, latency_ms, and fail_first: as many *attempts* as fail."""
    wished = Behaviour(latency=delay).changed(
        {key: value for key, value in asked.wishes.items() if key != "fail_first"}
    )
    first = int(_number("fail_first", asked.wishes.get("fail_first", 0)))
    mode = "status" if first and wished.mode == "ok" else wished.mode
    if mode == "ok" or (first and asked.attempt > first):
        return Fate(wished.latency, "ok", 200, 0.0)
    return Fate(wished.latency, mode, wished.status, wished.retry_after or behaviour.retry_after)
