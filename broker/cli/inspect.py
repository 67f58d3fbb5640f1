"""`headrace status`, `task show|cancel`, `endpoint list`: what Redis knows. Looking changes nothing."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from broker import admin
from broker.cli import screen
from broker.cli.settings import load, meant, redis_of
from broker.errors import UnknownTask, UsageError
from broker.logs import escape
from broker.store import Store
from broker.task import check_task_id

WATCH_S: Final = 2.0
CLEAR: Final = "\x1b[H\x1b[2J"


@contextmanager
def store_of(args: argparse.Namespace) -> Iterator[tuple[Store, str]]:
    """The store, checked, and what to call it."""
    config = load(args, quiet=True)
    with redis_of(config, start=False) as redis:
        store = Store(redis.url)
        try:
            store.check()
            yield store, redis.shown
        finally:
            store.close()


def pools_of(store: Store, named: list[str] | None) -> list[str]:
    """The pools that are registered, or those of them that were named. Raises UsageError."""
    known = admin.pools(store)
    for name in named or ():
        if name not in known:
            raise UsageError(f"pool {name!r}: no worker has registered it{meant(name, known)}")
    return named or known


def status(args: argparse.Namespace) -> int:
    """Pools, queues and endpoints; with --watch again and again."""
    with store_of(args) as (store, shown):
        while True:
            found = [admin.status(store, name) for name in pools_of(store, args.pool)]
            if args.watch and sys.stdout.isatty():
                sys.stdout.write(CLEAR)
            if args.json:
                screen.print_json({"redis": shown, "pools": [each.to_dict() for each in found]})
            else:
                _print_status(shown, found)
            sys.stdout.flush()
            if not args.watch:
                return 0
            time.sleep(WATCH_S)


def _print_status(shown: str, found: list[admin.PoolStatus]) -> None:
    sys.stdout.write(f"Redis: {shown}\n")
    if not found:
        sys.stdout.write("no pools: no worker has registered one yet\n")
    for pool in found:
        oldest = f", the oldest for {screen.span(pool.oldest)}" if pool.oldest is not None else ""
        special = ", ".join(f"{count} {name}" for name, count in pool.waiting.items() if count and name != "normal")
        sys.stdout.write(
            f"\npool {pool.pool}: {pool.backlog} waiting{f' ({special})' if special else ''}{oldest}; "
            f"{pool.delayed} delayed, {pool.running} running, {screen.counted(pool.dead, 'dead letter')}; "
            f"{screen.counted(len(pool.processes), 'process', 'processes')}\n"
        )
        _print_endpoints(pool)


def _print_endpoints(pool: admin.PoolStatus) -> None:
    rows = [
        (
            each.id, each.state, each.priority, f"{each.in_flight}/{each.max_concurrent}", each.served, each.failed,
            "never" if each.age is None else screen.span(each.age) + " ago", each.reason or "",
        )
        for each in pool.endpoints
    ]  # fmt: skip
    if rows:
        screen.print_table(("endpoint", "state", "priority", "slots", "served", "failed", "seen", "why"), rows)


def endpoint_list(args: argparse.Namespace) -> int:
    with store_of(args) as (store, _):
        found = [admin.status(store, name) for name in pools_of(store, [args.pool] if args.pool else None)]
        if args.json:
            screen.print_json({pool.pool: [each.to_dict() for each in pool.endpoints] for pool in found})
            return 0
        for pool in found:
            sys.stdout.write(f"pool {pool.pool}\n")
            _print_endpoints(pool)
    return 0


def task_show(args: argparse.Namespace) -> int:
    check_task_id(args.id)
    with store_of(args) as (store, _):
        print_task(admin.task_show(store, args.id), args.json)
    return 0


def task_cancel(args: argparse.Namespace) -> int:
    check_task_id(args.id)
    with store_of(args) as (store, _):
        count = admin.cancel(store, [args.id])
        if count.unknown:
            raise UnknownTask(f"task {args.id}: not in Redis; it never was, or its outcome has expired")
        if args.json:
            screen.print_json({"id": args.id, "canceled": bool(count.canceled)})
        elif count.canceled:
            sys.stdout.write(f"{args.id} canceled\n")
        else:
            state = admin.task_show(store, args.id).state
            sys.stdout.write(f"{args.id} not canceled: it is {state} already\n")
    return 0 if count.canceled else 1


def print_task(task: admin.TaskView, as_json: bool) -> None:
    """All about one task, one thing a line, then its attempts."""
    told = task.to_dict()
    if as_json:
        screen.print_json(told)
        return
    history = told.pop("history")
    for name, value in told.items():
        if value not in (None, "", [], (), 0):
            sys.stdout.write(f"{name.replace('_', ' '):<16} {escape(_shown(name, value))}\n")
    if history:
        sys.stdout.write("\n")
        rows = [
            (
                each["number"], each["endpoint"], each["kind"], each["status_code"], each["error"],
                screen.span(each["ended_at"] - each["started_at"]) if each["ended_at"] and each["started_at"] else None,
            )
            for each in history
        ]  # fmt: skip
        screen.print_table(("attempt", "endpoint", "kind", "status", "error", "took"), rows)


def _shown(name: str, value: Any) -> str:
    if name.endswith("_at") or name == "deadline":
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value)
    return str(value)
