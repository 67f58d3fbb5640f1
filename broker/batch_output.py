"""The output file of a batch run: whole lines only, one writer at a time, and resumable after any kind of end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Literal, Self

from broker.batch import LINE_ID, TASK_ID, BadLine, BatchTask, custom_id_key
from broker.errors import HeadraceError, UsageError
from broker.seenkeys import KeptKeys

SYNC_BYTES: Final = 4_194_304
SYNC_SECONDS: Final = 1.0

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "it may not grow further",
    errno.EPIPE: "nobody reads it any more",
}


@dataclass(slots=True)
class Done:
    """What an output file already holds; of many lines it stands in a file.

    tasks       16-byte key of each custom_id (`batch.custom_id_key`) -> the digest its line's id carries, as bytes;
                b"" where another program wrote the id
    lines       digests of the input lines that were no tasks
    errors      how many lines carry an error
    end         bytes of whole lines; what follows is torn
    torn        bytes after `end`
    unfinished  the last line is whole but lacks its line end
    """

    tasks: KeptKeys = field(default_factory=KeptKeys)
    lines: KeptKeys = field(default_factory=KeptKeys)
    errors: int = 0
    end: int = 0
    torn: int = 0
    unfinished: bool = False

    def __len__(self) -> int:
        return len(self.tasks) + len(self.lines)

    def look(self, item: BatchTask | BadLine) -> Literal["new", "done", "changed"]:
        """Whether the item's line stands here; 'changed' if one does under its custom_id, for another request."""
        digest = _digest_of(item.line_id)
        if digest in self.lines:
            return "done"
        if isinstance(item, BadLine):
            return "new"
        earlier = self.tasks.get(custom_id_key(item.custom_id))
        if earlier is None:
            return "new"
        return "done" if earlier in (digest, b"") else "changed"


def read_done(path: str | os.PathLike[str], *, repair: bool = False) -> Done:
    """What stands in the output file `path`; nothing if there is no such file.

    A torn last line is left out, and with `repair` cut off. Raises UsageError, naming file and line, if the file holds
    anything but batch output: it is somebody's, and must not be written to.
    """
    try:
        with open(path, "rb") as file:
            done = _read(file, os.fspath(path))
    except FileNotFoundError:
        return Done()
    except OSError as error:
        raise UsageError(f"{os.fspath(path)}: {error.strerror}; choose another output file") from None
    if repair:
        _repair(path, done)
    return done


def _read(file: BinaryIO, name: str) -> Done:
    done = Done()
    for number, line in enumerate(file, 1):
        whole = line.endswith(b"\n")
        record = _record(line)
        if record is None:
            if whole and line.strip():
                raise UsageError(f"{name}:{number}: not a line of batch output; choose another output file")
            if not whole:
                done.torn = len(line)
                break
        else:
            _note(done, record)
        done.end += len(line)
        done.unfinished = not whole
    return done


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        return None
    if "response" not in record and "error" not in record:
        return None
    return record if isinstance(record.get("custom_id"), str | None) else None


def _note(done: Done, record: dict[str, Any]) -> None:
    line_id, custom_id = record["id"], record.get("custom_id")
    if record.get("error") is not None:
        done.errors += 1
    if line_id.startswith(LINE_ID):
        done.lines.add(_digest_of(line_id))
    elif custom_id is not None:
        done.tasks[custom_id_key(custom_id)] = _digest_of(line_id)


def _digest_of(line_id: str) -> bytes:
    for prefix in (TASK_ID, LINE_ID):
        if line_id.startswith(prefix):
            try:
                return bytes.fromhex(line_id.removeprefix(prefix))
            except ValueError:
                return b""
    return b""


def _repair(path: str | os.PathLike[str], done: Done) -> None:
    if done.torn:
        os.truncate(path, done.end)
        done.torn = 0
    if done.unfinished:
        with open(path, "ab") as file:
            file.write(b"\n")
        done.end, done.unfinished = done.end + 1, False


class OutputFile:
    """Appends whole lines to `path`, for one run at a time. Use it as a context manager.

    Opening it takes a lock, reads what is `done`, and cuts off a torn last line. `source`, if given, is the input file,
    which must be another one. Raises UsageError: the same file, in use by another run, or not batch output. A path that
    is not a regular file (a pipe, /dev/null) is written to and never read.

    A full disk raises HeadraceError, and the file ends with its last whole line.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        source: str | os.PathLike[str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        self.done = Done()
        self._clock = clock
        self._refuse_source(source)
        self._fd = self._open()
        self._regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        try:
            if self._regular:
                self._lock()
                self.done = read_done(self.path, repair=True)
                self._keep_name()
        except BaseException:
            os.close(self._fd)
            raise
        self._end = self.done.end
        self._synced_end, self._synced_at = self._end, clock()

    def append(self, lines: Iterable[bytes]) -> bool:
        """Writes the lines, each with its line end. True once all that was ever appended is safe on the disk.

        That happens in steps, every 4 MiB or second; call `sync` to have it now.
        """
        self._write(b"".join(lines))
        due = self._clock() - self._synced_at >= SYNC_SECONDS or self._end - self._synced_end >= SYNC_BYTES
        if due:
            self.sync()
        return self._synced_end == self._end

    def sync(self) -> None:
        """Returns when all that was appended is safe on the disk."""
        if self._regular and self._synced_end != self._end:
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise self._failed(error) from None
        self._synced_end, self._synced_at = self._end, self._clock()

    def close(self) -> None:
        """Syncs, closes, and lets the next run in. Harmless when repeated."""
        if self._fd < 0:
            return
        fd = self._fd
        try:
            self.sync()
        finally:
            self._fd = -1
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_source(self, source: str | os.PathLike[str] | None) -> None:
        if source is None:
            return
        try:
            same = os.path.samefile(source, self.path)
        except OSError:
            return
        if same:
            raise UsageError(f"{self.path}: is the input file as well; choose another output file")

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"{self.path}: {error.strerror}; choose another output file") from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.path}: another run is writing it; wait for its end or choose another") from None
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be locked ({error.strerror}); choose another place") from None

    def _keep_name(self) -> None:
        """A new file's name must be on the disk too, or a power cut takes the file with all that was synced."""
        with contextlib.suppress(OSError):  # some file systems cannot; they need not
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._cut()
            raise self._failed(error) from None
        self._end += len(data)

    def _cut(self) -> None:
        """Back to the last whole line, as far as the disk lets us; the next run does it otherwise."""
        if self._regular:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)

    def _failed(self, error: OSError) -> HeadraceError:
        why = _FULL.get(error.errno or 0, f"cannot be written ({error.strerror})")
        if not self._regular:
            return HeadraceError(f"{self.path}: {why}; what is not written is dropped, since this is no file")
        return HeadraceError(
            f"{self.path}: {why}; nothing is lost, the results stay in Redis: make room and run the same command again"
        )
