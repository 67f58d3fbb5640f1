"""What a producer sends: chunks, digests, limits, checked arguments."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from broker.errors import InvalidTask, UsageError
from broker.producer import CHUNK_BYTES, PoolLimits, check_timeout, chunks, digest, make_options, prepare, unpack
from broker.rqjob import encode_work
from broker.scripts import ENQUEUE_BATCH, NewTask
from broker.task import Request, TaskOptions

WORK = Request("POST", "/x", json={"n": 1})


def sized(*sizes: int) -> list[NewTask]:
    return [NewTask(str(n), b"." * size, "", "") for n, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([1], [1]),
        ([10] * (ENQUEUE_BATCH * 2 + 1), [ENQUEUE_BATCH, ENQUEUE_BATCH, 1]),
        ([CHUNK_BYTES // 2] * 5, [2, 2, 1]),
        ([CHUNK_BYTES * 3, 1, CHUNK_BYTES * 3], [1, 1, 1]),
    ],
)
def test_chunks_are_small_in_number_and_in_bytes(sizes: list[int], expected: list[int]) -> None:
    tasks = sized(*sizes)
    made = list(chunks(iter(tasks)))
    assert [len(chunk) for chunk in made] == expected
    assert [task for chunk in made for task in chunk] == tasks


def test_a_digest_is_of_the_content_and_the_pool() -> None:
    long = encode_work(Request("POST", "/x", json="y" * 5000))
    assert long[:1] == b"x"
    assert digest("llm", long) == digest("llm", zlib.compress(zlib.decompress(long), 9))
    assert digest("llm", long) == digest("llm", zlib.decompress(long))
    assert digest("llm", long) != digest("npu", long)
    assert digest("llm", long) != digest("llm", encode_work(WORK))
    assert len(digest("llm", b"")) == 32


@pytest.mark.parametrize(("options", "has"), [
    (TaskOptions(), False), (TaskOptions(priority="low"), False),
    (TaskOptions(id="a"), True), (TaskOptions(idempotency_key="k"), True),
])  # fmt: skip
def test_what_the_producer_named_has_a_digest(options: TaskOptions, has: bool) -> None:
    task = prepare("llm", (WORK, options), PoolLimits())
    assert task.digest == (digest("llm", task.data) if has else "")


def test_what_is_compressed_has_a_digest() -> None:
    task = prepare("llm", Request("POST", "/x", json="y" * 5000), PoolLimits())
    assert task.digest == digest("llm", task.data)


def test_limits_are_the_registered_ones_or_the_defaults() -> None:
    assert PoolLimits.read([None, None, None]) == PoolLimits(100_000, 262_144, 86_400.0)
    assert PoolLimits.read([b"5", b"1000", b"1500"]) == PoolLimits(5, 1000, 1.5)


def test_a_prepared_task_has_all_its_options() -> None:
    options = make_options("a", "key", 60, "low", ["vision", "llm"], 2, 1.5)
    task = prepare("llm", (WORK, options), PoolLimits(), "reply")
    assert (task.id, task.idempotency_key, task.deadline, task.priority, task.requires) == (
        "a", "key", 60.0, "low", ("llm", "vision"),
    )  # fmt: skip
    assert (task.max_attempts, task.delay, task.reply) == (2, 1.5, "reply")
    bare = prepare("llm", WORK, PoolLimits())
    assert (bare.priority, bare.deadline, bare.max_attempts, bare.reply) == ("normal", 0.0, 0, "")
    assert prepare("llm", WORK, PoolLimits()).id != bare.id


@pytest.mark.parametrize("item", [None, "text", {}, (WORK,), (WORK, None), (WORK, {}), ("text", TaskOptions()), [WORK]])
def test_what_is_no_work_is_named(item: Any) -> None:
    with pytest.raises(InvalidTask, match=r"^(work|options) "):
        unpack(item)


@pytest.mark.parametrize("timeout", [-1, True, "5", float("nan"), float("inf"), 1e10])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(UsageError, match="timeout"):
        check_timeout(timeout)


def test_timeouts_from_zero_on_are_taken() -> None:
    assert [check_timeout(0), check_timeout(1.5), check_timeout(None)] == [0.0, 1.5, None]
