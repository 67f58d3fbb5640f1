"""`headrace serve`: the management API over HTTP, until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, Final

from broker.catalog import Catalog
from broker.cli.settings import Redis, load, redis_of, say
from broker.cli.worker import mend
from broker.config import Config, load_config
from broker.errors import BrokerUnavailable, ConfigError, Problem, UsageError
from broker.store import Store

FINISH_S: Final = 5  # what is being answered when it is told to stop may take so long
NEEDED: Final = "`headrace serve` needs starlette, uvicorn and prometheus-client: pip install 'headrace[api]' ({})"


def serve(args: argparse.Namespace) -> int:
    """The verb."""
    try:
        import uvicorn

        from broker.web.app import make_app
    except ModuleNotFoundError as error:
        raise UsageError(NEEDED.format(error)) from None
    overrides = {"api.host": args.host, "api.port": args.port}
    check_address(load_config(args.config, None, {"redis.url": args.redis, **overrides}))
    config = load(args, overrides)
    with redis_of(config) as redis, _listener(config) as listener:
        store = Store(redis.url)
        try:
            _check_redis(store)
            catalog = Catalog(config, lambda: load_config(args.config, None, {"redis.url": args.redis, **overrides}))
            app = make_app(store, catalog, config.api.token, [config.api.host])
            settings = uvicorn.Config(
                app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=FINISH_S,
                lifespan="off",
            )  # fmt: skip
            sys.stdout.write(f"Redis: {redis.shown}\nlistening on {_url(listener)}{_manner(config)}\n")
            sys.stdout.flush()
            return _run(uvicorn.Server(settings), listener, redis)
        finally:
            store.close()


def check_address(config: Config) -> None:
    """Raises ConfigError for an address that others can reach, when there is no token."""
    if config.api.token is None and not is_loopback(config.api.host):
        message = f"{config.api.host!r} is not loopback and there is no token: set HEADRACE_API_TOKEN, or use 127.0.0.1"
        place = config.origins.get("api.host") or config.source or "configuration"
        raise ConfigError([Problem(place, None, "api.host", message)])


def is_loopback(host: str) -> bool:
    """For an address, or `localhost`; any other name may be anything."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def try_to_listen(config: Config) -> str | None:
    """What keeps the API from its address, in a few words; None if nothing."""
    try:
        _bound(config).close()
    except (OSError, ValueError) as error:
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    """A ValueError, which UnicodeError is: not even asked for, its text being of no use to people."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else "no such name can exist"


def _bound(config: Config) -> socket.socket:
    found = socket.getaddrinfo(
        config.api.host, config.api.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )  # fmt: skip
    family, _, _, _, address = found[0]
    return socket.create_server(address, family=family, backlog=256)


def _listener(config: Config) -> socket.socket:
    """Bound and listening, so that a port in use is one line. Raises UsageError."""
    host, port = config.api.host, config.api.port
    try:
        return _bound(config)
    except (OSError, ValueError) as error:
        why = _reason(error)
        raise UsageError(f"cannot listen on {host}, port {port}: {why}; choose another with --port or --host") from None


def _check_redis(store: Store) -> None:
    """One that must not be used ends it; one that is away may come back: /readyz tells."""
    try:
        store.check()
    except BrokerUnavailable as error:
        say(f"warning: {error}")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _manner(config: Config) -> str:
    return ", with a token" if config.api.token is not None else ", this machine only; no token is set"


def _run(server: Any, listener: socket.socket, redis: Redis) -> int:
    # uvicorn raises the signal again when it has stopped; being told to stop is no failure
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    asyncio.run(_serve(server, listener, redis))
    return 0


async def _serve(server: Any, listener: socket.socket, redis: Redis) -> None:
    mending = asyncio.create_task(mend(redis)) if redis.embedded else None
    try:
        await server.serve(sockets=[listener])
    finally:
        if mending is not None:
            mending.cancel()
            await asyncio.gather(mending, return_exceptions=True)
