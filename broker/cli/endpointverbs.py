"""`headrace endpoint list|drain|undrain|reset|add|remove`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from broker import admin
from broker.catalog import Catalog, new_endpoint, with_addresses
from broker.cli import screen
from broker.cli.inspect import pools_of
from broker.cli.settings import load, meant, redis_of
from broker.config import Config
from broker.errors import UsageError
from broker.registered import add_endpoint, remove_endpoint, was_added
from broker.scripts import Command
from broker.store import Store

Work = Callable[[Store, Catalog], int]


def endpoint_list(args: argparse.Namespace) -> int:
    """State, load, health and counters of each, preferred first."""

    def work(store: Store, catalog: Catalog) -> int:
        found = {pool: _rows(store, catalog, pool) for pool in _pools(store, catalog, args.pool)}
        if args.json:
            screen.print_json(found)
            return 0
        for pool, rows in found.items():
            sys.stdout.write(f"pool {pool}\n")
            if rows:
                screen.print_table(HEADERS, [line(row) for row in rows])
            else:
                sys.stdout.write("no endpoints\n")
        return 0

    return _with_store(args, work)


HEADERS = ("endpoint", "state", "priority", "slots", "health", "breaker", "served", "failed", "seen", "url")


def line(row: dict[str, Any]) -> tuple[object, ...]:
    """One endpoint as a row under HEADERS."""
    whole = f" of {row['max_concurrent']}" if row["slots"] < row["max_concurrent"] else ""  # while it recovers
    slots = f"{row['in_flight']}/{row['slots']}{whole}"
    return (
        row["id"], row["state"], row["priority"], slots, health(row), breaker(row), row["served"], row["failed"],
        "never" if row["age"] is None else screen.span(row["age"]) + " ago", row["url"],
    )  # fmt: skip


def health(row: dict[str, Any]) -> str:
    if row["healthy"] is None:
        return "not checked"
    return "good" if row["healthy"] else f"bad: {row['health_detail']}"


def breaker(row: dict[str, Any]) -> str:
    word = str(row["breaker"]).replace("_", " ")
    return f"{word}: {row['reason']}" if row["reason"] else word


def endpoint_drain(args: argparse.Namespace) -> int:
    return _change(args, lambda store, pool: store.scripts.drain(pool, args.id, True), "drained: what runs finishes")


def endpoint_undrain(args: argparse.Namespace) -> int:
    return _change(args, lambda store, pool: store.scripts.drain(pool, args.id, False), "in use again")


def endpoint_reset(args: argparse.Namespace) -> int:
    return _change(args, lambda store, pool: store.scripts.reset(pool, args.id), "reset: breaker closed, pause ended")


def _change(args: argparse.Namespace, command: Callable[[Store, str], Command[str]], what: str) -> int:
    def work(store: Store, catalog: Catalog) -> int:
        pool = _pool_with(store, catalog, args.id, args.pool)
        if store.run(command(store, pool)) == "unknown":
            raise UsageError(f"endpoint {args.id!r} of pool {pool!r}: no worker has registered it in Redis yet")
        return _told(args, store, catalog, pool, args.id, what)

    return _with_store(args, work)


def endpoint_add(args: argparse.Namespace) -> int:
    """Workers take it up within a second, and again after every restart."""
    values = {
        "id": args.id, "url": args.url, "priority": args.priority, "max_concurrent": args.slots,
        "capabilities": args.capability, "labels": _labels(args.label),
    }  # fmt: skip

    def work(store: Store, catalog: Catalog) -> int:
        pool = _one_pool(catalog, _pools(store, catalog, args.pool))
        endpoint = new_endpoint(pool, values, "command line")
        word = add_endpoint(store, pool, endpoint, catalog.config)
        return _told(args, store, catalog, pool, endpoint.id, "there already" if word == "same" else word)

    return _with_store(args, work)


def endpoint_remove(args: argparse.Namespace) -> int:
    """What runs on it finishes; then it is gone."""

    def work(store: Store, catalog: Catalog) -> int:
        pool = _pool_with(store, catalog, args.id, args.pool, removable=True)
        place = catalog.place(pool, args.id)
        if place and not was_added(store, pool, args.id):
            raise UsageError(f"endpoint {args.id!r} is in {place}: remove it there, or drain it")
        remove_endpoint(store, pool, args.id)
        if args.json:
            screen.print_json({"id": args.id, "removed": True})
        elif place:
            sys.stdout.write(f"{args.id} of pool {pool}: the added one is removed; that of {place} stays\n")
        else:
            sys.stdout.write(f"{args.id} of pool {pool}: removed; what runs on it finishes\n")
        return 0

    return _with_store(args, work)


def _told(args: argparse.Namespace, store: Store, catalog: Catalog, pool: str, endpoint: str, what: str) -> int:
    if args.json:
        screen.print_json(next(row for row in _rows(store, catalog, pool) if row["id"] == endpoint))
    else:
        sys.stdout.write(f"{endpoint} of pool {pool}: {what}\n")
    return 0


def _with_store(args: argparse.Namespace, work: Work) -> int:
    config: Config = load(args, quiet=True)
    with redis_of(config, start=False) as redis:
        store = Store(redis.url)
        try:
            store.check()
            return work(store, Catalog(config, lambda: config))
        finally:
            store.close()


def _rows(store: Store, catalog: Catalog, pool: str) -> list[dict[str, Any]]:
    return with_addresses(admin.status(store, pool), catalog.endpoints(store, pool))


def _pools(store: Store, catalog: Catalog, named: str | None) -> list[str]:
    """Those of Redis, and of the configuration. Raises UsageError for a name that neither knows."""
    if named is not None and named not in catalog.config.pools:
        return pools_of(store, [named])
    return [named] if named is not None else catalog.pools(store)


def _one_pool(catalog: Catalog, pools: list[str]) -> str:
    """The only one, or the only one that the configuration has: others may be left over in Redis. Raises UsageError."""
    pools = [pool for pool in pools if pool in catalog.config.pools] or pools
    if len(pools) != 1:
        raise UsageError(f"which pool? name one with --pool: {', '.join(pools)}" if pools else "there is no pool yet")
    return pools[0]


def _pool_with(store: Store, catalog: Catalog, endpoint: str, named: str | None, *, removable: bool = False) -> str:
    """The pool that has the endpoint. Raises UsageError, which proposes none but `removable` ones if so told."""
    ids: dict[str, list[str]] = {}
    proposed: set[str] = set()
    for pool in _pools(store, catalog, named):
        for row in _rows(store, catalog, pool):
            ids.setdefault(row["id"], []).append(pool)
            if not removable or was_added(store, pool, row["id"]):
                proposed.add(row["id"])
    if endpoint not in ids:
        raise UsageError(f"endpoint {endpoint!r}: no pool has it{meant(endpoint, sorted(proposed))}")
    return _one_pool(catalog, ids[endpoint])


def _labels(words: list[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise UsageError(f"--label {word!r}: write NAME=VALUE")
        found[name] = value
    return found
