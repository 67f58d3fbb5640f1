"""The embedded server with real processes: shared, killed in every way, and gone with its last user."""

from __future__ import annotations

import os
import random
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from broker.embedded import EmbeddedServer
from tests.support.embedded import (
    User,
    command,
    ended,
    eventually,
    folder,
    kill_keeper,
    log,
    processes,
    the_keeper,
    user,
)

__all__ = ["folder", "user"]  # fixtures


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
