"""`headrace run`: a batch of lines in, a line for each out; and the part of `demo` that is the same."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, TextIO, cast

from broker.batch import read_batch
from broker.batch_output import OutputFile
from broker.cli import screen
from broker.cli.batchqueue import BatchQueue
from broker.cli.batchrun import BatchRun, LineReader, Window
from broker.cli.resume import ResumeNote
from broker.cli.runmark import dead_runs, marked
from broker.cli.settings import Redis, load, pool_of, redis_of, say
from broker.cli.stall import Stall, explain
from broker.cli.tally import Tally
from broker.config import Config, Pool, config_for_endpoints
from broker.errors import BrokerError, BrokerUnavailable, HeadraceError, UsageError
from broker.inspect import LIVE_FOR
from broker.producer import PoolLimits
from broker.store import AsyncStore, Store

if TYPE_CHECKING:
    from workers.supervisor import Supervisor

LOOK_S: Final = 0.2
INTERRUPTED: Final = 130

NEEDED: Final = "give --endpoint URL (again for each), or a configuration with -c FILE"


@dataclass(slots=True)
class Job:
    """All that one run needs.

    own         the pool is for this run alone
    processes   None takes the configuration's
    quiet       no progress
    last_words  called before a second Ctrl-C ends the process
    """

    config: Config
    pool: Pool
    own: bool
    source: BinaryIO
    output: Path
    report: TextIO
    workers: bool = True
    processes: int | Literal["auto"] | None = None
    max_attempts: int | None = None
    quiet: bool = False
    last_words: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Report:
    """What came of it. `wall` in seconds; `complete`: every line of the input stands in the output.

    resumable  if it is not, the same command goes on from there
    """

    tally: Tally
    wall: float
    complete: bool
    errors_before: int = 0
    resumable: bool = True

    @property
    def exit_code(self) -> int:
        return 1 if self.tally.troubled or self.errors_before or not self.complete else 0


def run(args: argparse.Namespace) -> int:
    """The verb."""
    if args.slots and not args.endpoint:
        raise UsageError("--slots goes with --endpoint; a configuration names the slots of its endpoints itself")
    if args.no_workers and args.endpoint:
        raise UsageError("--no-workers sends to a pool that others serve: name it with --pool, not its endpoints")
    with ExitStack() as stack:
        source = stack.enter_context(open_source(args.input))
        output = Path("/dev/stdout" if args.output == "-" else args.output)
        report_to = sys.stderr if args.output in ("-", "/dev/stdout") else sys.stdout
        config, pool, own = _configure(args, source)
        job = Job(
            config, pool, own, source, output, report_to,
            workers=not args.no_workers, processes=args.processes, max_attempts=args.max_attempts, quiet=args.json,
        )  # fmt: skip
        report = execute(job)
    if args.json:
        told = {**report.tally.to_dict(), "wall_seconds": round(report.wall, 3), "complete": report.complete}
        (screen.print_json if report_to is sys.stdout else _print_json_to_stderr)(told)
    else:
        screen.print_tally(report.tally, report.wall, report_to)
    if not report.complete:
        say(f"stopped before the end: {_what_next(report, output)}")
    return report.exit_code


def _what_next(report: Report, output: Path) -> str:
    if report.resumable:
        return f"the same command goes on from here ({output})"
    return f"the other tasks are dropped, since {output} is not a file that could be gone on with"


def _print_json_to_stderr(value: Any) -> None:
    import json

    sys.stderr.write(json.dumps(value) + "\n")


def open_source(name: str) -> BinaryIO:
    """The input, to be read as it comes. Raises UsageError."""
    if name == "-":
        return os.fdopen(os.dup(0), "rb")
    try:
        file = open(name, "rb")  # noqa: SIM115  # the caller closes it
        if stat.S_ISDIR(os.fstat(file.fileno()).st_mode):
            raise IsADirectoryError(21, "is a folder")
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}; give a file of batch lines, or - for standard input") from None
    return file


def _configure(args: argparse.Namespace, source: BinaryIO) -> tuple[Config, Pool, bool]:
    config = load(args, quiet=True)
    if args.endpoint:
        name = args.pool or "run"
        adapter: Literal["npu"] | None = "npu" if _begins_with_npu(source) else None
        config = config_for_endpoints(
            args.endpoint, name, slots=args.slots, adapter=adapter, base=replace(config, warnings=())
        )
        for warning in config.warnings:
            say(f"warning: {warning}")
        return config, config.pools[name], args.pool is None
    if args.no_workers and args.pool and not config.pools:
        return config, Pool(args.pool), False
    name = pool_of(config, args.pool, NEEDED)
    if name not in config.pools:
        pool_of(config, None, NEEDED)
    return config, config.pools[name], False


def _begins_with_npu(source: BinaryIO) -> bool:
    peek: Callable[[int], bytes] | None = getattr(source, "peek", None)
    return peek is not None and b'"task_type"' in peek(65_536).split(b"\n", 1)[0]


def execute(job: Job) -> Report:
    """The run itself. Raises HeadraceError."""
    fresh = not job.output.exists()
    with OutputFile(job.output, job.source.name if isinstance(job.source.name, str) else None) as output:
        try:
            with redis_of(job.config) as redis:
                with closing(Store(redis.url)) as store:
                    store.check()
                if redis.embedded and not job.quiet:
                    say(f"queue: {redis.shown}")
                return _resume(job, redis, output)
        except BrokerError:
            if fresh and not output.done and job.output.stat().st_size == 0:
                job.output.unlink()
            raise


def _resume(job: Job, redis: Redis, output: OutputFile) -> Report:
    note = ResumeNote.open(job.output)
    if note.resumed and note.redis != redis.shown:
        say(f"warning: this batch was begun with Redis {note.redis}; what waits there is sent again here")
    name = f"run-{note.batch}" if job.own else job.pool.name
    pool = replace(job.pool, name=name)
    job.config, job.pool = replace(job.config, pools={name: pool}), pool
    note.write(name, redis.shown)
    folder = job.config.data_dir if job.own and redis.embedded else None
    with marked(folder, note) if folder else nullcontext() as mark:
        report = _loop(_Run(job, redis, output, note, mark).main())
    if report.complete:
        note.remove()
    return report


def _loop(main: Any) -> Report:
    factory: Any = None
    with suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return cast(Report, runner.run(main))


class _Run:
    """One run on its event loop."""

    def __init__(self, job: Job, redis: Redis, output: OutputFile, note: ResumeNote, mark: Path | None) -> None:
        self._job, self._output, self._note, self._mark = job, output, note, mark
        self._tally = Tally()
        self._total: int | None = None
        self._stop = asyncio.Event()
        self._interrupts = 0
        self._serving = False
        self._progress: screen.Progress | None = None
        queue = job.pool.queue
        self._queue = BatchQueue(
            AsyncStore(redis.url), job.pool.name, note.batch, own=job.own,
            limits=PoolLimits(queue.max_depth, queue.payload_limit, queue.result_ttl),
            max_attempts=job.max_attempts, mend=redis.mend, said=say,
        )  # fmt: skip
        slots = sum(8 if each.max_concurrent == "auto" else each.max_concurrent for each in job.pool.enabled)
        self._batch = BatchRun(
            self._queue, output, LineReader(read_batch(job.source, queue.payload_limit)), self._tally,
            window=Window(tasks=max(4096, 4 * slots)), resumed=note.resumed, said=say,
        )  # fmt: skip
        self._supervisor = self._supervise(redis) if job.workers else None

    def _supervise(self, redis: Redis) -> Supervisor:
        from workers.supervisor import Supervisor

        job = self._job
        supervisor = Supervisor(job.config, redis_url=redis.url, pools=[job.pool.name], processes=job.processes)
        for warning in supervisor.plan.warnings:
            say(f"warning: {warning}")
        return supervisor

    async def main(self) -> Report:
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted)
        errors_before = self._tally.earlier_failed = self._output.done.errors
        showing = asyncio.create_task(self._show())
        try:
            await self._clear_up()
            before = await self._queue.failures()
            try:
                await self._work()
            except Exception as error:
                if not isinstance(error, BrokerUnavailable):
                    await self._leave(complete=False)
                raise
            self._tally.add_failures(before, await self._queue.failures())
            wall = time.monotonic() - began
            await self._leave(complete=self._batch.complete)
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
            await self._queue.close()
        return Report(self._tally, wall, self._batch.complete, errors_before, resumable=self._note.kept)

    async def _leave(self, *, complete: bool) -> None:
        """What stays in Redis: nothing, or what the same command goes on with."""
        if complete:
            await self._queue.close_batch()
        elif self._note.kept:
            return
        else:
            await self._queue.abandon(self._batch.left)
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)

    async def _clear_up(self) -> None:
        """What earlier runs left on the embedded server and no command can go on with."""
        if self._mark is None:
            return
        with dead_runs(self._mark) as found:
            for batch, mark in found.items():
                left = BatchQueue(self._queue.store, f"run-{batch}", batch, own=True, limits=PoolLimits())
                ages = [each.age for each in await left.endpoints() if each.age is not None]
                if min(ages, default=LIVE_FOR) >= LIVE_FOR:  # else its workers may be ending yet: next time
                    await left.close_batch()
                    mark.unlink(missing_ok=True)

    async def _work(self) -> None:
        working = asyncio.create_task(self._batch.run())
        serving = asyncio.create_task(self._serve())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({working, serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not working.done():
                serving.result()
            self._batch.stop()
            await self._end_workers(serving, at_once=working.done() and working.exception() is not None)
            self._batch.give_up()
            await working
        finally:
            for task in (working, serving, stopped):
                task.cancel()
            await asyncio.gather(working, serving, stopped, return_exceptions=True)

    async def _serve(self) -> None:
        """Workers, from the first task on, until told to stop. Raises BrokerError if they end before."""
        await self._batch.begun.wait()
        if self._supervisor is None:
            await asyncio.Event().wait()
            return
        self._serving = True
        await self._supervisor.start()
        code = await self._supervisor.wait()
        if not self._batch.stopping:
            what = "the same command goes on from here" if self._note.kept else "what is not written is dropped"
            raise BrokerError(f"the worker processes ended (code {code}); {what}")

    async def _end_workers(self, serving: asyncio.Task[None], *, at_once: bool) -> None:
        if self._supervisor is None or not self._serving:
            serving.cancel()
        else:
            self._supervisor.stop()
            if at_once:
                self._supervisor.stop()
        await asyncio.gather(serving, return_exceptions=True)

    def _interrupted(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            say("stopping: what runs is finished first; once more ends it now")
            self._stop.set()
            return
        if self._progress is not None:
            self._progress.close()
        self._job.last_words()
        # The workers release what they run when they see us gone; a thread of ours may be waiting for standard input.
        os._exit(INTERRUPTED)

    # For the person who watches

    async def _show(self) -> None:
        progress = self._progress = None if self._job.quiet else screen.progress(sys.stderr)
        counting = asyncio.create_task(asyncio.to_thread(self._count))
        stall = Stall(time.monotonic())
        try:
            while True:
                if progress is not None:
                    progress.update(self._tally, self._total)
                if seconds := stall.lasted(self._tally.settled, self._batch.pending, time.monotonic()):
                    await self._say_why(stall, seconds)
                await asyncio.sleep(LOOK_S)
        finally:
            counting.cancel()
            if progress is not None:
                progress.update(self._tally, self._total)
                progress.close()

    def _count(self) -> None:
        """Lines of the input; an estimate, for the bar."""
        name = self._job.source.name
        if isinstance(name, str) and stat.S_ISREG(os.stat(name).st_mode):
            with open(name, "rb") as file:
                lines, last = 0, b"\n"
                while piece := file.read(1 << 20):
                    lines, last = lines + piece.count(b"\n"), piece[-1:]
            self._total = lines + (last != b"\n")

    async def _say_why(self, stall: Stall, seconds: float) -> None:
        with suppress(HeadraceError):
            states = [each for each in await self._queue.endpoints() if each.state != "removed"]
            if stall.worth_a_line(any(each.up for each in states) or not states, seconds):
                why = explain(states) or f"no worker serves pool {self._job.pool.name}"
                say(f"no outcome for {seconds:.0f} s, {self._batch.pending} tasks wait or run: {why}")
