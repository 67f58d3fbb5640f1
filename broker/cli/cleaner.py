"""Removes a folder once whoever started this is gone, however it went: `python -I -S cleaner.py FOLDER`.

It waits for the end of its standard input, a pipe whose other end its starter holds. A folder that is gone already is
fine. The embedded server in it is no hindrance: its keeper sees to that.
"""

from __future__ import annotations

import os
import shutil
import sys
import time

PATIENCE_S = 30.0  # processes that end now may still write


def main(folder: str) -> None:
    while os.read(0, 4096):
        pass
    end = time.monotonic() + PATIENCE_S
    while os.path.lexists(folder) and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
