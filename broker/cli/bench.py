"""`headrace bench`: the measurements of `bench/`, which are part of a checkout and not of the wheel."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import broker
from broker.errors import UsageError


def bench(args: argparse.Namespace) -> int:
    root = Path(broker.__file__).resolve().parent.parent
    if not (root / "bench" / "__main__.py").is_file():
        raise UsageError("no bench/ here: it is part of the repository, so run `make bench` in a checkout of it")
    return subprocess.run([sys.executable, "-m", "bench", *args.words], cwd=root).returncode
