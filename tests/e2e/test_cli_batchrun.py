"""The feed and collect loop of `run` against a real Redis, with this test in the part of the workers."""

from __future__ import annotations

import asyncio
import io
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from broker.batch import BadLine, BatchTask, parse_line, read_batch
from broker.batch_output import OutputFile
from broker.cli.batchqueue import BatchQueue, Sending
from broker.cli.batchrun import BatchRun, LineReader, Window
from broker.cli.tally import Tally
from broker.outcome import encode_answer
from broker.producer import PoolLimits
from broker.scripts import Finish, NewTask, Offer
from broker.store import AsyncStore
from broker.task import Result
from tests.support.commands import chat_line, rows

pytestmark = pytest.mark.e2e

POOL = "llm"
SETTINGS = {"max_depth": 1000, "result_ttl": 60_000, "max_attempts": 3}


Q = TypeVar("Q", bound=BatchQueue)


async def when(happened: Callable[[], bool]) -> None:
    for _ in range(4000):
        if happened():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not within 20 s")


def lines(count: int, first: int = 0) -> Iterator[BatchTask | BadLine]:
    text = "".join(json.dumps(chat_line(f"task-{i}", f"question {i}")) + "\n" for i in range(first, first + count))
    return read_batch(io.BytesIO(text.encode()))


class Bench:
    """One batch, its output, and a stand-in for the workers that answers what it claims."""

    def __init__(self, store: AsyncStore, output: OutputFile) -> None:
        self.store, self.output = store, output
        self.tally, self.said = Tally(), list[str]()
        self.most_waiting = 0

    def queue(self, kind: type[Q]) -> Q:
        return kind(self.store, POOL, "0123456789ab", own=False, limits=PoolLimits(), said=self.said.append)

    def run(
        self, given: Iterator[BatchTask | BadLine], *, window: int = 100, queue: BatchQueue | None = None
    ) -> BatchRun:
        return BatchRun(
            queue or self.queue(BatchQueue), self.output, LineReader(given), self.tally,
            window=Window(tasks=window), said=self.said.append,
        )  # fmt: skip

    async def register(self, depth: int = 1000) -> None:
        settings = {**SETTINGS, "max_depth": depth}
        await self.store.run(self.store.scripts.register(POOL, settings, [("e1", 5, 50, True, ())]))

    async def answer(self, most: int = 50) -> int:
        """Claims and finishes what waits; returns how many."""
        (waiting,) = await self.store.pipelined([("LLEN", self.store.keys.queue(POOL))])
        self.most_waiting = max(self.most_waiting, waiting)
        scripts = self.store.scripts
        claims = await self.store.run(
            scripts.claim(POOL, "test", [Offer("e1", most, 0)], lease=30, most=most)
        )
        told = encode_answer(200, {}, "e1")
        done = [Finish(claimed.lease, told, b'{"fine": true}') for claimed in claims.tasks]
        if done:
            await self.store.run(scripts.finish(POOL, done, result_ttl=60))
        return len(done)

    async def serve(self) -> None:
        while True:
            if not await self.answer():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def bench(redis_url: str, output: Path) -> AsyncIterator[Bench]:
    store = AsyncStore(redis_url)
    try:
        with OutputFile(output) as file:
            made = Bench(store, file)
            await made.register()
            yield made
    finally:
        await store.close()


