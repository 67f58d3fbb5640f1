"""`headrace worker` whose idle processes never look by themselves: what they claim, something told them of.

The processes are the product's own; only how they are started differs: this module stretches their idle poll to an hour
before it runs their entry point.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

CHILD = "child"


def _supervise(arguments: list[str]) -> int:
    from broker.cli import main

    start = asyncio.create_subprocess_exec

    async def start_deaf(program: str, *words: str, **options: Any) -> asyncio.subprocess.Process:
        module = words.index("-m")
        return await start(program, *words[:module], "-m", __spec__.name, CHILD, *words[module + 1 :], **options)

    asyncio.create_subprocess_exec = start_deaf  # type: ignore[assignment]
    return main(arguments)


def _live() -> int:
    from workers import dispatch, process

    dispatch.POLL_S = (3600.0, 3600.0)  # type: ignore[misc]
    return process.main()


if __name__ == "__main__":
    raise SystemExit(_live() if sys.argv[1:2] == [CHILD] else _supervise(sys.argv[1:]))
