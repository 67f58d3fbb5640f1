"""`headrace worker`: serve the endpoints of a configuration until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from broker.addresses import mask_url
from broker.cli.settings import Redis, load, meant, redis_of, say
from broker.config import Config, config_for_endpoints, config_path
from broker.configlayers import DEFAULT_POOL
from broker.errors import ConfigError, HeadraceError, Problem, UsageError, unforeseen

if TYPE_CHECKING:
    from workers.supervisor import Supervisor

log = logging.getLogger("headrace.supervisor")

MEND_EVERY_S: Final = 2.0
NEEDED: Final = "no endpoint to serve: give -c FILE, --endpoint URL, or HEADRACE_ENDPOINT=URL"


def worker(args: argparse.Namespace) -> int:
    """The verb."""
    from workers.configwatch import ConfigFile
    from workers.supervisor import Supervisor

    path = config_path(args.config)
    file = ConfigFile(path, lambda: load(args)) if path is not None else None  # before it is read: no change is missed
    config, pools, endpoints, of_file = _select(args)
    with redis_of(config) as redis:
        supervisor = Supervisor(
            config, redis_url=redis.url, pools=pools, endpoints=endpoints, processes=args.processes, burst=args.burst,
            file=file if of_file else None,
        )  # fmt: skip
        supervisor.take_added()
        sys.stdout.write(f"Redis: {redis.shown}\n{supervisor.plan.table()}\n")
        sys.stdout.flush()
        for warning in supervisor.plan.warnings:
            say(f"warning: {warning}")
        if not supervisor.plan.processes:
            raise ConfigError([Problem(config.source or "configuration", None, "", NEEDED)])
        return asyncio.run(_serve(supervisor, redis))


async def _serve(supervisor: Supervisor, redis: Redis) -> int:
    mending = asyncio.create_task(mend(redis)) if redis.embedded else None
    try:
        return await supervisor.run()
    finally:
        if mending is not None:
            mending.cancel()
            await asyncio.gather(mending, return_exceptions=True)


async def mend(redis: Redis) -> None:
    """The embedded server is started again when it dies; the workers wait for it meanwhile."""
    while True:
        await asyncio.sleep(MEND_EVERY_S)
        try:
            await asyncio.to_thread(redis.mend)
        except HeadraceError:
            pass  # it is tried again
        except Exception as error:
            log.error("the embedded server could not be looked after: %s; going on", unforeseen(error))


def _select(args: argparse.Namespace) -> tuple[Config, list[str] | None, list[str] | None, bool]:
    """The configuration, and which pools and endpoints of it; None for all. And whether these are the file's."""
    config = load(args)
    named = list(args.endpoint or ())
    known = {word for pool in config.pools.values() for each in pool.endpoints for word in (each.id, each.url)}
    named = [each.rstrip("/") if "://" in each else each for each in named]
    foreign = [each for each in named if each not in known]
    if foreign and all("://" in each for each in named) and len(foreign) == len(named):
        if len(args.pool or ()) > 1:
            raise UsageError("--endpoint URL: name one --pool for it")
        pool = args.pool[0] if args.pool else DEFAULT_POOL
        return config_for_endpoints(named, pool, base=replace(config, warnings=())), [pool], None, False
    for each in foreign:
        ids = sorted(e.id for pool in config.pools.values() for e in pool.endpoints)
        place = config.source or "the configuration"
        raise UsageError(f"--endpoint {mask_url(each)!r} is not in {place}{meant(each, ids)}")
    for each in args.pool or ():
        if each not in config.pools:
            raise UsageError(
                f"--pool {each!r} is not in {config.source or 'the configuration'}{meant(each, list(config.pools))}"
            )
    if not config.pools:
        raise ConfigError([Problem(config.source or "configuration", None, "", NEEDED)])
    return config, args.pool, named or None, True
