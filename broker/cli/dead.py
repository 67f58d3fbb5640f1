"""`headrace dead list|show|redrive|purge`: tasks that were given up."""

from __future__ import annotations

import argparse
import sys
import time

from broker import admin
from broker.cli import screen
from broker.cli.inspect import pools_of, print_task, store_of
from broker.errors import UnknownTask, UsageError
from broker.fields import as_text
from broker.store import Store
from broker.task import check_task_id


def dead_list(args: argparse.Namespace) -> int:
    with store_of(args) as (store, _):
        pools = pools_of(store, [args.pool] if args.pool else None)
        pages = {name: admin.dead_list(store, name, args.limit) for name in pools}
        if args.json:
            screen.print_json({name: [each.to_dict() for each in page.letters] for name, page in pages.items()})
            return 0
        rows = [
            (each.id, name, each.outcome, each.attempts, each.endpoint, _clock(each.ended_at), each.reason)
            for name, page in pages.items()
            for each in page.letters
        ]
        if rows:
            screen.print_table(("id", "pool", "outcome", "attempts", "endpoint", "ended", "reason"), rows)
        else:
            sys.stdout.write("no dead letters\n")
        if any(page.cursor and len(page.letters) == args.limit for page in pages.values()):
            sys.stdout.write(f"the latest {args.limit} of each pool; --limit N shows more\n")
    return 0


def dead_show(args: argparse.Namespace) -> int:
    check_task_id(args.id)
    with store_of(args) as (store, _):
        print_task(admin.dead_show(store, args.id), args.json)
    return 0


def dead_redrive(args: argparse.Namespace) -> int:
    _check(args)
    with store_of(args) as (store, _):
        total = admin.Redriven()
        for pool, ids in _chosen(store, args):
            done = admin.redrive(store, pool, ids)
            total = admin.Redriven(
                *(getattr(total, each) + getattr(done, each) for each in ("queued", "unsettled", "done", "unknown"))
            )
    others = [(total.unsettled, "not given up: they wait or run"), (total.done, "done"), (total.unknown, "unknown")]
    if args.json:
        screen.print_json(total.to_dict())
    else:
        sys.stdout.write("; ".join([f"{total.queued} queued again", *(f"{n} {why}" for n, why in others if n)]) + "\n")
    return 1 if any(number for number, _ in others) else 0


def dead_purge(args: argparse.Namespace) -> int:
    _check(args)
    with store_of(args) as (store, _):
        deleted = sum(admin.purge(store, pool, ids) for pool, ids in _chosen(store, args))
    if args.json:
        screen.print_json({"deleted": deleted})
    else:
        sys.stdout.write(f"{deleted} deleted\n")
    return 0 if args.all or deleted == len(set(args.ids)) else 1


def _check(args: argparse.Namespace) -> None:
    if args.all == bool(args.ids):
        raise UsageError("name the tasks by their ids, or --all with --pool P")
    for each in args.ids:
        check_task_id(each)


def _chosen(store: Store, args: argparse.Namespace) -> list[tuple[str, list[str] | None]]:
    """Pools, and the ids in each; None for all dead letters of the pool. Raises UsageError, UnknownTask."""
    if args.all:
        pools = pools_of(store, [args.pool] if args.pool else None)
        if len(pools) > 1:
            raise UsageError(f"--all of which pool? name one with --pool: {', '.join(pools)}")
        return [(pool, None) for pool in pools]
    ids = list(dict.fromkeys(args.ids))
    origins = store.pipelined([("HGET", store.keys.job(each), "origin") for each in ids])
    by_pool: dict[str, list[str]] = {}
    for task_id, origin in zip(ids, origins, strict=True):
        if origin is None:
            raise UnknownTask(f"task {task_id}: not in Redis; nothing was changed; see `headrace dead list`")
        by_pool.setdefault(as_text(origin), []).append(task_id)
    return [(pool, by_pool[pool]) for pool in by_pool]


def _clock(moment: float | None) -> str | None:
    return None if moment is None else time.strftime("%m-%d %H:%M:%S", time.localtime(moment))
