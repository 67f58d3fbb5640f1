"""Which keys were met before, of any number of them, in flat memory: from some thousands on they stand in a file."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import sqlite3

IN_MEMORY: Final = 65_536  # keys; a set of so many takes 7 MB
CACHE_KIB: Final = 4096


class SeenKeys:
    """`add` says whether a key is new. The file is a temporary one of SQLite's, and goes with the process; where there
    is no SQLite, or no room, everything stands in memory."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._in_memory = in_memory
        self._some: set[bytes] = set()
        self._file: sqlite3.Connection | None = None

    def add(self, key: bytes) -> bool:
        if key in self._some:
            return False
        if len(self._some) >= self._in_memory:
            with suppress(ImportError, OSError):
                return self._add_to_file(key)
        self._some.add(key)
        return True

    def _add_to_file(self, key: bytes) -> bool:
        import sqlite3

        try:
            if self._file is None:
                self._file = sqlite3.connect("", isolation_level=None, check_same_thread=False)
                self._file.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
                self._file.execute("PRAGMA journal_mode = OFF")
                self._file.execute("CREATE TABLE seen (key BLOB PRIMARY KEY) WITHOUT ROWID")
                self._file.execute("BEGIN")  # for good: nothing of it is ever to be durable
            return self._file.execute("INSERT OR IGNORE INTO seen VALUES (?)", (key,)).rowcount == 1
        except sqlite3.Error as error:
            raise OSError(str(error)) from error
