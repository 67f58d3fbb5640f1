"""What a producer gets queued in a second: many at once by 500, and one call a task."""

from __future__ import annotations

from bench.lab import Handle, Lab, median
from bench.report import Goal, Section, number

BATCH = 500


def enqueue(handle: Handle, count: int, *how: object) -> float:
    """Tasks/s, the producer on a core of its own."""
    handle.lab.server.clear()
    return count / float(handle.enqueue(count, *how, "--warm", role="worker")["seconds"])


def measure(lab: Lab) -> Section:
    section = Section(
        "enqueue", "Enqueue, one producer",
        ("system", f"many by {BATCH}, tasks/s", "against rq", "one call a task, tasks/s", "against rq"),
    )  # fmt: skip
    systems = [lab.headrace, *lab.rivals]
    bulk = [handle for handle in systems if handle.bulk]
    many, single = lab.options.pick(1000, 50_000), lab.options.pick(100, 3000)
    found = lab.rounds(
        *(lambda h=handle: enqueue(h, many if h is lab.headrace else many // 5, "--batch", BATCH) for handle in bulk),
        *(lambda h=handle: enqueue(h, single, "--single") for handle in systems),
    )
    values = [median(each) for each in found]
    by_many = {handle.name: value for handle, value in zip(bulk, values, strict=False)}
    by_one = {handle.name: value for handle, value in zip(systems, values[len(bulk) :], strict=True)}
    nothing = float("nan")
    for name, one in by_one.items():
        all_at_once = by_many.get(name, nothing)
        section.add(
            name, number(all_at_once), number(all_at_once / by_many.get("rq", nothing), "x"), number(one),
            number(one / by_one.get("rq", nothing), "x"),
        )  # fmt: skip
    section.goals += [
        Goal("enqueue_many by 500 against rq", by_many["headrace"] / by_many.get("rq", nothing), 6, unit="x"),
        Goal("single enqueue against rq", by_one["headrace"] / by_one.get("rq", nothing), 2, unit="x"),
    ]
    section.notes.append("Making the requests is in the time; connecting is not. `-` has no call for many.")
    return section
