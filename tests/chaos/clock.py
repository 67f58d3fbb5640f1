"""A wall clock that is wrong: libfaketime, preloaded into a fleet, reads from a file how far it is off."""

from __future__ import annotations

import os
from pathlib import Path

PLACES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib*/faketime/libfaketimeMT.so.1")


class MissingFaketime(Exception):
    """It is not on this machine; the message says what to install."""


def library() -> Path:
    """Raises MissingFaketime."""
    for place in PLACES:
        for found in Path("/").glob(place.lstrip("/")):
            return found
    raise MissingFaketime("no libfaketime; on Debian and Ubuntu: apt install libfaketime")


class WrongClock:
    """`env` for the processes that go by it. The monotonic clock stays true."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.off_by(0)
        self.env = {
            "LD_PRELOAD": str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_CACHE_DURATION": "1",  # seconds: the file is not read at each look at a clock
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",  # its name in older releases
        }

    def off_by(self, seconds: float) -> None:
        """Within a second, for all that run by it."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+.0f}s\n")
        os.replace(new, self._file)
