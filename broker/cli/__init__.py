"""The command `headrace`. Exit codes: 0 done, 1 some tasks failed, 2 usage, 3 configuration, 4 Redis.

Each verb is a module, imported when it runs: `headrace --version` needs neither redis nor asyncio.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

BROKEN_PIPE = 141  # as a shell reports SIGPIPE
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `argv` is without the program's name, None takes the process's. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["--version"], ["-V"]):
        from broker import __version__

        sys.stdout.write(f"headrace {__version__}\n")
        return 0
    try:
        code = _guarded(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough, as in `headrace dead list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return BROKEN_PIPE
    except KeyboardInterrupt:
        sys.stderr.write("headrace: interrupted\n")
        return INTERRUPTED


def _guarded(words: Sequence[str]) -> int:
    from broker.cli.ownership import explain, is_ours

    if not is_ours():
        sys.stderr.write(f"headrace: {explain()}\n")
        return 2
    try:
        return _run(words)
    except (ImportError, AttributeError) as error:
        if _verbose(words):
            raise
        owner = explain()
        sys.stderr.write(f"headrace: {owner or f'{type(error).__name__}: {error}; run it with -v for the traceback'}\n")
        return 2


def _run(words: Sequence[str]) -> int:
    from broker.errors import HeadraceError, unforeseen

    try:
        from broker.cli.parser import parse

        args = parse(words)
        code: int = args.verb(args)
        return code
    except HeadraceError as error:
        if _verbose(words):
            import traceback

            traceback.print_exc()
        _say_error(str(error))
        return error.exit_code
    except BrokenPipeError:
        raise
    except Exception as error:
        if _verbose(words):
            raise
        _say_error(f"{unforeseen(error)}, run it with -v for the traceback")
        return 1


def _say_error(text: str) -> None:
    from broker.logs import escape

    for line in text.splitlines() or [""]:
        sys.stderr.write(f"headrace: {escape(line)}\n")


def _verbose(words: Sequence[str]) -> bool:
    return any(word in ("--verbose", "-v", "-vv") for word in words)
