"""`headrace doctor` on Redis: reachable, fit to keep tasks, and what its user may do."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from broker.cli.finding import Finding
from broker.cli.serve import is_loopback
from broker.cli.settings import redis_of
from broker.config import Config
from broker.errors import BrokerError, HeadraceError
from broker.fields import as_count
from broker.rights import needed
from broker.store import Store, unsuitable

LITTLE_MEMORY: Final = 64 << 20  # bytes left for tasks
RIGHTS: Final = "see the rules of its role in docs/security.md"


def look_at_redis(config: Config) -> Iterator[Finding]:
    """A server that cannot be used is a failure with exit code 4."""
    if config.redis.embedded and not config.data_dir.is_dir():
        yield _trial()
        return
    try:
        with redis_of(config) as redis, closing(Store(redis.url)) as store:
            info = store.raw(lambda client: client.info())
            yield from _judge_server(redis.shown, info)
            yield from _rights(redis.shown, store)
    except BrokerError as error:
        yield Finding("failed", "Redis", str(error), 4)
    yield from _way(config)


def _trial() -> Finding:
    """There is no data yet: does an embedded server start at all?"""
    from broker.embedded import EmbeddedServer

    try:
        with tempfile.TemporaryDirectory(prefix="hr-") as folder, EmbeddedServer.acquire(Path(folder)) as server:
            Store(server.url).check()
    except HeadraceError as error:
        return Finding("failed", "Redis", str(error), 4)
    return Finding("ok", "Redis", "embedded; started in a trial, nothing is here yet")


def _judge_server(shown: str, info: dict[str, Any]) -> Iterator[Finding]:
    complaint = unsuitable(info, shown)
    name = "Valkey" if "valkey_version" in info else "Redis"
    text = f"{shown}: {name} {info.get('valkey_version') or info.get('redis_version')}"
    yield Finding("failed", "Redis", f"{text}: {complaint}", 4) if complaint else Finding("ok", "Redis", text)
    if not info.get("aof_enabled"):
        yield Finding("warning", "persistence", "appendonly is off: a restart of Redis loses tasks; set it to yes")
    elif info.get("aof_last_write_status", "ok") != "ok":
        text = f"{shown} cannot write its append-only file: tasks are refused; free disk space where it keeps it"
        yield Finding("warning", "persistence", text)
    limit, used = (as_count(str(info.get(name, 0))) for name in ("maxmemory", "used_memory"))
    if limit and (used > 0.8 * limit or limit - used < LITTLE_MEMORY):
        text = f"{used >> 20} of {limit >> 20} MiB used: enqueue is refused when full; raise maxmemory"
        yield Finding("warning", "memory", text)


def _rights(shown: str, store: Store) -> Iterator[Finding]:
    """What the user may do, asked without doing it. One who may not look is of no use to any verb."""
    may, lacks = [], ""
    for role, commands in needed(store.keys).items():
        refusals = store.rehearse(commands)
        if refusals is None:
            yield Finding("warning", "rights", f"{shown}: cannot be asked for: its user may not MULTI; {RIGHTS}")
            return
        lacks = next((refusal for refusal in refusals if refusal), "")
        if lacks:
            break
        may.append(role)
    if not may:
        yield Finding("failed", "rights", f"{shown}: its user may not even look ({lacks}); {RIGHTS}", 4)
    elif lacks:
        rest = [role for role in needed(store.keys) if role not in may]
        text = f"{shown}: its user may {' and '.join(may)}, but not {' or '.join(rest)} ({lacks}); {RIGHTS}"
        yield Finding("warning", "rights", text)
    else:
        yield Finding("ok", "rights", "look, enqueue and serve")


def _way(config: Config) -> Iterator[Finding]:
    """Whether others can listen in on the way to Redis."""
    parts = urlsplit(config.redis.url)
    checks = parse_qs(parts.query).get("ssl_cert_reqs", ["required"])[0]
    if parts.scheme.startswith("rediss") and checks != "required":
        text = f"ssl_cert_reqs={checks}: anybody on the way can pose as Redis; leave it out, and give ssl_ca_certs"
        yield Finding("warning", "way to Redis", text)
    elif parts.scheme.partition("+")[0] == "redis" and config.redis.password and not is_loopback(parts.hostname or ""):
        text = "the password and every task cross the network in clear: use rediss:// unless nobody can listen there"
        yield Finding("warning", "way to Redis", text)
