from __future__ import annotations

import math
from collections import Counter
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.plan import AUTO_SLOTS, EndpointShare, Plan, plan

AUTO: Literal["auto"] = "auto"
SLOTS: st.SearchStrategy[int | Literal["auto"]] = st.integers(1, 300) | st.just(AUTO)
ENDPOINTS = st.lists(st.tuples(SLOTS, st.integers(1, 10)), min_size=1, max_size=12).map(
    lambda rows: [EndpointShare(f"e{i}", slots, priority) for i, (slots, priority) in enumerate(rows)]
)


def weight(endpoint: EndpointShare) -> int:
    return AUTO_SLOTS if endpoint.slots == "auto" else endpoint.slots


def hosts(made: Plan) -> Counter[str]:
    return Counter(endpoint for process in made.processes for endpoint in process)


@given(st.integers(1, 64), ENDPOINTS)
def test_every_endpoint_has_a_worker_and_no_process_is_idle(processes: int, endpoints: list[EndpointShare]) -> None:
    made = plan(processes, endpoints, cpus=2)
    assert set(hosts(made)) == {endpoint.id for endpoint in endpoints}
    assert all(made.processes)
    assert all(len(set(process)) == len(process) for process in made.processes)


@given(st.integers(1, 64), ENDPOINTS)
def test_as_many_processes_as_asked_unless_there_are_fewer_slots(
    processes: int, endpoints: list[EndpointShare]
) -> None:
    made = plan(processes, endpoints, cpus=2)
    total = sum(map(weight, endpoints))
    if processes <= total or any(endpoint.slots == "auto" for endpoint in endpoints):
        assert len(made.processes) == processes
        assert not made.warnings
    else:
        assert len(made.processes) == total
        assert f"processes {processes}" in made.warnings[0]


@given(st.integers(1, 12), ENDPOINTS)
def test_fewer_processes_share_the_endpoints_evenly(processes: int, endpoints: list[EndpointShare]) -> None:
    made = plan(min(processes, len(endpoints)), endpoints, cpus=2)
    sizes = [len(process) for process in made.processes]
    assert max(sizes) - min(sizes) <= 1
    assert set(hosts(made).values()) == {1}


@given(st.integers(1, 64), ENDPOINTS)
def test_more_processes_than_endpoints_serve_one_each_in_proportion(
    processes: int, endpoints: list[EndpointShare]
) -> None:
    made = plan(processes, endpoints, cpus=2)
    if len(made.processes) <= len(endpoints):
        return
    assert {len(process) for process in made.processes} == {1}
    counts = hosts(made)
    for endpoint in endpoints:
        assert endpoint.slots == "auto" or counts[endpoint.id] <= endpoint.slots
    for a in endpoints:  # nobody has a process that somebody else with more slots a process lacks
        for b in endpoints:
            if counts[a.id] > 1 and (b.slots == "auto" or counts[b.id] < b.slots):
                assert weight(a) / counts[a.id] >= weight(b) / (counts[b.id] + 1)


@given(ENDPOINTS, st.integers(0, 128))
def test_auto_stays_within_cpus_and_slots(endpoints: list[EndpointShare], cpus: int) -> None:
    made = plan("auto", endpoints, cpus)
    assert 1 <= len(made.processes) <= max(1, cpus)
    assert len(made.processes) <= sum(map(weight, endpoints))
    assert not made.warnings


@given(st.integers(1, 64), ENDPOINTS)
def test_the_plan_depends_on_nothing_but_its_arguments(processes: int, endpoints: list[EndpointShare]) -> None:
    assert plan(processes, endpoints, 2) == plan(processes, [tuple(e) for e in endpoints], 99)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("processes", "sizes", "counts"),
    [
        (1, {9: 1}, {1: 9}),
        (2, {5: 1, 4: 1}, {1: 9}),
        (5, {2: 4, 1: 1}, {1: 9}),
        (8, {2: 1, 1: 7}, {1: 9}),
        (9, {1: 9}, {1: 9}),
        (10, {1: 10}, {1: 8, 2: 1}),
        (24, {1: 24}, {3: 6, 2: 3}),
    ],
)
def test_nine_equal_endpoints(processes: int, sizes: dict[int, int], counts: dict[int, int]) -> None:
    made = plan(processes, [(f"e{i}", 32, 5) for i in range(9)], cpus=2)
    assert Counter(len(process) for process in made.processes) == sizes
    assert Counter(hosts(made).values()) == counts


@pytest.mark.parametrize(
    ("slots", "cpus", "processes"),
    [([8] * 9, 2, 2), ([8] * 9, 64, 9), ([256], 64, 4), ([256, 8], 64, 5), ([1], 64, 1), ([1000], 1, 1)],
)
def test_auto_counts_endpoints_and_their_slots(slots: list[int], cpus: int, processes: int) -> None:
    made = plan("auto", [(f"e{i}", n, 5) for i, n in enumerate(slots)], cpus)
    assert len(made.processes) == processes
    assert processes <= sum(math.ceil(n / 64) for n in slots)


def test_few_processes_share_the_slots_evenly_too() -> None:
    made = plan(2, [("big", 100, 5), ("large", 90, 5), ("small", 2, 5), ("tiny", 1, 5)], cpus=2)
    assert [set(process) for process in made.processes] == [{"big", "tiny"}, {"large", "small"}]


def test_the_table() -> None:
    made = plan(4, [("windows-npu", "auto", 5), ("vm2-npu", 10, 10), ("old", 2, 1)], cpus=2)
    assert made.table().splitlines() == [
        "endpoint     priority  slots  processes",
        "vm2-npu            10     10  1-2",
        "windows-npu         5   auto  3",
        "old                 1      2  4",
        "4 processes, 3 endpoints, 12 slots and 1 x auto",
    ]


def test_an_endpoint_without_slots_is_a_warning_and_stands_in_the_table() -> None:
    made = plan(2, [("a", 4, 5), ("none", 0, 5)], cpus=2)
    assert hosts(made) == {"a": 2}
    assert made.warnings == ("endpoint none: 0 slots, so it will serve nothing; set max_concurrent to 1 or more",)
    assert "none             5      0  none" in made.table()


def test_no_endpoint_is_an_empty_plan_with_a_warning() -> None:
    made = plan("auto", [], cpus=2)
    assert made.processes == ()
    assert "no enabled endpoint" in made.warnings[0]
    assert made.table().splitlines()[-1] == "0 processes, 0 endpoints, 0 slots"


def test_less_than_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match="processes 0"):
        plan(0, [("a", 4, 5)], cpus=2)
