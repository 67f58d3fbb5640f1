"""`headrace worker` with a fault in it: reading a configuration whose text has the word `stumble` is a ValueError that
nobody foresaw, with a secret in its text.
"""

from __future__ import annotations

import sys
from pathlib import Path

from broker import config
from broker.cli import main
from broker.configfile import Findings, Node

_read = config.read_file  # type: ignore[attr-defined]


def _stumble(path: Path, findings: Findings) -> Node:
    found: Node = _read(path, findings)
    if "stumble" in path.read_text():
        int("hunter2")
    return found


if __name__ == "__main__":
    config.read_file = _stumble  # type: ignore[attr-defined]
    raise SystemExit(main(sys.argv[1:]))
