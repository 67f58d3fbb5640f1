"""Keys that were met before, of any number of them, in flat memory: from some thousands on they stand in a file."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import sqlite3

IN_MEMORY: Final = 65_536  # keys; a set of so many takes 7 MB, a dict with digests 13 MB
CACHE_KIB: Final = 4096


class KeptKeys:
    """Keys and what is kept for each. The file is a temporary one of SQLite's, and goes with the process; where there
    is no SQLite, or no room, everything stands in memory."""

    def __init__(self, in_memory: int | None = None) -> None:
        self._in_memory = IN_MEMORY if in_memory is None else in_memory
        self._some: dict[bytes, bytes] = {}
        self._file: sqlite3.Connection | None = None
        self._in_file = 0

    def __len__(self) -> int:
        return len(self._some) + self._in_file

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) is not None

    def __setitem__(self, key: bytes, value: bytes) -> None:
        if key not in self._some and (self._in_file or len(self._some) >= self._in_memory):
            with suppress(ImportError, OSError):
                new = self._insert(key, value)
                self._in_file += new
                if not new:
                    self._run("UPDATE kept SET value = ? WHERE key = ?", value, key)
                return
        self._some[key] = value

    def get(self, key: bytes) -> bytes | None:
        """None if it was never met."""
        value = self._some.get(key)
        if value is None and self._in_file:
            row = self._run("SELECT value FROM kept WHERE key = ?", key).fetchone()
            return None if row is None else bytes(row[0])
        return value

    def add(self, key: bytes, value: bytes = b"") -> bool:
        """Whether it is new; what is kept for one that is not stays as it was."""
        if key in self._some:
            return False
        if self._in_file or len(self._some) >= self._in_memory:
            with suppress(ImportError, OSError):
                new = self._insert(key, value)
                self._in_file += new
                return bool(new)
        self._some[key] = value
        return True

    def _insert(self, key: bytes, value: bytes) -> int:
        return int(self._run("INSERT OR IGNORE INTO kept VALUES (?, ?)", key, value).rowcount)

    def _run(self, statement: str, *values: bytes) -> sqlite3.Cursor:
        import sqlite3

        try:
            if self._file is None:
                self._file = _temporary(sqlite3)
            return self._file.execute(statement, values)
        except sqlite3.Error as error:
            raise OSError(str(error)) from error


def _temporary(module: Any) -> sqlite3.Connection:
    file: sqlite3.Connection = module.connect("", isolation_level=None, check_same_thread=False)
    file.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    file.execute("PRAGMA journal_mode = OFF")
    file.execute("CREATE TABLE kept (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
    file.execute("BEGIN")  # for good: nothing of it is ever to be durable
    return file
