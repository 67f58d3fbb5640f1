"""All that Redis holds, read once: the state of one pool in the form `model.render` has, and keys that nobody owns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.fields import as_date
from broker.outcome import attempts_of
from broker.store import Store

Hash = Mapping[bytes, bytes]
DAY = 86_400_000  # ms

# Keys that may stay for ever; every other key is gone when empty, or has a TTL. See broker/keys.py.
PERMANENT = ("queues", "workers", "x:pools", "x:pool:", "x:endpoints:", "x:endpoint:")
GONE_WHEN_EMPTY = (
    "queue:", "wip:", "scheduled:", "finished:", "failed:", "canceled:", "x:lists:", "x:slots:", "x:deadlines:",
    "x:waiting:", "x:ghosts:",
)  # fmt: skip
WITH_TTL = ("results:", "worker:", "x:bell:", "x:idem:", "x:parts:", "x:reply:", "x:ticket:")


def leaks(store: Store, clock_key: str = "") -> list[str]:
    """Keys that are not on the list in broker/keys.py, or that should have a TTL and have none."""
    prefix = store.keys.prefix + ":"
    found = []
    ttls = _ttls(store)
    jobs = [key for key in ttls if key.startswith(f"{prefix}job:")]
    rows = store.pipelined([("HMGET", key, "x_out", "status") for key in jobs])
    ended = {key: row[0] is not None or row[1] == b"finished" for key, row in zip(jobs, rows, strict=True)}
    for key, ttl in ttls.items():
        has_ttl = ttl >= 0
        name = key.removeprefix(prefix)
        if key == clock_key or (name != key and name.startswith(PERMANENT + GONE_WHEN_EMPTY)):
            continue
        if name.startswith("job:"):
            if has_ttl != ended[key]:
                found.append(f"{key}: TTL {has_ttl}")
        elif not (name.startswith(WITH_TTL) and has_ttl):
            found.append(f"{key}: TTL {has_ttl}")
    return found


def _ttls(store: Store) -> dict[str, int]:
    """In ms, -1 for none."""
    keys = [key.decode() for key in store.pipelined([("KEYS", "*")])[0]]
    return dict(zip(keys, store.pipelined([("PTTL", key) for key in keys]), strict=True))


def read(store: Store, pool: str) -> dict[str, Any]:
    """Fails with KeyError where a key that holds no data was expected to be gone."""
    ttls = _ttls(store)
    prefix = store.keys.prefix + ":"
    names = {key.removeprefix(prefix): key for key in ttls if key.startswith(prefix)}
    commands = {name: _command(name, key) for name, key in names.items()}
    commands = {name: command for name, command in commands.items() if command is not None}
    values = dict(zip(commands, store.pipelined([command for command in commands.values() if command]), strict=True))

    def under(start: str) -> dict[str, Any]:
        return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}

    def zset(name: str) -> dict[str, float]:
        return {member.decode(): float(at) for member, at in values.get(name, [])}

    waiting = {name: [one.decode() for one in ids] for name, ids in under(f"queue:{pool}").items()}
    settings: Hash = values.get(f"x:pool:{pool}", {})
    endpoints: dict[str, Hash] = under(f"x:endpoint:{pool}:")
    assert set(endpoints) == {member.decode() for member in values.get(f"x:endpoints:{pool}", ())}
    slots = under(f"x:slots:{pool}:")
    assert set(slots) <= set(endpoints), "slots of an endpoint that is gone"
    return {
        "tasks": {name: _task(fields, ttls[names[f"job:{name}"]] >= 0) for name, fields in under("job:").items()},
        "lists": {name.removeprefix(":"): ids for name, ids in waiting.items()},
        "index": {member.decode() for member in values.get(f"x:lists:{pool}", ())},
        "scheduled": zset(f"scheduled:{pool}"),
        "deadlines": zset(f"x:deadlines:{pool}"),
        "wip": zset(f"wip:{pool}"),
        "registries": {name: zset(f"{name}:{pool}") for name in ("finished", "failed", "canceled")},
        "endpoints": {name: _endpoint(fields, zset(f"x:slots:{pool}:{name}")) for name, fields in endpoints.items()},
        "listeners": {name.decode(): _listener(text) for name, text in values.get(f"x:waiting:{pool}", {}).items()},
        "bells": {name: [word.decode() for word in words] for name, words in under("x:bell:").items()},
        "idem": {
            name: (text.decode(), round(ttls[names[f"x:idem:{pool}:{name}"]] / DAY))
            for name, text in under(f"x:idem:{pool}:").items()
        },
        "tickets": {duty: holder.decode() for duty, holder in under(f"x:ticket:{pool}:").items()},
        "replies": {name: sorted(one.decode() for one in ids) for name, ids in under("x:reply:").items()},
        "counters": {name.decode(): int(count) for name, count in settings.items() if name.startswith(b"n_")},
        "contact": int(settings.get(b"contact", 0)),
        "amnesty": int(settings.get(b"amnesty", 0)),
        "suspect": settings.get(b"suspect", b"").decode(),
        "turn": int(settings.get(b"turn", 0)),
        "seq": int(settings.get(b"seq", 0)),
    }


def _command(name: str, key: str) -> tuple[Any, ...] | None:
    kinds: dict[tuple[str, ...], tuple[Any, ...]] = {
        ("job:", "x:pool:", "x:endpoint:", "x:waiting:"): ("HGETALL", key),
        ("queue:", "x:bell:", "x:reply:"): ("LRANGE", key, 0, -1),
        ("queues", "x:pools", "x:lists:", "x:endpoints:"): ("SMEMBERS", key),
        ("wip:", "scheduled:", "finished:", "failed:", "canceled:", "x:slots:", "x:deadlines:"): (
            "ZRANGE", key, 0, -1, "WITHSCORES",
        ),
        ("x:idem:", "x:parts:", "x:ticket:"): ("GET", key),
    }  # fmt: skip
    return next((command for starts, command in kinds.items() if name.startswith(starts)), None)


def _task(fields: Hash, expires: bool) -> dict[str, Any]:
    def text(name: str) -> str:
        return fields.get(name.encode(), b"").decode()

    def number(name: str) -> int:
        return int(text(name) or 0)

    done, ended = text("x_done"), round(1000 * (as_date(text("ended_at")) or 0))
    fence = number("x_fence") or int(done.partition(".")[0] or 0)
    attempts = attempts_of(text("x_out"), text("x_try"))
    answer, _, body = fields.get(b"x_ans", b"").partition(b"\n")
    return {
        "status": text("status"), "attempts": attempts, "lost": number("x_del"), "fence": fence,
        "lease": text("x_lease"), "endpoint": text("x_ep"), "run": number("x_run"), "done": done,
        "excluded": text("x_excl"), "outcome": text("x_out"), "why": text("x_why"), "ended": ended,
        "answer": answer.decode(), "body": body, "history": text("x_hist"),
        "deadline": number("x_dl"), "at": number("x_at") or number("x_born"), "born": number("x_born"),
        "digest": text("x_dig"), "priority": text("x_pri") or "normal", "requires": text("x_req"), "expires": expires,
        "late": text("x_late"), "suspect": text("x_sus") == "1",
    }  # fmt: skip


def _endpoint(fields: Hash, slots: dict[str, float]) -> dict[str, Any]:
    def text(name: str, default: str = "") -> str:
        return fields.get(name.encode(), default.encode()).decode()

    def number(name: str) -> int:
        return int(text(name) or 0)

    capabilities = frozenset(text("capabilities").split(",")) - {""}
    return {
        "priority": number("priority"), "cap": number("cap"), "on": text("on") == "1", "gone": text("gone") == "1",
        "capabilities": capabilities, "state": text("state", "closed"), "until": number("until"),
        "pause": number("pause"), "last": number("last"), "seen": number("seen"), "epoch": number("epoch"),
        "fails": number("fails"), "good": number("good"), "cooldown": number("cooldown"), "probe": text("probe"),
        "served": number("served"), "failed": number("failed"), "drain": text("drain") == "1",
        "healthy": {"": None, "0": False, "1": True}[text("healthy")], "checked": number("checked"),
        "ramp": int(text("ramp")) if text("ramp") else None, "ramp_ok": number("ramp_ok"),
        "slots": {task_id: int(at) for task_id, at in slots.items()},
        "rate": f"{text('rate_at')}: {text('rate_n')}, {text('rate_f')}" if text("rate_at") else "",
        "adapt": (
            text("auto") == "1", int(text("floor", "1")), int(text("ceiling", "256")), text("a_step", "grow"),
            text("a_phase", "settle"), number("a_n"), number("a_at"), int(text("a_low", "1000000")),
            float(text("a_rate")) if text("a_rate") else None, number("a_slots"), number("a_rounds"),
            int(text("a_limit")) if text("a_limit") else None, number("a_cut"),
        ),
    }  # fmt: skip


def _listener(text: bytes) -> tuple[int, int, dict[str, int]]:
    spoke, rung, rooms = text.decode().split("|")
    pairs = [one.split("=") for one in rooms.split(",") if one]
    return int(spoke), int(rung), {endpoint: int(room) for endpoint, room in pairs}
