"""What a changed configuration means: for people, for the processes, and for the workers in a process. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

from broker.configmodel import Config, Endpoint, Pool
from broker.secret import Secret

AT_START_ONLY: Final = ("redis", "api")  # settings that a running `headrace worker` does not take over
UNSHOWN: Final = frozenset({"headers", "probe"})  # may carry credentials or people's text


@dataclass(frozen=True, slots=True)
class Changes:
    """`applied`: a line each; `later`: settings that take effect at the next start."""

    applied: tuple[str, ...] = ()
    later: tuple[str, ...] = ()

    def __str__(self) -> str:
        later = [f"{name} takes effect at the next start" for name in self.later]
        return "; ".join((*self.applied, *later)) or "nothing changed"


def changes(old: Config, new: Config) -> Changes:
    """What differs, for the log; secrets are named, not shown."""
    lines: list[str] = []
    for name in old.pools:
        if name not in new.pools:
            lines.append(f"pool {name} removed")
    for name, pool in new.pools.items():
        earlier = old.pools.get(name)
        if earlier is None:
            lines.append(f"pool {name} added with {', '.join(each.id for each in pool.endpoints) or 'no endpoint'}")
        else:
            lines += _pool_changes(earlier, pool)
    lines += _differences(old.log, new.log, "log.")
    lines += _differing("processes", old.processes, new.processes)
    later = tuple(name for name in AT_START_ONLY if getattr(old, name) != getattr(new, name))
    return Changes(tuple(lines), later)


def _pool_changes(old: Pool, new: Pool) -> Iterator[str]:
    before = {endpoint.id: endpoint for endpoint in old.endpoints}
    after = {endpoint.id: endpoint for endpoint in new.endpoints}
    for gone in before.keys() - after.keys():
        yield f"endpoint {gone} removed: it finishes what it runs"
    for endpoint_id, endpoint in after.items():
        if endpoint_id not in before:
            yield f"endpoint {endpoint_id} added{'' if endpoint.enabled else ', disabled'}"
            continue
        for line in _differences(before[endpoint_id], endpoint, ""):
            word = {"enabled true -> false": "disabled", "enabled false -> true": "enabled"}.get(line, line)
            yield f"endpoint {endpoint_id} {word}"
    for field in fields(Pool):
        if field.name not in ("name", "endpoints"):
            prefix = f"pool {new.name}: {field.name}"
            was, now = getattr(old, field.name), getattr(new, field.name)
            yield from _differences(was, now, f"{prefix}.") if is_dataclass(now) else _differing(prefix, was, now)


def _differences(old: Any, new: Any, prefix: str) -> Iterator[str]:
    for field in fields(new):
        was, now = getattr(old, field.name), getattr(new, field.name)
        yield from _differing(f"{prefix}{field.name}", was, now)


def _differing(name: str, was: Any, now: Any) -> Iterator[str]:
    if was == now:
        return
    if name.rpartition(".")[2] in UNSHOWN or isinstance(was, Secret) or isinstance(now, Secret):
        yield f"{name} changed"
    else:
        yield f"{name} {_text(was)} -> {_text(now)}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(dict(value)) if isinstance(value, Mapping) else str(value)


# Processes


def match(running: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> list[int | None]:
    """For each share that is wanted, the running process that takes it; None: a new one. What is not named ends.

    A share goes to where most of its endpoints are served already, so that connections are kept.
    """
    overlaps = sorted(
        (-len(set(share) & set(places)), at, process)
        for at, share in enumerate(wanted)
        for process, places in enumerate(running)
    )
    taken: dict[int, int] = {}
    used: set[int] = set()
    for _, at, process in overlaps:
        if at not in taken and process not in used:
            taken[at] = process
            used.add(process)
    return [taken.get(at) for at in range(len(wanted))]


# Workers in a process


@dataclass(frozen=True, slots=True)
class WorkerChanges:
    """Ids of endpoints. A worker that is `kept` stays as it is; one that is `replaced` begins the tasks from now on,
    over the same connections; one that is `reconnected` needs connections of its own, as those that are `added` do.
    """

    kept: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    reconnected: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def worker_changes(old: Pool, serving: Sequence[Endpoint], new: Pool, wanted: Sequence[Endpoint]) -> WorkerChanges:
    """From the workers that serve `old` to those that serve `new`."""
    before = {endpoint.id: endpoint for endpoint in serving}
    found: dict[str, list[str]] = {"kept": [], "replaced": [], "reconnected": [], "added": []}
    same_rules = _rules(old) == _rules(new)
    for endpoint in wanted:
        earlier = before.pop(endpoint.id, None)
        if earlier is None:
            kind = "added"
        elif old.connection != new.connection or _server(earlier) != _server(endpoint):
            kind = "reconnected"
        elif earlier == endpoint and same_rules:
            kind = "kept"
        else:
            kind = "replaced"
        found[kind].append(endpoint.id)
    return WorkerChanges(**{kind: tuple(ids) for kind, ids in found.items()}, removed=tuple(before))


def _rules(pool: Pool) -> tuple[Any, ...]:
    """All that a worker reads of its pool."""
    return (pool.adapter, pool.retry, pool.timeout, pool.queue, pool.connection)


def _server(endpoint: Endpoint) -> tuple[Any, ...]:
    """What connections depend on."""
    return (endpoint.url, endpoint.max_concurrent, endpoint.auto_max)
