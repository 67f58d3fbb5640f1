"""`headrace bench`: the measurements of `bench/`, which are part of a checkout and not of the wheel."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import broker
from broker.errors import UsageError


def bench(args: argparse.Namespace) -> int:
    """Becomes `python -m bench`, so that a signal finds the one process that has servers to end."""
    root = Path(broker.__file__).resolve().parent.parent
    if not (root / "bench" / "__main__.py").is_file():
        raise UsageError("no bench/ here: it is part of the repository, so run `make bench` in a checkout of it")
    os.chdir(root)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "bench", *args.words])
