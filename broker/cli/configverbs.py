"""`headrace config check|show`."""

from __future__ import annotations

import argparse
import os
import sys

from broker.cli import screen
from broker.cli.settings import load
from broker.config import Config, Pool


def check(args: argparse.Namespace) -> int:
    """Says what is wrong, or how it will be used: the order of the endpoints, and the processes that serve them."""
    config = load(args)
    if args.json:
        screen.print_json({"ok": True, "source": config.source, "warnings": config.warnings, "pools": _orders(config)})
        return 0
    sys.stdout.write(f"{config.source or 'no file: defaults and environment'}: ok\nRedis: {config.redis.shown}\n")
    for pool in config.pools.values():
        sys.stdout.write(f"\npool {pool.name} ({pool.adapter}), preferred first:\n")
        _print_plan(config, pool)
    if not config.pools:
        sys.stdout.write("no pools: nothing will be served\n")
    return 0


def _orders(config: Config) -> dict[str, list[str]]:
    return {name: [endpoint.id for endpoint in pool.order] for name, pool in config.pools.items()}


def _print_plan(config: Config, pool: Pool) -> None:
    from workers.plan import plan

    shares = [(each.id, each.max_concurrent, each.priority) for each in pool.enabled]
    made = plan(config.processes, shares, os.cpu_count() or 1)
    disabled = [each.id for each in pool.endpoints if not each.enabled]
    sys.stdout.write(made.table() + "\n")
    if disabled:
        sys.stdout.write(f"disabled: {', '.join(disabled)}\n")
    for warning in made.warnings:
        sys.stderr.write(f"headrace: warning: {warning}\n")


def show(args: argparse.Namespace) -> int:
    """The whole configuration as a file would have it, secrets masked."""
    config = load(args)
    if args.json:
        screen.print_json(config.to_dict())
    elif args.origins:
        screen.print_table(("key", "from"), sorted(config.origins.items()))
    else:
        import yaml

        yaml.safe_dump(config.to_dict(), sys.stdout, sort_keys=False, allow_unicode=True, width=110)
    return 0
