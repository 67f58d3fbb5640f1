"""Redis memory for a task beside its payload, and the worker's memory for a request in flight."""

from __future__ import annotations

from bench.endpoints import fast_endpoint, own_endpoint
from bench.job import ANSWER, PAYLOAD_BYTES
from bench.lab import Handle, Lab, median
from bench.measures.progress import watch
from bench.processes import BenchError, command_of, resident_bytes, until
from bench.report import Goal, Section, number

KB = 1000


def in_redis(handle: Handle, count: int) -> tuple[float, float]:
    """KB of a queued task and of a finished one with its answer, less the payload."""
    server = handle.lab.server
    handle.enqueue(10)  # loads scripts
    server.clear()
    empty = server.used()
    handle.enqueue(count)
    queued = server.used() - empty
    with fast_endpoint(handle.lab.folder) as endpoint, handle.serving(endpoint):
        watch(endpoint.served, count, handle, pause=0.05)
        until(lambda: handle.stored() >= count, f"{handle.name}: {count} results in Redis", 15, pause=0.2)
    # the worker has gone, and the buffers of its connections with it
    finished = server.used() - empty
    return (queued / count - PAYLOAD_BYTES) / KB, (finished / count - PAYLOAD_BYTES) / KB


def in_worker(lab: Lab, low: int, high: int, delay: float) -> float:
    """KB of resident memory that one more request in flight takes."""
    lab.server.clear()
    headrace = lab.headrace
    with own_endpoint(lab.folder, delay=delay) as endpoint, headrace.serving(endpoint, slots=high, ready=True) as pid:
        process = next((each for each in headrace.worker_pids(pid) if "workers.process" in command_of(each)), None)
        if process is None:
            raise BenchError("no worker process found in /proc")
        headrace.enqueue(low)
        until(lambda: endpoint.stats()["open"] >= low, f"{low} in flight")
        before = resident_bytes(process)
        headrace.enqueue(high - low, "--first", low)
        until(lambda: endpoint.stats()["open"] >= high, f"{high} in flight", delay)
        return (resident_bytes(process) - before) / (high - low) / KB


def measure(lab: Lab) -> Section:
    section = Section("memory", "Memory", ("what", "headrace", "rq", "rq against headrace"))
    count, some = lab.options.pick(500, 20_000), lab.options.pick(50, 1000)
    low, high = lab.options.pick((10, 50), (50, 1000))
    rq = lab.rq
    ours, theirs, worker = lab.rounds(
        lambda: in_redis(lab.headrace, count),
        lambda: in_redis(rq, some) if rq else None,
        lambda: in_worker(lab, low, high, lab.options.pick(4.0, 20.0)),
    )
    queued, finished = (median([each[at] for each in ours]) for at in (0, 1))
    rq_queued, rq_finished = (median([each[at] for each in theirs]) for at in (0, 1))
    per_request = median(worker)
    section.add("Redis, KB a queued task", number(queued), number(rq_queued), number(rq_queued / queued, "x"))
    section.add("Redis, KB a finished task", number(finished), number(rq_finished), number(rq_finished / finished, "x"))
    section.add("worker, KB a request in flight", number(per_request), "-", "-")
    section.goals += [
        Goal("Redis memory of a queued task", queued, 0.9, at_least=False, unit="KB"),
        Goal("Redis memory of a finished task", finished, 1.0, at_least=False, unit="KB"),
        Goal("worker memory of a request in flight", per_request, 60, at_least=False, unit="KB"),
    ]
    section.notes.append(
        f"Beside the payload of {PAYLOAD_BYTES} bytes; a finished task has its answer of {len(ANSWER)} bytes with it. "
        f"From used_memory over {count:,} tasks (rq: {some:,}), and VmRSS at {low} and {high} in flight."
    )
    return section
