"""The embedded server: a Valkey (or Redis) of its own for each project folder, shared by the commands that run there.

The first user starts it, others in the same folder find it, and it ends with its last user; the data stays. How that
survives kill -9 of anybody is told in `broker.keeper`.

    with EmbeddedServer.acquire(Path(".headrace")) as server:
        client = redis.Redis.from_url(server.url)
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from broker import launch
from broker.errors import EmbeddedServerError
from broker.launch import REMEDY, drop, keep, until
from broker.serverbinary import ServerBinary, find_server_binary

with suppress(ImportError):  # no flock on Windows; acquire() says so
    import fcntl

    from broker import keeper

__all__ = ["EmbeddedServer", "ServerBinary", "find_server_binary"]

START_SECONDS = 20.0  # without any answer from the server; loading its data may take longer
LOCK_SECONDS = 30.0  # while another command starts or ends it: more than the keeper's grace
LAUNCHES = 3  # a server that was killed while it started is no reason to give up
MAX_LOG_BYTES = 1_000_000


class EmbeddedServer:
    """One process' share in the server of a data folder. Every process that uses the server holds its own.

    `folder` is the data folder; it holds the append-only file, `server.log` and the locks. A forked child
    holds no share.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._owner = os.getpid()
        self._users: int | None = None
        self._keepers: list[int] = []
        self._state: dict[str, Any] = {}
        self._log_start = 0

    @classmethod
    def acquire(cls, data_dir: Path) -> EmbeddedServer:
        """The running server of the folder `data_dir` (usually `.headrace`), started if need be, with its data loaded.

        Raises EmbeddedServerError: one line with the reason, and the log's path if there is one to read.
        """
        if sys.platform == "win32":
            raise EmbeddedServerError("the embedded server needs Linux or macOS: give a server with --redis URL")
        with _one_line(data_dir):
            server = cls(Path(os.path.realpath(data_dir)))
        try:
            server.ensure()
        except BaseException:
            server.release()
            raise
        return server

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"EmbeddedServer({str(self.folder)!r})"

    @property
    def url(self) -> str:
        """`unix:///path.sock?db=0`, percent-encoded. It stays the same when the server is started again."""
        return f"unix://{quote(self.socket_path)}?db=0"

    @property
    def socket_path(self) -> str:
        """The path of the unix socket: in the folder, or in a private temporary folder where that cannot be."""
        return str(self._state["socket"])

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    @property
    def pid(self) -> int:
        """The server's process id; 0 if it does not run or the system does not tell."""
        with suppress(OSError), keeper.connect(self.socket_path, 1) as connection:
            return keeper.peer_pid(connection)
        return 0

    @property
    def tcp_url(self) -> str:
        """`redis://127.0.0.1:PORT/0`, for tools that know no unix sockets.

        The port is opened when this is first asked for, since everyone on this machine can connect to it; the folder
        keeps its port. Raises EmbeddedServerError.
        """
        with _one_line(self.folder), self._locked():
            return f"redis://127.0.0.1:{self._open_port()}/0"

    def ensure(self) -> None:
        """Start the server again if it died, and its keeper if that one did. Call it when a connection fails.

        Milliseconds if all is well. Raises EmbeddedServerError.
        """
        if os.getpid() != self._owner:
            raise EmbeddedServerError("acquired by another process: a forked child must call acquire() itself")
        with _one_line(self.folder):
            self._make_folder()
            started = False
            for _ in range(LAUNCHES):
                with self._locked():
                    self._join()
                    started = self._bring_up() or started
                if self._is_loaded():
                    break
            else:
                raise self._failed()
            if started and "port" in self._state:
                with self._locked(), suppress(EmbeddedServerError):
                    self._open_port()

    def release(self) -> None:
        """Give the share back. The last one ends the server, without loss, before this returns. Never raises.

        A process that ends without it gives its share back too, and the keeper ends the server a moment later.
        """
        users, self._users = self._users, None
        if users is None or os.getpid() != self._owner:
            return
        try:
            with self._locked():
                if keeper.leads_to(str(self.folder / keeper.USERS), users) and _is_last(users):
                    self._end()
        except (OSError, EmbeddedServerError):
            pass  # the keeper will see to it
        finally:
            drop(users)
            self._reap()

    # what follows happens with `lock` held, except where told

    def _join(self) -> None:
        path = str(self.folder / keeper.USERS)
        if self._users is not None:
            if keeper.leads_to(path, self._users):
                return
            drop(self._users)  # the folder was deleted and is new
        self._users = keep(keeper.open_lock(path))
        for _ in until(LOCK_SECONDS):
            if keeper.try_lock(self._users, fcntl.LOCK_SH):
                return
        raise EmbeddedServerError(f"{path} is locked by another program for {LOCK_SECONDS:g} s")

    def _bring_up(self) -> bool:
        """Return when the server answers at all; whether this call started it."""
        launches, adopted = 0, False
        self._state = self._read_state()
        for waited in until(START_SECONDS):
            with ExitStack() as stack:
                no_keeper = self._probe(keeper.KEEPER, stack)
                no_server = self._probe(keeper.SERVER, stack)
                if no_keeper is not None and no_server is not None:
                    if launches == LAUNCHES:
                        raise self._failed()
                    self._launch(no_keeper, no_server)
                    launches += 1
                elif no_keeper is not None and not adopted:
                    self._launch(no_keeper, None)
                    adopted = True
            if no_server is None and self._ping():
                return launches > 0
            if waited > 1 and self._state.get("host") not in (None, socket.gethostname()):
                raise EmbeddedServerError(f"the server of {self.folder} runs on {self._state['host']}: {REMEDY}")
        raise EmbeddedServerError(f"the server gives no answer for {START_SECONDS:g} s: see {self.log}")

    def _probe(self, name: str, stack: ExitStack) -> int | None:
        """A descriptor with the lock, until the stack ends; None if somebody else has it."""
        fd = keep(keeper.open_lock(str(self.folder / name)))
        stack.callback(drop, fd)
        return fd if keeper.try_lock(fd, fcntl.LOCK_EX) else None

    def _ping(self) -> bytes:
        """What the server says; b"" if nothing."""
        try:
            with keeper.connect(self.socket_path, START_SECONDS) as connection:
                reply = keeper.call(connection, "PING")
        except OSError:
            return b""
        return reply if isinstance(reply, bytes) else b"?"

    def _is_loaded(self) -> bool:
        """Wait, without the lock, as long as the server says that it is loading. False if it died."""
        for _ in until(float("inf")):
            reply = self._ping()
            if not reply.startswith(b"-LOADING"):
                return bool(reply)
        return False

    def _launch(self, keeper_fd: int, server_fd: int | None) -> None:
        """Spawn a keeper, which inherits the locks; with `server_fd` it starts the server."""
        if not sys.executable:
            raise EmbeddedServerError("sys.executable is unknown, so no helper can be started: give --redis URL")
        inherited = {keeper.KEEPER_FD: keeper_fd}
        words = [sys.executable, "-I", "-S", keeper.__file__, str(self.folder)]
        if server_fd is None:
            words.append(self.socket_path)
        else:
            binary = find_server_binary(copy_to=self.folder)
            state = {
                "socket": launch.choose_socket(self.folder, self._state.get("socket")),
                "host": socket.gethostname(),
            }
            state["server"] = f"{binary.name} {binary.version} ({binary.origin})"
            self._write_state({**self._state, **state})
            words += [self.socket_path, binary.path, "--unixsocket", self.socket_path]
            words += [word for name, value in launch.SERVER_OPTIONS.items() for word in (f"--{name}", value)]
            inherited[keeper.SERVER_FD] = server_fd
        self._keepers.append(launch.spawn(words, self._open_log(), inherited))

    def _open_log(self) -> int:
        with suppress(OSError):
            if self.log.stat().st_size > MAX_LOG_BYTES:
                self.log.replace(self.log.with_suffix(".log.1"))
        fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._log_start = os.fstat(fd).st_size
        return fd

    def _failed(self) -> EmbeddedServerError:
        reason = ""
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(self._log_start)
            reason = launch.log_reason(log.read(100_000).decode("utf-8", "replace"))
        return EmbeddedServerError(f"the embedded server did not start: {reason or 'it ended'}; see {self.log}")

    def _open_port(self) -> int:
        with keeper.connect(self.socket_path, START_SECONDS) as connection:
            reply = keeper.call(connection, "CONFIG", "GET", "port")
            if isinstance(reply, list) and len(reply) == 2 and reply[1] != b"0":
                return int(reply[1])  # type: ignore[arg-type]  # the value of a setting is a string
            for attempt in range(20):
                port = self._state.get("port") if attempt == 0 else None
                port = port or launch.free_port()
                reply = keeper.call(connection, "CONFIG", "SET", "port", str(port))
                if reply == b"OK":
                    self._write_state({**self._state, "port": port})
                    return int(port)
        raise EmbeddedServerError(f"the embedded server cannot open a TCP port: {reply!r}; see {self.log}")

    def _end(self) -> None:
        with ExitStack() as stack:
            if self._probe(keeper.SERVER, stack) is not None:
                return
        deadline = time.monotonic() + keeper.GRACE
        pid = keeper.end_server(self.socket_path, 0, own_folder=True)
        if not self._await_free(keeper.SERVER, deadline - time.monotonic()):
            keeper.kill(pid, signal.SIGKILL)
            self._await_free(keeper.SERVER, keeper.GRACE)
        self._await_free(keeper.KEEPER, 1)
        self._reap(patience=1)

    def _await_free(self, name: str, seconds: float) -> bool:
        for _ in until(seconds):
            with ExitStack() as stack:
                if self._probe(name, stack) is not None:
                    return True
        return False

    def _reap(self, patience: float = 0.0) -> None:
        for _ in until(patience):
            self._keepers = [pid for pid in self._keepers if not launch.is_gone(pid)]
            if not self._keepers:
                return

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ignore = self.folder / ".gitignore"
        if not ignore.exists() or not ignore.stat().st_size:
            ignore.write_text("*\n", encoding="ascii")

    def _read_state(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            state = json.loads((self.folder / "server.json").read_bytes())
            if isinstance(state, dict) and isinstance(state.get("socket"), str):
                return state
        return {"socket": str(self.folder / "server.sock")}

    def _write_state(self, state: dict[str, Any]) -> None:
        fresh = self.folder / "server.json.new"
        fresh.write_text(json.dumps(state) + "\n", encoding="ascii")
        fresh.replace(self.folder / "server.json")
        self._state = state

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = str(self.folder / keeper.LOCK)
        for _ in until(LOCK_SECONDS):
            fd = keep(keeper.open_lock(path))
            try:
                if keeper.try_lock(fd, fcntl.LOCK_EX) and keeper.leads_to(path, fd):
                    yield
                    return
            finally:
                drop(fd)
        raise EmbeddedServerError(f"another command holds {path} for {LOCK_SECONDS:g} s: see {self.log}")


def _is_last(users: int) -> bool:
    """With `lock` held and a share on `users`: whether nobody else has one; then `users` is held exclusively.

    The keeper may take the lock in the moment in which ours is converted. It gives it back at once and then waits for
    `lock`, so it can get in between only once.
    """
    if keeper.try_lock(users, fcntl.LOCK_EX):
        return True
    fcntl.flock(users, fcntl.LOCK_SH)
    return keeper.try_lock(users, fcntl.LOCK_EX)


@contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            reason = "its file system has no file locks (flock)"
        raise EmbeddedServerError(f"the embedded server cannot use the folder {folder}: {reason}: {REMEDY}") from error
