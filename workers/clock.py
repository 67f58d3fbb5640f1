"""The server's time, as a process can tell it without asking: the machine's own clock may be wrong, or jump."""

from __future__ import annotations

import time
from typing import Any, Final

STALE_S: Final = 1.0  # a reply that took longer says little: this process, the link or the server stood still


class ServerClock:
    """Unix seconds of the server's last word, and what the monotonic clock has counted since. From any thread.

    Until the first word it is the machine's clock.
    """

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()
        self._heard = False

    def heard(self, reply: Any, asked: float) -> None:
        """The reply of TIME, seconds and microseconds, to a question of `asked`, by the monotonic clock."""
        now = time.monotonic()
        if now - asked > STALE_S and self._heard:
            return
        self._heard = True
        seconds, micros = reply
        self._ahead = int(seconds) + int(micros) / 1e6 - now

    def now(self) -> float:
        return time.monotonic() + self._ahead
