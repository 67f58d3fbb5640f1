"""The note beside an output file while its run is not complete: which batch it belongs to.

Task ids are made of the batch and the `custom_id`, so the run that goes on after a crash finds its tasks in Redis. A
batch id made of the path would do on one machine, but not where several share a Redis and name their outputs alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from broker.errors import UsageError

SUFFIX: Final = ".resume"
_BATCH: Final = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class ResumeNote:
    """`batch`: 12 hex digits; `pool` and `redis`: where its tasks are; `resumed`: an earlier run left the note."""

    path: Path | None
    batch: str
    pool: str
    redis: str
    resumed: bool = False

    @classmethod
    def open(cls, output: Path) -> ResumeNote:
        """The note of `output`, or a fresh one, not written yet. Nothing but a regular file has a note."""
        fresh = secrets.token_hex(6)
        output = Path(os.path.realpath(output))  # /dev/stdout may be a file of the shell's
        if not output.is_file():
            return cls(None, fresh, "", "")
        path = output.with_name(output.name + SUFFIX)
        if told := _read(path):
            return cls(path, told["batch"], str(told.get("pool", "")), str(told.get("redis", "")), resumed=True)
        return cls(path, fresh, "", "")

    @property
    def kept(self) -> bool:
        """Whether the same command can go on where this run ends."""
        return self.path is not None

    def write(self, pool: str, redis: str) -> None:
        """Stands on the disk when this returns. Raises UsageError."""
        if self.path is None:
            return
        text = json.dumps({"batch": self.batch, "pool": pool, "redis": redis}) + "\n"
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            with fresh.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self.path)
        except OSError as error:
            raise UsageError(
                f"{self.path}: {error.strerror}; a run keeps a note there until it is complete: choose another output"
            ) from None

    def remove(self) -> None:
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


def note_stands(path: str, batch: str) -> bool:
    """Whether there is a note at `path`, of this batch: its run may yet go on."""
    return bool(path) and _read(Path(path)).get("batch") == batch


def _read(path: Path) -> dict[str, Any]:
    """The note; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        told = json.loads(path.read_bytes())
        if isinstance(told, dict) and _BATCH.fullmatch(str(told.get("batch"))):
            return told
    return {}
