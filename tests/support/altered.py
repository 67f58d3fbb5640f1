"""`headrace worker` whose processes are the product's own but for one change, made before their entry point runs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

CHILD = "child"


def run(module: str, alter: Callable[[], object]) -> int:
    """The main program of `module`: as the supervisor with the command's arguments, and as each process it starts."""
    if sys.argv[1:2] == [CHILD]:
        from workers.process import main

        alter()
        return main()
    return _supervise(module, sys.argv[1:])


def _supervise(module: str, arguments: list[str]) -> int:
    from broker.cli import main

    start = asyncio.create_subprocess_exec

    async def start_altered(program: str, *words: str, **options: Any) -> asyncio.subprocess.Process:
        at = words.index("-m")
        return await start(program, *words[:at], "-m", module, CHILD, *words[at + 1 :], **options)

    asyncio.create_subprocess_exec = start_altered  # type: ignore[assignment]
    return main(arguments)
