"""`python -m bench.pin CORES COMMAND ...`: runs a command on these cores (`0`, `0,1`, `any`), as this very process."""

from __future__ import annotations

import os
import sys


def main() -> None:
    cores, *words = sys.argv[1:]
    if cores != "any":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
