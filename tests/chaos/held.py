"""`headrace worker` whose processes hold their event loop still on SIGUSR1, as a bad callback would.

The signal's handler runs in the main thread: the loop stands still while other threads go on.
"""

from __future__ import annotations

import os
import signal
import time

from tests.support import altered

VARIABLE = "CHAOS_HOLD_S"


def _hold(number: int, frame: object) -> None:
    time.sleep(float(os.environ[VARIABLE]))


if __name__ == "__main__":
    raise SystemExit(altered.run(__spec__.name, lambda: signal.signal(signal.SIGUSR1, _hold)))
