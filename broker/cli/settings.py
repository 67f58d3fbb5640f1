"""What every verb does first: load the configuration, set up logs, find Redis."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final, Literal

from broker import logs
from broker.config import Config, load_config
from broker.errors import BrokerUnavailable, ConfigError, Problem, UsageError

VERBOSE: Final[tuple[Literal["info", "debug"], ...]] = ("info", "debug")


def say(text: str) -> None:
    """One line for people, on standard error: standard output is for results."""
    sys.stderr.write(f"headrace: {logs.escape(text)}\n")
    sys.stderr.flush()


def load(args: argparse.Namespace, overrides: Mapping[str, Any] | None = None, *, quiet: bool = False) -> Config:
    """The configuration as flags, environment and file have it. Logs are set up by it; its warnings are said.

    quiet  without -v or a level in the configuration, errors alone are logged: the verb tells what matters itself
    """
    level = VERBOSE[min(args.verbose, len(VERBOSE)) - 1] if args.verbose else None
    given = {"redis.url": args.redis, "log.level": level, **(overrides or {})}
    config = load_config(args.config, None, given)
    if quiet and "log.level" not in config.origins:
        config = replace(config, log=replace(config.log, level="error"))
    logs.set_up(config.log.level, config.log.format)
    for warning in config.warnings:
        say(f"warning: {warning}")
    return config


@dataclass(frozen=True, slots=True)
class Redis:
    """Where Redis is. `url` may hold a password, `shown` does not; `mend` starts the embedded server again."""

    url: str
    shown: str
    mend: Callable[[], None]
    embedded: bool = False


@contextmanager
def redis_of(config: Config, *, start: bool = True) -> Iterator[Redis]:
    """Redis, for as long as the block lasts; the embedded server is started if need be.

    start  False: do not begin a data folder where there is none
    Raises EmbeddedServerError, and BrokerUnavailable without a data folder.
    """
    if not config.redis.embedded:
        yield Redis(config.redis.connection_url(), config.redis.shown, lambda: None)
        return
    if not start and not config.data_dir.is_dir():
        raise BrokerUnavailable(
            f"no queue here: there is no {config.data_dir}, where an embedded server keeps its data; go where it is, "
            "or give --redis URL or -c FILE"
        )
    from broker.embedded import EmbeddedServer

    with EmbeddedServer.acquire(config.data_dir) as server:
        yield Redis(server.url, f"embedded in {server.folder}", server.ensure, embedded=True)


def pool_of(config: Config, name: str | None, needed: str) -> str:
    """The pool to use: as named, else the only one. Raises ConfigError, UsageError."""
    if name is None:
        if len(config.pools) == 1:
            return next(iter(config.pools))
        if not config.pools:
            raise ConfigError([Problem(config.source or "configuration", None, "", f"no pool of endpoints: {needed}")])
        raise UsageError(f"which pool? name one with --pool: {', '.join(config.pools)}")
    if config.pools and name not in config.pools:
        raise unknown_pool(config, name)
    return name


def unknown_pool(config: Config, name: str) -> UsageError:
    place = config.source or "the configuration"
    return UsageError(f"pool {name!r} is not in {place}{meant(name, list(config.pools))}")


def meant(word: str, known: list[str]) -> str:
    """The end of an error about an unknown word: `; did you mean 'llm'?`, or what there is."""
    begun = [name for name in known if word and name.startswith(word)]
    close = begun if len(begun) == 1 else get_close_matches(word, known, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there is {', '.join(known)}" if known else ""
