"""`headrace worker` whose processes hold their event loop still on SIGUSR1, as a bad callback would.

The processes are the product's own; only how they are started differs: this module sets a signal handler before it
runs their entry point. It runs in the main thread: the loop stands still while other threads go on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

VARIABLE = "CHAOS_HOLD_S"
CHILD = "child"


def _hold(number: int, frame: object) -> None:
    time.sleep(float(os.environ[VARIABLE]))


def _supervise(arguments: list[str]) -> int:
    from broker.cli import main

    start = asyncio.create_subprocess_exec

    async def start_held(program: str, *words: str, **options: Any) -> asyncio.subprocess.Process:
        module = words.index("-m")
        return await start(program, *words[:module], "-m", __spec__.name, CHILD, *words[module + 1 :], **options)

    asyncio.create_subprocess_exec = start_held  # type: ignore[assignment]
    return main(arguments)


def _live() -> int:
    from workers.process import main

    signal.signal(signal.SIGUSR1, _hold)
    return main()


if __name__ == "__main__":
    raise SystemExit(_live() if sys.argv[1:2] == [CHILD] else _supervise(sys.argv[1:]))
