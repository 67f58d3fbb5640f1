"""`headrace status`, `task show|explain|cancel`: what Redis knows. Looking changes nothing."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from broker import admin
from broker.cli import screen
from broker.cli.settings import load, meant, redis_of
from broker.errors import UnknownTask, UsageError
from broker.logs import escape
from broker.store import Store
from broker.task import check_task_id


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

        def read() -> list[admin.PoolStatus]:
            return [admin.status(store, name) for name in pools_of(store, args.pool)]

        if args.watch:
            from broker.cli.watch import watch

            return watch(args, shown, read, lambda found: _print_status(shown, found))
        found = read()
        if args.json:
            screen.print_json({"redis": shown, "pools": [each.to_dict() for each in found]})
        else:
            _print_status(shown, found)
    return 0


def _print_status(shown: str, found: Sequence[admin.PoolStatus]) -> None:
    from broker.cli.watch import headline, late

    sys.stdout.write(f"Redis: {shown}\n")
    if not found:
        sys.stdout.write("no pools: no worker has registered one yet\n")
    for pool in found:
        sys.stdout.write(f"\n{headline(pool)}\n")
        _print_endpoints(pool)
        sys.stdout.writelines(f"{line}\n" for line in late(pool))


def _print_endpoints(pool: admin.PoolStatus) -> None:
    from broker.cli.watch import why

    rows = [
        (
            each.id, each.state, each.priority, f"{each.in_flight}/{each.slots}", each.served, each.failed,
            "never" if each.age is None else screen.span(each.age) + " ago", why(each),
        )
        for each in pool.endpoints
    ]  # fmt: skip
    if rows:
        screen.print_table(("endpoint", "state", "priority", "slots", "served", "failed", "seen", "why"), rows)


def task_show(args: argparse.Namespace) -> int:
    check_task_id(args.id)
    with store_of(args) as (store, _):
        print_task(admin.task_show(store, args.id), args.json)
    return 0


def task_explain(args: argparse.Namespace) -> int:
    """Why it waits: its place, and what keeps each endpoint from it."""
    check_task_id(args.id)
    with store_of(args) as (store, _):
        told = admin.task_explain(store, args.id)
        if args.json:
            screen.print_json(told.to_dict())
            return 0
        sys.stdout.write(f"{told.id} of pool {told.pool}, {told.state}: {escape(told.summary)}\n")
        if told.endpoints:
            rows = [(each.endpoint, "yes" if each.allowed else "no", each.why) for each in told.endpoints]
            screen.print_table(("endpoint", "may take it", "now"), rows)
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
    if name == "ttl":
        return screen.span(value)
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value)
    return str(value)
