"""How the embedded server comes to life: its options, the place of its socket, its process, what its log says."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from broker.errors import EmbeddedServerError

with suppress(ImportError):  # no flock on Windows; EmbeddedServer.acquire() says so
    import fcntl

MAX_SOCKET_PATH = 100  # bytes; systems allow 104 to 108
REMEDY = "use another folder, or a server of your own with --redis URL"

# No RDB in the append-only file: what Valkey or a newer Redis wrote, an older one must be able to read.
SERVER_OPTIONS = {
    "bind": "127.0.0.1",
    "port": "0",
    "protected-mode": "yes",
    "unixsocketperm": "700",
    "daemonize": "no",
    "save": "",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "aof-use-rdb-preamble": "no",
    "maxmemory-policy": "noeviction",
    "hash-max-listpack-value": "4096",  # a task in one piece of memory: half as much of it
    "always-show-logo": "no",
}
# All that the keeper and the server see of the environment; the rest may hold secrets.
ENVIRONMENT = ("PATH", "HOME", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


# Descriptors that carry a lock. A forked child must close them, or it would hold the locks in its parent's name.
_kept: set[int] = set()


def keep(fd: int) -> int:
    """Note a descriptor as one that no forked child may have. Returns it."""
    _kept.add(fd)
    return fd


def drop(fd: int) -> None:
    """Close a descriptor that was kept."""
    _kept.discard(fd)  # first: its number may be another's as soon as it is closed
    os.close(fd)


def _drop_all() -> None:
    while _kept:
        with suppress(OSError):
            os.close(_kept.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_all)


def until(seconds: float) -> Iterator[float]:
    """Yields the seconds waited so far, at once and then after short pauses, at least once at or after `seconds`."""
    start, pause = time.monotonic(), 0.001
    while True:
        waited = time.monotonic() - start
        yield waited
        if waited >= seconds:
            return
        time.sleep(pause)
        pause = min(pause * 1.3, 0.02)


def choose_socket(folder: Path, before: str | None) -> str:
    """A path that a socket can be bound to: in the folder, else where it was before, else in a temporary folder."""
    inside = str(folder / "server.sock")
    if _can_bind(inside):
        return inside
    if before and before != inside and _can_bind(before):
        return before
    name = hashlib.blake2b(os.fsencode(folder), digest_size=8).hexdigest() + ".sock"
    for parent in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        private = Path(parent, f"headrace-{os.getuid()}")
        if private.is_absolute() and _make_private(private) and _can_bind(str(private / name)):
            return str(private / name)
    raise EmbeddedServerError(f"no place for a socket, neither in {folder} nor in a temporary folder: {REMEDY}")


def _can_bind(path: str) -> bool:
    if len(path) > MAX_SOCKET_PATH or not re.fullmatch(r"[\w./+:@,=-]+", path, re.ASCII):
        return False  # too long, or with characters that some client would stumble over
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)  # nobody listens: the caller holds the server's lock
        with socket.socket(socket.AF_UNIX) as trial:
            trial.bind(path)
        os.unlink(path)
    except OSError:
        return False
    return True


def _make_private(folder: Path) -> bool:
    """Whether the folder is ours alone; made if need be."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def spawn(words: list[str], log: int, inherited: dict[int, int]) -> int:
    """Run `words` in a session of its own, out of reach of Ctrl-C and of the terminal's end. Returns its process id.

    It writes to `log`, which is closed here, and gets the descriptors `inherited`, under the numbers that are the keys.
    """
    with ExitStack() as stack:
        stack.callback(os.close, log)

        def above(fd: int) -> int:  # out of the way of the numbers that the child is given
            moved = keep(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10))
            stack.callback(drop, moved)
            return moved

        targets = {target: above(fd) for target, fd in {1: log, 2: log, **inherited}.items()}
        actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in targets.items()]
        environ = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        return os.posix_spawn(words[0], words, environ, file_actions=actions, setsid=True)


def is_gone(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] == child
    except ChildProcessError:
        return True


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def log_reason(log: str) -> str:
    """What the last lines of a server's log say about its end, in at most 300 characters."""
    lines = [re.sub(r"^\d+:[A-Z] .*? [*#.-] ", "", line).strip() for line in log.splitlines()]
    dull = ("WARNING", "oO0", "Exiting", "Configuration loaded", "===")
    return "; ".join([line for line in lines if line and not line.startswith(dull)][-2:])[:300]
