"""The command line in processes of its own, with nothing of this machine's environment in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-P", "-m", "broker.cli")
PATIENCE_S = 60.0


def environment(**more: str) -> dict[str, str]:
    """Ours, without what would configure headrace, and with `more`."""
    ours = ("HEADRACE_", "REDIS_URL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", **more}


def headrace(
    *words: object, cwd: Path, text: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end. `text` is its standard input."""
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        cwd=cwd, input=text, capture_output=True, text=True, timeout=PATIENCE_S, env=environment(**(env or {})),
    )  # fmt: skip


@dataclass
class Folder:
    """A folder with a configuration, headrace.yaml."""

    folder: Path

    def run(self, *words: object, code: int = 0, text: str = "") -> str:
        """One command to its end; what it said on its standard output."""
        done = headrace(*words, "-c", "headrace.yaml", cwd=self.folder, text=text)
        assert "Traceback" not in done.stderr
        assert done.returncode == code, done.stderr
        return done.stdout

    def json(self, *words: object, code: int = 0) -> Any:
        return json.loads(self.run(*words, "--json", code=code))


@contextmanager
def started(*words: object, cwd: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A running command in a process group of its own, which is killed at the end of the block."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, words)],
        cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=environment(**(env or {})),
    )  # fmt: skip
    try:
        yield process
    finally:
        kill_group(process)
        sys.stderr.write("".join(process.communicate()))  # pytest shows it when the test fails


def kill_group(process: subprocess.Popen[str]) -> None:
    """kill -9 of the command and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_until(process: subprocess.Popen[str], part: str) -> None:
    """Reads its standard output up to the line with this part."""
    assert process.stdout is not None
    read = []
    for line in process.stdout:
        if part in line:
            return
        read.append(line)
    raise AssertionError(f"it ended without {part!r}: {''.join(read)}")


def until(happened: Callable[[], T], what: str, patience: float = PATIENCE_S) -> T:
    """Looks until `happened()` is true, and returns what it gave."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if found := happened():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {patience:.0f} s: {what}")


def chat_line(custom_id: str, prompt: str) -> dict[str, Any]:
    body = {"model": "sample", "messages": [{"role": "user", "content": prompt}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write_lines(path: Path, lines: Iterable[dict[str, Any] | str]) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
    return path


def write_batch(path: Path, count: int) -> Path:
    return write_lines(path, (chat_line(f"task-{i}", f"question {i}") for i in range(count)))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def endpoints(samples: Iterable[Any]) -> list[str]:
    """`--endpoint URL` for each."""
    return [word for sample in samples for word in ("--endpoint", sample.url)]


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The only line on standard error. An AssertionError if there are more, or a traceback anywhere."""
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]
