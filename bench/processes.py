"""Processes under test: where they run, how they end, what they cost. Linux's /proc is read for the latter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from bench.interrupt import deferred

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
END_S = 20.0
_TICKS = os.sysconf("SC_CLK_TCK")


class BenchError(Exception):
    """A measurement that cannot be made; one line that says why."""


def cores() -> list[int]:
    """Those this process may use; empty where they cannot be chosen."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def place(role: str) -> str:
    """For bench.pin. `worker` gets the first core, everything else the second; with one core, or for `free`, any."""
    found = cores()
    if len(found) < 2 or role == "free":
        return "any"
    return str(found[0] if role == "worker" else found[1])


def pinned(role: str, words: Sequence[str]) -> list[str]:
    where = place(role)
    return list(words) if where == "any" else [sys.executable, "-m", "bench.pin", where, *words]


@contextmanager
def here(role: str) -> Iterator[None]:
    """This thread itself on the core of `role`. Processes that are started meanwhile are not placed."""
    before, where = cores(), place(role)
    if where != "any":
        os.sched_setaffinity(0, {int(where)})
    try:
        yield
    finally:
        if where != "any":
            os.sched_setaffinity(0, before)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """No configuration of the user's, no colours; this checkout first on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "REDIS_", "RQ_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", **(more or {})}


def run(role: str, words: Sequence[str], more: Mapping[str, str] | None = None, timeout: float = 600.0) -> str:
    """What a command wrote. Raises BenchError with the end of what it complained about."""
    ran = subprocess.run(
        pinned(role, words), cwd=ROOT, env=environment(more), capture_output=True, text=True, timeout=timeout,
        check=False,
    )  # fmt: skip
    if ran.returncode != 0:
        said = (ran.stderr or ran.stdout).strip()[-300:]
        raise BenchError(f"{' '.join(words[:6])} ended with {ran.returncode}: {said}")
    return ran.stdout


@contextmanager
def running(
    role: str, words: Sequence[str], log: Path, more: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs as long as the block, in a session of its own; what it says goes to `log`."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with deferred(), log.open("ab") as out:
            process = subprocess.Popen(
                pinned(role, words), cwd=ROOT, env=environment(more), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        yield process
    finally:
        if process is not None:
            end(process)


def end(process: subprocess.Popen[bytes], first: signal.Signals = signal.SIGTERM) -> None:
    """In order if it will, else by force; its children with it."""
    if process.poll() is None:
        process.send_signal(first)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def until(happened: Callable[[], T | None], what: str, seconds: float = 60.0, pause: float = 0.01) -> T:
    """Looks until it is true. Raises BenchError."""
    stop = time.monotonic() + seconds
    while True:
        found = happened()
        if found:
            return found
        if time.monotonic() > stop:
            raise BenchError(f"not within {seconds:.0f} s: {what}")
        time.sleep(pause)


def family(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += family(int(child))
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise BenchError(f"process {pid} has no VmRSS")


def available_bytes() -> int:
    """Memory that processes may still take."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return sys.maxsize  # nobody tells


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
