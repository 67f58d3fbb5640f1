"""Tasks a second that one worker process gets through, from a queue that is full: claim, POST, store the result."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial

from bench.endpoints import Endpoint, fast_endpoint, fast_name
from bench.lab import Handle, Lab, median
from bench.measures.progress import rate, watch
from bench.processes import BenchError, run, until
from bench.report import Goal, Section, number

SLOTS = 256
DEAR_CLIENT_US = 90.0  # above this the client hides the queue, and 0.95 of it is asked for
DEAR_CLIENT = "aiohttp"  # the default where httptools has no wheel


def drain(
    handle: Handle, endpoint: Endpoint, count: int, *, slots: int = SLOTS, processes: int = 1, role: str = "worker"
) -> float:
    """Tasks/s. Raises BenchError unless every result that it keeps is in Redis in the end."""
    handle.lab.server.clear()
    handle.enqueue(count)
    before = endpoint.served()
    with handle.serving(endpoint, slots=slots, processes=processes, role=role):
        samples = watch(lambda: endpoint.served() - before, count, handle)
        stored = handle.stored()
        if 0 <= stored < count:
            until(lambda: handle.stored() >= count, f"{handle.name}: {count} results in Redis, there are {stored}", 15)
    return rate(samples)


def bare(lab: Lab, url: str, count: int, in_flight: int = SLOTS, skip: int = 0) -> dict[str, float]:
    """What bench.bare prints."""
    words = [sys.executable, "-m", "bench.bare", "--url", url, "--count", str(count), "--in-flight", str(in_flight)]
    words += ["--skip", str(skip), "--transport", lab.options.transport]
    told: dict[str, float] = json.loads(run("worker", words))
    return told


def with_aof(lab: Lab, endpoint: Endpoint, count: int) -> float:
    """The same on a server with its append-only file on."""
    with lab.fresh_server(aof=True):
        return drain(lab.headrace, endpoint, count)


def on_dear_client(lab: Lab, endpoint: Endpoint, count: int) -> tuple[float, dict[str, float]]:
    """headrace's tasks/s on a client that costs more than all of the queue, and what bench.bare prints of it."""
    with lab.over(DEAR_CLIENT):
        return drain(lab.headrace, endpoint, count), bare(lab, endpoint.urls[0], count)


def measure(lab: Lab) -> Section:
    section = Section("drain", "Drain of a full queue", ("system", "tasks/s", "against rq", "against bare", "how"))
    count, rivals = lab.options.tasks, lab.others
    counts = [max(20, int(count * handle.share)) for handle in rivals]
    with fast_endpoint(lab.folder) as endpoint:
        url = endpoint.urls[0]
        ours, over_aof, one, two, limit, dear, *theirs = lab.rounds(
            lambda: drain(lab.headrace, endpoint, count),
            lambda: with_aof(lab, endpoint, count),
            lambda: drain(lab.headrace, endpoint, count, role="free") if lab.options.cores > 1 else None,
            lambda: drain(lab.headrace, endpoint, count, processes=2, role="free") if lab.options.cores > 1 else None,
            lambda: bare(lab, url, count),
            lambda: on_dear_client(lab, endpoint, max(20, count // 2)),
            *(partial(drain, h, endpoint, n, role=role(h)) for h, n in zip(rivals, counts, strict=True)),
        )
    if not ours or not limit:
        raise BenchError("drain: headrace or the bare client could not be measured")
    best = median([told["rate"] for told in limit])
    mine, cpu = median(ours), median([told["cpu_us"] for told in limit])
    peers = {handle.name: median(found) for handle, found in zip(rivals, theirs, strict=True) if found}
    rq = peers.get("rq", float("nan"))

    def row(name: str, value: float, how: str) -> None:
        section.add(name, number(value), number(value / rq, "x"), number(value / best, "x"), how)

    client = f"transport {lab.options.transport}, {SLOTS} in flight, {cpu:.0f} us CPU a request"
    row("no queue, bare client", best, client)
    row("headrace", mine, f"{lab.headrace.setup}, {SLOTS} slots")
    row("headrace, AOF everysec", median(over_aof), "the same")
    if one and two:
        row("headrace, not pinned", median(one), "1 process, sharing the cores with server and endpoint")
        row("headrace, 2 processes", median(two), "not pinned, sharing the cores with server and endpoint")
    on_dear, dear_limit = median([rate for rate, _ in dear]), median([told["rate"] for _, told in dear])
    dear_cpu = median([told["cpu_us"] for _, told in dear])
    dear_client = f"transport {DEAR_CLIENT}, {SLOTS} in flight, {dear_cpu:.0f} us CPU a request"
    row(f"no queue, {DEAR_CLIENT}", dear_limit, dear_client)
    row(f"headrace, {DEAR_CLIENT}", on_dear, f"transport {DEAR_CLIENT}, else the same")
    for handle in rivals:
        if handle.name in peers:
            row(handle.name, peers[handle.name], handle.setup)
    fastest, name = lab.best(peers, max)
    section.goals += [
        Goal("drain against rq SimpleWorker", mine / rq, 50, unit="x"),
        Goal("drain against the fastest peer", mine / fastest, 5, unit="x", detail=name),
        Goal("drain against the bare client", mine / best, 0.95 if cpu > DEAR_CLIENT_US else 0.6, unit="x",
             detail=f"the client costs {cpu:.0f} us a request"),
        Goal(f"drain against the bare client on {DEAR_CLIENT}", on_dear / dear_limit,
             0.95 if dear_cpu > DEAR_CLIENT_US else 0.6, unit="x",
             detail=f"the client costs {dear_cpu:.0f} us a request"),
        Goal("AOF everysec against off", median(over_aof) / mine, 0.9, unit="x"),
        Goal("two processes against one", median(two) / median(one), 1.6, unit="x", detail="none of them pinned"),
    ]  # fmt: skip
    section.notes.append(_how(rivals, count))
    return section


def role(handle: Handle) -> str:
    return "worker" if handle.processes == 1 else "free"


def _how(rivals: Sequence[Handle], count: int) -> str:
    without = [handle.name for handle in rivals if not handle.results]
    kept = f", but for {', '.join(without)}, which keeps none" if without else ""
    return (
        f"Endpoint: {fast_name()}. {count:,} tasks for headrace, fewer for slower systems. The rate is that of the "
        "requests at the endpoint (for headrace its GET /health is one of them), the first tenth not counted; every "
        f"result was in Redis soon after the last of them{kept}. 256 requests in flight, or 32 threads where there are "
        "threads: with an endpoint that answers at once they wait for the interpreter and not for answers."
    )
