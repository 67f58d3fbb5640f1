"""A real fleet for tests: worker processes under a real supervisor, in a process of its own, and Redis' picture of it.

Tests enqueue through the public Broker or through RQ, count at the endpoints, and wait for events.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, ParamSpec

import yaml

from broker.config import load_config
from broker.store import Store
from tests.support import commands
from tests.support.commands import PATIENCE_S
from tests.support.commands import ROOT as ROOT
from workers.layout import Selection, layout

P = ParamSpec("P")

until: Callable[..., Any] = commands.until  # mypy cannot infer a lambda that has defaults


def pool_config(urls: Sequence[str], **more: Any) -> dict[str, Any]:
    """A pool as it stands in YAML. `more` are pool keys; `slots` and `each` (keys of every endpoint) are ours."""
    slots, each = more.pop("slots", 8), more.pop("each", {})
    endpoints = [{"id": f"e{i}", "url": url, "max_concurrent": slots, **each} for i, url in enumerate(urls)]
    return {"endpoints": endpoints, **more}


class Fleet:
    """`headrace worker` on a configuration file.

    `wait_ready` returns when all processes of its plan wait for work, which are no more than there are slots.
    """

    def __init__(
        self,
        folder: Path,
        redis_url: str,
        pools: dict[str, Any],
        processes: int = 1,
        *options: str,
        module: str = "broker.cli",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.file = folder / "headrace.yaml"
        self.file.write_text(yaml.safe_dump({"redis": {"url": redis_url}, "processes": processes, "pools": pools}))
        self.log = folder / "worker.log"
        shares = layout(load_config(self.file, env or {}), Selection(), cpus=1).shares
        self._planned = {pool: sum(any(at.startswith(f"{pool}/") for at in each) for each in shares) for pool in pools}
        self.store = Store(redis_url)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, "worker", "-c", str(self.file), *options],
                cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"NO_COLOR": "1"} | dict(env or {}),
            )  # fmt: skip

    def wait_ready(self) -> None:
        ready = f"processes ready ({self._planned}); see {self.log}"
        until(lambda: all(map(self.ready, self._planned)) or self._ended(), ready)
        if self._process.poll():  # a burst may have ended well by now
            raise AssertionError(f"headrace worker ended:\n{self.log.read_text()}")

    def ready(self, pool: str) -> bool:
        """Every process that serves the pool has said that it waits for work."""
        waiting = self.store.raw(lambda client: client.hlen(self.store.keys.waiting(pool)))
        return int(waiting) >= self._planned[pool]

    def _ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def pids(self) -> list[int]:
        """Of the worker processes."""
        found = []
        for pid in Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split():
            if b"workers.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
        return found

    def kill_one(self) -> int:
        """kill -9 of one worker process."""
        pids: list[int] = until(lambda: self.pids, "a process to kill")
        pid = pids[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    def signal(self, number: signal.Signals) -> None:
        """To the supervisor."""
        self._process.send_signal(number)

    def wait(self, patience: float = PATIENCE_S) -> int:
        return self._process.wait(patience)

    def close(self) -> None:
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self.store.close()


def _once_ready(begin: Callable[P, Fleet]) -> Callable[P, AbstractContextManager[Fleet]]:
    @contextmanager
    def run(*args: P.args, **options: P.kwargs) -> Iterator[Fleet]:
        with closing(begin(*args, **options)) as running:
            running.wait_ready()
            yield running

    return run


# A Fleet, ready, that ends with the block. One that has only just begun: closing(Fleet(...)).
fleet = _once_ready(Fleet)


def as_text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def in_flight(store: Store, pool: str) -> int:
    """Leases over all endpoints of a pool."""
    endpoints = store.raw(lambda client: client.smembers(store.keys.endpoints(pool)))
    counts = store.pipelined([("ZCARD", store.keys.slots(pool, as_text(endpoint))) for endpoint in endpoints])
    return sum(counts)


def history(store: Store, task_id: str) -> list[dict[str, Any]]:
    """The failed attempts of a task, as they stand in its hash."""
    text = store.raw(lambda client: client.hget(store.keys.job(task_id), "x_hist")) or b""
    return [json.loads(line) for line in text.splitlines()]


def row(running: Fleet, endpoint: str) -> dict[str, str]:
    """An endpoint as it stands in Redis; {} if there is none."""
    key = running.store.keys.endpoint("llm", endpoint)
    found: dict[bytes, bytes] = running.store.pipelined([("HGETALL", key)])[0]
    return {name.decode(): value.decode() for name, value in found.items()}


def logged(running: Fleet, part: str) -> str:
    """Waits for a line of the log with this part, and returns it."""

    def look() -> str:
        return next((line for line in running.log.read_text().splitlines() if part in line), "")

    return str(until(look, f"a line with {part!r} in {running.log}", 15))


def done(tasks: Iterable[Any]) -> Counter[str]:
    return Counter(task.result(timeout=30).outcome for task in tasks)
