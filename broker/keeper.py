"""The keeper: a small process that starts the embedded server and ends it when its last user is gone.

It runs as a script (`python -I -S keeper.py FOLDER SOCKET [SERVER WORD...]`), in a session of its own, and imports the
standard library only. It waits in two blocking flock() calls and uses no CPU. `broker.embedded` shares its primitives.

Four lock files in the data folder carry the whole protocol; an flock ends with its holder, however that one dies.

lock     exclusive, briefly: by whoever looks whether the server runs, starts it or ends it. Taken before the others.
users    shared, by every process that uses the server
server   exclusive, inherited by the server: held while it runs
keeper   exclusive, by the keeper: held while it lives

Without SERVER it adopts a running one whose keeper was killed. Its descriptor 3 is `keeper`, already locked; 4 is
`server`, already locked, if there is a server to start.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import BinaryIO

LOCK, USERS, SERVER, KEEPER = "lock", "users", "server", "keeper"
GRACE = 10.0  # seconds between asking the server to end and killing it
KEEPER_FD, SERVER_FD = 3, 4

Reply = bytes | int | None | list["Reply"]


def open_lock(path: str) -> int:
    """A descriptor of the lock file, which is made if need be. Every call is an owner of its own. Raises OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def try_lock(fd: int, kind: int) -> bool:
    """Take the flock `kind` (LOCK_EX, LOCK_SH) if it is free now. On False, a lock that `fd` had may be gone."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def leads_to(path: str, fd: int) -> bool:
    """Whether `path` is still the open file `fd`. It is not once the folder was deleted or replaced."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


def connect(address: str, timeout: float) -> socket.socket:
    """A connection to the unix socket `address`; `timeout` in seconds, also for what follows. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def peer_pid(connection: socket.socket) -> int:
    """The process that listens at the other end; 0 where the system does not tell (or in another container)."""
    try:
        if sys.platform == "darwin":
            return int(connection.getsockopt(0, 2))  # SOL_LOCAL, LOCAL_PEERPID
        return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    except (AttributeError, OSError):
        return 0


def call(connection: socket.socket, *words: str) -> Reply:
    """Send one command, return its reply. An error reply is bytes that begin with `-`. Raises OSError."""
    parts = [word.encode() for word in words]
    connection.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
    with connection.makefile("rb") as stream:
        return _reply(stream)


def _reply(stream: BinaryIO) -> Reply:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("the server closed the connection")
    kind, rest = line[:1], line[1:-2]
    if kind == b"+":
        return rest
    if kind == b"-":
        return line[:-2]
    if kind == b":":
        return int(rest)
    if rest == b"-1":
        return None
    if kind == b"$":
        return stream.read(int(rest) + 2)[:-2]
    return [_reply(stream) for _ in range(int(rest))]


def end_server(address: str, pid: int, own_folder: bool) -> int:
    """Ask the server to end without loss. Returns its process id, 0 if unknown; its lock tells when it has ended.

    `pid` if the caller knows it, else 0. `own_folder` is false once the data folder was deleted: a server that ends in
    order would then take with it the socket of a successor that stands in its place.
    """
    if not own_folder:
        kill(pid, signal.SIGKILL)
        return pid
    try:
        connection = connect(address, GRACE)
    except OSError:
        kill(pid, signal.SIGTERM)  # it does not listen yet
        return pid
    with connection:
        pid = pid or peer_pid(connection)
        with suppress(OSError):  # the end of the connection is its only answer
            call(connection, "SHUTDOWN", "NOSAVE", "NOW", "FORCE")  # NOSAVE: no RDB file; the AOF is flushed anyhow
    return pid


def kill(pid: int, signum: int) -> None:
    """Send the signal; 0 and a process that is gone are no errors."""
    if pid > 0:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


class Keeper:
    """Keeps one server. `pid` is the server's, 0 if it is not known."""

    def __init__(self, folder: str, address: str) -> None:
        self.folder, self.address, self.pid = folder, address, 0
        # opened now: the folder may be gone when they are needed
        self.lock, self.users, self.server = (open_lock(os.path.join(folder, n)) for n in (LOCK, USERS, SERVER))

    def start(self, words: list[str]) -> None:
        """Start the server; it inherits its lock. Raises OSError."""
        os.set_inheritable(SERVER_FD, True)
        environ = {**os.environ, "LC_ALL": "C"}  # an unknown locale would stop it
        defaults = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        self.pid = os.posix_spawn(words[0], words, environ, setsigdef=defaults, setsigmask=[])
        os.close(SERVER_FD)

    def adopt(self) -> None:
        """Learn the process id of the server that runs."""
        with suppress(OSError), connect(self.address, GRACE) as connection:  # else end_server() asks
            self.pid = peer_pid(connection)

    def end_with_last_user(self) -> None:
        """Wait until nobody uses the server, then end it."""
        while True:
            # Only a signal, given back at once: a newcomer may wait for `users` while it holds `lock`.
            fcntl.flock(self.users, fcntl.LOCK_EX)
            fcntl.flock(self.users, fcntl.LOCK_UN)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            if try_lock(self.users, fcntl.LOCK_EX):
                break
            fcntl.flock(self.lock, fcntl.LOCK_UN)
        deadline = time.monotonic() + GRACE
        pid = end_server(self.address, self.pid, leads_to(os.path.join(self.folder, LOCK), self.lock))
        time.sleep(max(0.0, deadline - time.monotonic()))  # the main thread leaves as soon as the server is gone
        print(f"headrace: the server (process {pid}) did not end within {GRACE:g} s and is killed", flush=True)
        kill(pid, signal.SIGKILL)
        time.sleep(GRACE)
        os._exit(1)  # out of reach: at least the locks are free again

    def wait_for_server(self) -> None:
        """Return when the server is gone, whoever ended it."""
        fcntl.flock(self.server, fcntl.LOCK_EX)
        with suppress(ChildProcessError):  # an adopted one
            os.waitpid(self.pid or -1, 0)


def _close_others(last: int) -> None:
    for fd in map(int, os.listdir("/dev/fd")):
        if fd > last:
            with suppress(OSError):  # the one that listed them
                os.close(fd)


def main(folder: str, address: str, *words: str) -> None:
    _close_others(SERVER_FD if words else KEEPER_FD)
    os.set_inheritable(KEEPER_FD, False)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # it ends with the server; a signal to the whole group must not part them
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.umask(0o077)
    os.chdir(folder)
    keeper = Keeper(folder, address)
    if words:
        keeper.start(list(words))
    else:
        keeper.adopt()
    threading.Thread(target=keeper.end_with_last_user, daemon=True).start()
    keeper.wait_for_server()
    os._exit(0)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError as error:
        print(f"headrace: cannot start {sys.argv[3] if len(sys.argv) > 3 else 'the keeper'}: {error}", flush=True)
        os._exit(1)
