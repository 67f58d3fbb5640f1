"""Users of an embedded server, each a process of its own, and what runs in a folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from broker import keeper
from broker.embedded import EmbeddedServer
from broker.launch import until

# A user: acquires, tells the URL and the server's process id, then does what it reads, one word a line.
USER = """
import json, os, signal, sys
from pathlib import Path
from broker.embedded import EmbeddedServer
from broker.errors import EmbeddedServerError

if os.environ.get("DEAF"):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.stdin.readline()
server = EmbeddedServer.acquire(Path(sys.argv[1]))
def tell():
    print(json.dumps({"url": server.url, "socket": server.socket_path, "pid": server.pid}), flush=True)
tell()
for line in sys.stdin:
    if line == "ensure\\n":
        server.ensure()
    elif line == "release\\n":
        server.release()
    elif line == "fork\\n" and not os.fork():
        signal.pause()
    tell()
"""
ROOT = Path(__file__).parents[2]


class User:
    """A process that uses the server of `folder`."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        environ = {**(os.environ if env is None else {}), **(env or {}), "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, str(folder)],
            stdin=pipe, stdout=pipe, env=environ, text=True, bufsize=1, start_new_session=True,
        )  # fmt: skip
        self.told: dict[str, str | int] = {}

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")

    def hear(self) -> int:
        """The server's process id, as the user sees it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the user died"
        self.told = json.loads(line)
        return int(self.told["pid"])

    def ask(self, word: str) -> int:
        self.say(word)
        return self.hear()

    def command(self, *words: str) -> keeper.Reply:
        return command(str(self.told["socket"]), *words)

    def kill(self) -> None:
        self.process.kill()
        self.leave()

    def leave(self) -> None:
        self.process.communicate()


def command(socket_path: str, *words: str) -> keeper.Reply:
    with keeper.connect(socket_path, 5) as connection:
        return keeper.call(connection, *words)


def processes(folder: Path, what: str = "") -> list[int]:
    """The living processes that have the folder and `what` in their command line, without the users."""
    listed = subprocess.run(["ps", "-axwwo", "pid=,stat=,command="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [
        int(pid)
        for pid, state, line in rows
        if str(folder) in line and what in line and state[0] != "Z" and " -c " not in line
    ]


def eventually(condition: Callable[[], bool], seconds: float = 10) -> None:
    for _ in until(seconds):
        if condition():
            return
    raise AssertionError(f"not within {seconds} s")


def ended(folder: Path) -> Callable[[], bool]:
    return lambda: not processes(folder)


def the_keeper(folder: Path) -> int:
    """The one there is; one that was just started bears its starter's command line for a moment."""
    eventually(lambda: len(processes(folder, "keeper.py")) == 1)
    (pid,) = processes(folder, "keeper.py")
    return pid


def kill_keeper(folder: Path) -> int:
    pid = the_keeper(folder)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not processes(folder, "keeper.py"))
    return pid


def log(folder: Path) -> str:
    return (folder / "server.log").read_text(errors="replace")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A data folder that does not exist yet. Afterwards nothing may run there."""
    parent = Path(tempfile.mkdtemp(prefix="hr-"))
    path = parent / ".headrace"
    yield path
    try:
        eventually(ended(parent), 5)
    finally:
        for pid in processes(parent):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(parent)


@pytest.fixture
def user(folder: Path) -> Iterator[Callable[..., User]]:
    """Makes users that have acquired the server; they are gone before the folder is looked at."""
    made: list[User] = []

    def make(go: bool = True, env: Mapping[str, str] | None = None, at: Path = folder) -> User:
        made.append(User(at, env))
        if go:
            made[-1].ask("go")
        return made[-1]

    yield make
    for one in made:
        one.kill()


def info(server: EmbeddedServer) -> bytes:
    reply = command(server.socket_path, "INFO", "persistence")
    assert isinstance(reply, bytes)
    return reply