async def to_the_end(made: Bench, run: BatchRun) -> None:
    serving = asyncio.create_task(made.serve())
    try:
        await asyncio.wait_for(run.run(), 30)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def test_never_more_under_way_than_the_window(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        async with bench(redis_url, tmp_path / "out.jsonl") as made:
            run = made.run(lines(1000), window=60)
            await to_the_end(made, run)
            assert run.complete
            assert 0 < made.most_waiting <= 60
            assert made.tally.answered == 1000
            assert await made.store.pipelined([("KEYS", "rq:job:*")]) == [[]]

    asyncio.run(main())
    assert len({row["custom_id"] for row in rows(tmp_path / "out.jsonl")}) == len(rows(tmp_path / "out.jsonl")) == 1000


def test_a_full_pool_is_waited_for(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        async with bench(redis_url, tmp_path / "out.jsonl") as made:
            await made.register(depth=20)
            await to_the_end(made, made.run(lines(200), window=100))
            assert made.tally.answered == 200
            assert made.most_waiting <= 20

    asyncio.run(main())


def test_messages_that_nobody_heard_are_found(tmp_path: Path, redis_url: str) -> None:
    """A pop whose reply was lost: the ids are gone from the reply list, the outcomes stand."""

    async def main() -> None:
        async with bench(redis_url, tmp_path / "out.jsonl") as made:
            first = made.run(lines(10))
            feeding = asyncio.create_task(first.run())
            await when(lambda: made.tally.sent == 10)
            feeding.cancel()  # as if it had been killed
            await asyncio.gather(feeding, return_exceptions=True)
            assert await made.answer() == 10
            await made.store.pipelined([("DEL", made.store.keys.reply("run-0123456789ab"))])
            second = made.run(lines(10))
            await asyncio.wait_for(second.run(), 5)  # nobody works any more: all is there already
            assert second.complete
            assert made.tally.answered == 10
            assert made.tally.sent == 10  # by the first

    asyncio.run(main())


def test_what_redis_lost_is_sent_again(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.cli.batchrun.SWEEP_S", 0.1)
    monkeypatch.setattr("broker.cli.batchrun.HEAR_S", 0.05)

    async def main() -> None:
        async with bench(redis_url, tmp_path / "out.jsonl") as made:
            run = made.run(lines(10))
            running = asyncio.create_task(run.run())
            await when(lambda: run.pending == 10)
            await made.store.pipelined([("FLUSHALL",)])
            await made.register()
            serving = asyncio.create_task(made.serve())
            await asyncio.wait_for(running, 20)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            assert made.tally.answered == 10
            assert any("gone from Redis" in line for line in made.said)

    asyncio.run(main())
    assert len(rows(tmp_path / "out.jsonl")) == 10


class Careful(BatchQueue):
    """Looks, whenever tasks are dropped, whether all that was written is safe on the disk."""

    output: OutputFile
    dropped = 0

    async def forget(self, ids: Sequence[str]) -> None:
        assert self.output._synced_end == self.output._end
        self.dropped += len(ids)
        await super().forget(ids)


def test_outcomes_stay_in_redis_until_their_lines_are_safe(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        async with bench(redis_url, tmp_path / "out.jsonl") as made:
            queue = made.queue(Careful)
            queue.output = made.output
            await to_the_end(made, made.run(lines(300), queue=queue))
            assert queue.dropped == 300

    asyncio.run(main())


def test_stop_sends_no_more_and_collects_what_is_there(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        async with bench(redis_url, tmp_path / "out.jsonl") as made:
            run = made.run(lines(1000), window=10)
            running = asyncio.create_task(run.run())
            await when(lambda: run.pending == 10)
            run.stop()
            assert await made.answer() == 10
            run.give_up()
            await asyncio.wait_for(running, 5)
            assert not run.complete
            assert made.tally.answered == 10

    asyncio.run(main())


class Instant(BatchQueue):
    """Answers everything at once, without Redis: for what has to do with memory alone."""

    def __init__(self) -> None:
        self.batch, self.own, self.pool = "0123456789ab", True, POOL
        self._limits, self._max_attempts, self._reply = PoolLimits(), None, "r"
        self.told: list[str] = []

    async def send(self, tasks: Sequence[object]) -> list[str]:  # type: ignore[override]
        self.told += [task.id for task in tasks]  # type: ignore[attr-defined]
        return ["queued"] * len(tasks)

    async def hear(self, seconds: float) -> list[str]:
        told, self.told = self.told, []
        await asyncio.sleep(0)
        return told

    async def read(self, ids: Sequence[str]) -> list[Result | None]:
        return [Result(each, "ok", 200, body=b"{}", endpoint="e1", attempts=1) for each in ids]

    async def forget(self, ids: Sequence[str]) -> None:
        return

    async def watch(self, ids: Sequence[str]) -> list[str]:
        return ["watching"] * len(ids)


@pytest.mark.slow
def test_memory_is_flat(tmp_path: Path) -> None:
    """S23, in small: 26 MB of lines with 1,000 under way."""
    count = 20_000

    def given() -> Iterator[BatchTask | BadLine]:
        for i in range(count):
            parsed = parse_line(json.dumps(chat_line(f"task-{i}", "x" * 1000)).encode(), i + 1)
            assert parsed is not None
            yield parsed

    async def main() -> tuple[int, int]:
        with OutputFile(tmp_path / "out.jsonl") as output:
            run = BatchRun(Instant(), output, LineReader(given()), Tally(), window=Window(tasks=1000))
            tracemalloc.start()
            await run.run()
            assert run.tally.answered == count
            return tracemalloc.get_traced_memory()

    try:
        left, most = asyncio.run(main())
    finally:
        tracemalloc.stop()
    assert most < 6_000_000
    assert left < 500_000


def test_a_task_larger_than_the_window_goes_alone() -> None:
    sizes = [Sending(1, str(i), "d", _sized(i, 500)) for i in range(3)]
    run = BatchRun.__new__(BatchRun)
    run._window, run._pending, run._size = Window(tasks=10, size=100), {}, 0
    assert run._room(sizes) == 1
    run._pending, run._size = {"x": sizes[0]}, 500
    assert run._room(sizes) == 0


def _sized(number: int, size: int) -> NewTask:
    return NewTask(f"t{number}", b"x" * size, "d", "")
