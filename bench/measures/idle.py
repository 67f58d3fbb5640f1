"""What ten processes with nothing to do take: CPU, and commands sent to Redis."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

from bench.endpoints import fast_endpoint
from bench.lab import Lab, median
from bench.processes import cpu_seconds
from bench.report import Goal, Section, number

SETTLE_S = 3.0  # start-up is not idleness
HEALTH_S = 30.0  # each endpoint is checked once in so long: a whole round of checks is in the window


def commands(url: str, seconds: float) -> tuple[int, int]:
    """Sent by clients, and called by scripts, as MONITOR shows them."""
    address = urlsplit(url)
    seen = b""
    with socket.create_connection((address.hostname, address.port or 6379)) as watcher:
        watcher.sendall(b"MONITOR\r\n")
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            watcher.settimeout(left)
            try:
                seen += watcher.recv(65_536)
            except TimeoutError:
                break
    lines = [line for line in seen.split(b"\r\n") if line.startswith(b"+") and b" [" in line]
    inside = sum(b" lua] " in line for line in lines)
    return len(lines) - inside, inside


def idle(lab: Lab, processes: int, seconds: float) -> tuple[float, float, float]:
    """Percent of a core in all, commands/s sent, commands/s inside scripts."""
    lab.server.clear()
    with (
        fast_endpoint(lab.folder, hosts=processes) as endpoint,
        lab.headrace.serving(endpoint, slots=8, processes=processes, ready=True, role="free") as pid,
    ):
        time.sleep(SETTLE_S)
        pids = lab.headrace.worker_pids(pid)
        before = sum(map(cpu_seconds, pids))
        start = time.monotonic()
        sent, inside = commands(lab.server.url, seconds)
        took = time.monotonic() - start
        used = sum(map(cpu_seconds, pids)) - before
    return used / took * 100, sent / took, inside / took


def measure(lab: Lab) -> Section:
    processes, seconds = lab.options.pick(2, 10), lab.options.pick(1.0, HEALTH_S)
    section = Section("idle", f"{processes} idle processes", ("what", "measured"))
    (found,) = lab.rounds(lambda: idle(lab, processes, seconds))
    cpu, sent, inside = (median([each[at] for each in found]) for at in (0, 1, 2))
    section.add("CPU of all, supervisor too, percent of a core", number(cpu, "%"))
    section.add("commands sent to Redis a second", number(sent))
    section.add("commands called inside scripts a second", number(inside))
    section.notes.append(
        f"Over {seconds:.0f} s, {SETTLE_S:.0f} s after the start; endpoints are checked each {HEALTH_S:.0f} s."
    )
    section.goals += [
        Goal(f"CPU of {processes} idle processes, of one core", cpu, 2, at_least=False, unit="%"),
        Goal(f"commands/s of {processes} idle processes", sent, 50, at_least=False,
             detail=f"{number(inside)}/s inside scripts"),
    ]  # fmt: skip
    return section
