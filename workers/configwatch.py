"""The configuration file, watched: read again when it has changed and holds still, so that no half of it is taken."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from broker.configmodel import Config
from broker.errors import ConfigError, Problem

STILL_S: Final = 0.2  # a file that did not change for so long is written
STILL_WITHIN_S: Final = 10.0

Stamp = tuple[int, int, int]


class ConfigFile:
    """The file at `path`, and `read`, which loads it. Make it before the first reading, so that no change is missed."""

    def __init__(self, path: Path, read: Callable[[], Config]) -> None:
        self.path = path
        self._read = read
        self._taken = self._stamp()

    def is_new(self) -> bool:
        """It is not as it was when it was last read: written, replaced, gone or back."""
        return self._stamp() != self._taken

    def load(self) -> Config:
        """Reads it once it holds still; call it in a thread. Raises ConfigError."""
        end = time.monotonic() + STILL_WITHIN_S
        while time.monotonic() < end:
            before = self._stamp()
            time.sleep(STILL_S)
            if self._stamp() != before:
                continue
            self._taken = before
            failure: ConfigError | None = None
            try:
                config = self._read()
            except ConfigError as error:
                failure = error
            if self.is_new():
                continue
            if failure is not None:
                raise failure
            return config
        message = f"keeps changing for {STILL_WITHIN_S:g} s; is something writing to it?"
        raise ConfigError([Problem(str(self.path), None, "", message)])

    def _stamp(self) -> Stamp | None:
        """None: there is no file."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
