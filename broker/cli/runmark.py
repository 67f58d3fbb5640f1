"""Marks of runs that have a pool of their own on the embedded server, so that later runs can clear up after dead ones.

A mark is a file `runs/<batch>` in the data folder. A run holds its flock while it lives, however it dies; in it stands
where the run's resume note is. A pool is cleared away when nobody holds its mark and no such note stands any more: then
no command can ever go on with it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from broker.cli.resume import ResumeNote, note_stands
from broker.keeper import leads_to, open_lock, try_lock
from broker.launch import drop, keep

FOLDER: Final = "runs"
MOST_PATH: Final = 65_536  # bytes


@contextmanager
def marked(data_dir: Path, note: ResumeNote) -> Iterator[Path]:
    """Holds the mark of a run for the block; its path. Remove the file once the run's pool is gone. Raises OSError."""
    path = data_dir / FOLDER / note.batch
    path.parent.mkdir(exist_ok=True)
    fd = _hold(path)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, os.fsencode(note.path or ""), 0)
        yield path
    finally:
        drop(fd)


def _hold(path: Path) -> int:
    while True:
        fd = keep(open_lock(str(path)))
        fcntl.flock(fd, fcntl.LOCK_EX)  # at most for the moment in which another run looks at it
        if leads_to(str(path), fd):
            return fd
        drop(fd)


@contextmanager
def dead_runs(mark: Path) -> Iterator[dict[str, Path]]:
    """Batches beside `mark` that neither live nor can be gone on with; their marks, which are held for the block."""
    found: dict[str, Path] = {}
    with ExitStack() as stack:
        for path in sorted(mark.parent.glob("[0-9a-f]" * 12)):
            fd = keep(open_lock(str(path)))
            stack.callback(drop, fd)
            if not try_lock(fd, fcntl.LOCK_EX) or not leads_to(str(path), fd):
                continue
            if note_stands(os.fsdecode(os.pread(fd, MOST_PATH, 0)), path.name):
                fcntl.flock(fd, fcntl.LOCK_UN)  # its run may be about to go on
            else:
                found[path.name] = path
        yield found
