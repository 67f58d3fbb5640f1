"""`headrace demo`: the shipped batch over three sample endpoints, one of which fails for a while.

It is `headrace run` on an embedded server in a temporary folder; what it prints is held against what the endpoints
themselves counted. Nothing is left behind, whatever ends it: the samples and the cleaner of the folder end with us.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from broker import logs
from broker.cli import cleaner, screen
from broker.cli.run import Job, Report, execute
from broker.cli.settings import VERBOSE
from broker.config import Breaker, Config, Endpoint, Log, Pool, RedisSettings, Retry
from broker.errors import HeadraceError

SLOTS: Final = 3
LATENCIES: Final = {"quick": "300ms", "steady": "500ms", "slow": "900ms"}
FAILING: Final = "steady"
FAILS_AFTER_S: Final = 2.0
FAILS_FOR: Final = "3s"
COOLDOWN_S: Final = 1.5  # 60 s by default, which is longer than the whole demo
CALL_S: Final = 5.0


def demo(args: argparse.Namespace) -> int:
    """The verb."""
    log = Log(VERBOSE[min(args.verbose, len(VERBOSE)) - 1] if args.verbose else "error")
    logs.set_up(log.level)
    with _folder() as folder, _endpoints() as samples:
        pool = Pool(
            "demo",
            tuple(Endpoint(name, sample.url, max_concurrent=SLOTS) for name, sample in samples.items()),
            retry=Retry(max_attempts=3, backoff_initial=0.2, backoff_max=2.0),
            breaker=Breaker(failures=5, cooldown=COOLDOWN_S, cooldown_max=2 * COOLDOWN_S),
        )
        redis = RedisSettings(data_dir=str(folder / ".headrace"))
        config = Config(redis=redis, pools={"demo": pool}, log=log)
        if not args.json:
            _introduce(samples)
        report = _run(config, pool, folder, samples, args)
        counts = {name: sample.hits() for name, sample in samples.items()}
    return _finish(report, counts, args.json)


def _introduce(samples: dict[str, Sample]) -> None:
    rows = [(name, each.url, LATENCIES[name], SLOTS) for name, each in samples.items()]
    screen.print_table(("sample endpoint", "address", "answers in", "slots"), rows)
    sys.stdout.write(f"{FAILING} will fail for {FAILS_FOR} on the way; its tasks go to the others.\n\n")
    sys.stdout.flush()


def _run(
    config: Config, pool: Pool, folder: Path, samples: dict[str, Sample], args: argparse.Namespace
) -> Report:
    trouble = threading.Timer(FAILS_AFTER_S, samples[FAILING].fail)
    trouble.daemon = True
    batch = resources.files("broker").joinpath("data", "demo.jsonl")

    def clear_up() -> None:
        trouble.cancel()
        for sample in samples.values():
            sample.stop()

    with batch.open("rb") as source:
        job = Job(
            config, pool, False, cast(BinaryIO, source), folder / "answers.jsonl", sys.stdout,
            processes=args.processes, quiet=args.json, last_words=clear_up,
        )  # fmt: skip
        trouble.start()
        try:
            return execute(job)
        finally:
            trouble.cancel()


def _finish(report: Report, counts: dict[str, int], as_json: bool) -> int:
    """The table, and whether it is true: every request that an endpoint saw was an answer or a failure in it."""
    ours = {name: each.served + each.failures for name, each in report.tally.endpoints.items()}
    true = not report.complete or all(ours.get(name, 0) == hits for name, hits in counts.items())
    if as_json:
        told = {**report.tally.to_dict(), "wall_seconds": round(report.wall, 3), "hits": counts, "true": true}
        screen.print_json(told)
    else:
        screen.print_tally(report.tally, report.wall, sys.stdout)
        total = sum(counts.values())
        verdict = "so the table is true" if true else f"but the table has {sum(ours.values())}: {ours}, {counts}"
        sys.stdout.write(f"the endpoints themselves counted {total} requests, {verdict}\n")
    return report.exit_code if true else 1


@contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder; what removes it is a process of its own, which sees us go even by kill -9."""
    name = tempfile.mkdtemp(prefix="headrace-")
    with subprocess.Popen(
        [sys.executable, "-I", "-S", cleaner.__file__, name],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    ):  # fmt: skip
        yield Path(name)


@dataclass(slots=True)
class Sample:
    """A simulated endpoint in a process of its own."""

    name: str
    process: subprocess.Popen[str]
    url: str

    @classmethod
    def start(cls, name: str) -> Sample:
        """Returns when it answers."""
        words = ["--port", "0", "--until-eof", "--latency", LATENCIES[name], "--jitter", "60ms"]
        paths = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "workers.simulate", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise HeadraceError(f"sample endpoint {name} did not start (code {process.wait()})")
        return cls(name, process, json.loads(line)["url"])

    def hits(self) -> int:
        return int(self._call("/stats")["hits"])

    def fail(self) -> None:
        """Answers 503 from now on, for a while. Too late is no fault: the batch may be through."""
        with suppress(OSError):
            self._call("/control", {"fail_for": FAILS_FOR, "mode": "status"})

    def stop(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(CALL_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _call(self, path: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if settings is None else json.dumps(settings).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(self.url + path, data), timeout=CALL_S) as answer:
            told: dict[str, Any] = json.load(answer)
            return told


@contextmanager
def _endpoints() -> Iterator[dict[str, Sample]]:
    samples: dict[str, Sample] = {}
    try:
        for name in LATENCIES:
            samples[name] = Sample.start(name)
        yield samples
    finally:
        for sample in samples.values():
            sample.stop()
