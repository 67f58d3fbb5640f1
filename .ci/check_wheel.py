"""Builds the wheel and uses it as a stranger would: an empty environment, no constraints, no repository beside it.

Checks the top-level names, that every data file of the two packages is inside, `headrace --version`, and a run of
50 tasks against a sample endpoint, each answered once.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"broker", "workers"}
TASKS = 50
START_LIMIT_S = 20.0
RUN_LIMIT_S = 120.0


def build(folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"wheel: the build failed\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> int:
    """Compares the wheel with what git tracks below the two packages; returns the number of files."""
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tops = {name.split("/", 1)[0] for name in inside}
    if tops != PACKAGES:
        sys.exit(f"wheel: top-level names are {sorted(tops)}, must be {sorted(PACKAGES)}")
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = set(listed.stdout.split())
    if missing := sorted(wanted - inside):
        sys.exit(f"wheel: lacks {', '.join(missing[:10])}")
    if os.environ.get("CI") and (extra := sorted(inside - wanted)):
        sys.exit(f"wheel: has what git does not know: {', '.join(extra[:10])}")
    return len(inside)


def install(wheel: Path, folder: Path) -> Path:
    """Returns the new environment's folder of commands."""
    venv.create(folder, with_pip=True)
    commands = folder / "bin"
    subprocess.run([commands / "python", "-m", "pip", "install", "-q", str(wheel)], check=True, capture_output=True)
    return commands


def check_version(commands: Path, cwd: Path) -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    done = subprocess.run([commands / "headrace", "--version"], cwd=cwd, capture_output=True, text=True, check=True)
    if wanted not in done.stdout:
        sys.exit(f"wheel: headrace --version says {done.stdout.strip()!r}, pyproject.toml {wanted!r}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers_health(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def sample_endpoint(commands: Path, cwd: Path) -> Iterator[str]:
    """A running sample endpoint; yields its base URL."""
    port = free_port()
    command = [str(commands / "python"), "-m", "workers.simulate", "--host", "127.0.0.1", "--port", str(port)]
    log_path = cwd / "endpoint.log"
    with log_path.open("w") as log, subprocess.Popen(command, cwd=cwd, stdout=log, stderr=log) as endpoint:
        try:
            give_up = time.monotonic() + START_LIMIT_S
            while not answers_health(port):
                if endpoint.poll() is not None or time.monotonic() > give_up:
                    sys.exit(f"wheel: the sample endpoint does not answer /health\n{log_path.read_text()[-3000:]}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            endpoint.terminate()


def check_run(commands: Path, cwd: Path) -> None:
    """`headrace run` of 50 tasks with no configuration: 50 rows, each id once, each answered 200."""
    ids = [f"task-{number}" for number in range(TASKS)]
    body = {"model": "sample", "messages": [{"role": "user", "content": "hello"}]}
    lines = [{"custom_id": i, "method": "POST", "url": "/v1/chat/completions", "body": body} for i in ids]
    (cwd / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with sample_endpoint(commands, cwd) as url:
        run = [str(commands / "headrace"), "run", "in.jsonl", "-o", "out.jsonl", "--endpoint", url]
        done = subprocess.run(run, cwd=cwd, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    if done.returncode:
        sys.exit(f"wheel: headrace run ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in (cwd / "out.jsonl").read_text().splitlines()]
    if sorted(row["custom_id"] for row in rows) != sorted(ids):
        sys.exit(f"wheel: {len(rows)} rows for {TASKS} tasks, or the wrong ids")
    bad = [row for row in rows if row.get("error") or row["response"]["status_code"] != 200]
    if bad:
        sys.exit(f"wheel: {len(bad)} of {TASKS} tasks were not answered, the first: {bad[0]}")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        files = check_contents(wheel)
        commands = install(wheel, folder / "venv")
        work = folder / "work"
        work.mkdir()
        check_version(commands, work)
        check_run(commands, work)
        print(f"{wheel.name}: {files} files in {' and '.join(sorted(PACKAGES))}; {TASKS} of {TASKS} tasks answered")


if __name__ == "__main__":
    main()
