"""From the call of enqueue to the request arriving at the endpoint, with idle workers, 50 tasks a second."""

from __future__ import annotations

from bench.endpoints import own_endpoint
from bench.lab import Handle, Lab, median, quantile
from bench.processes import until
from bench.report import Goal, Section, number

RATE = 50
WARM = 20
Latency = tuple[float, float]


def dispatch(handle: Handle, count: int) -> Latency:
    """p50 and p99, ms."""
    handle.lab.server.clear()
    with own_endpoint(handle.lab.folder, stamps=True) as endpoint, handle.serving(endpoint):
        handle.enqueue(WARM, "--rate", RATE, role="server")
        until(lambda: endpoint.served() >= WARM, f"{handle.name} serves", 60)
        begun = handle.enqueue(count, "--rate", RATE, "--first", 1000, "--warm", role="server")["begun"]
        until(lambda: endpoint.served() >= WARM + count + 1, f"{handle.name}: {count} requests", 60)
        arrived = endpoint.stamps()
    late = [(arrived[int(number)] - ns) / 1e6 for number, ns in begun.items()]
    return quantile(late, 0.5), quantile(late, 0.99)


def measure(lab: Lab) -> Section:
    columns = ("system", "p50 ms", "p99 ms", "p50 against headrace")
    section = Section("dispatch", f"Idle dispatch at {RATE} tasks/s", columns)
    count = lab.options.pick(25, 250, 1000)
    systems = [lab.headrace, *lab.rivals]
    found = lab.rounds(*(lambda h=handle: dispatch(h, count) for handle in systems))
    p50, p99 = (
        {handle.name: median([each[at] for each in rounds]) for handle, rounds in zip(systems, found, strict=True)}
        for at in (0, 1)
    )
    for name in p50:
        section.add(name, number(p50[name]), number(p99[name]), number(p50[name] / p50["headrace"], "x"))
    section.goals += [
        Goal("idle dispatch p50", p50["headrace"], 1.2, at_least=False, unit="ms"),
        Goal("idle dispatch p99", p99["headrace"], 3.0, at_least=False, unit="ms"),
    ]
    for name, values in (("p50", p50), ("p99", p99)):
        best, first = lab.best(values, min, variants=False)
        what = f"idle dispatch {name}, best peer against headrace"
        section.goals.append(Goal(what, best / values["headrace"], 1.0, unit="x", detail=first))
    section.notes.append(
        f"{count} tasks a round. Both times by the monotonic clock, which all processes of a machine share; the "
        "producer runs on the core of the server and the endpoint."
    )
    return section
