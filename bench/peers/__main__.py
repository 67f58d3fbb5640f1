"""`python -m bench.peers [NAME ...]`: an environment for each peer, in bench/.venv-peers."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]
FOLDER = BENCH / ".venv-peers"


def requirements() -> dict[str, list[str]]:
    """By the name in the comment behind each line; `all` goes to everybody."""
    found: dict[str, list[str]] = {}
    for line in (BENCH / "requirements.txt").read_text().splitlines():
        requirement, _, name = line.partition("#")
        if requirement.strip():
            found.setdefault(name.strip(), []).append(requirement.strip())
    return found


def main() -> int:
    wanted = requirements()
    common = wanted.pop("all")
    failed = 0
    for name in sys.argv[1:] or list(wanted):
        if name not in wanted:
            known = ", ".join(wanted)
            print(f"bench.peers: {name} is not in bench/requirements.txt; there are {known}", file=sys.stderr)
            return 2
        place = FOLDER / name
        print(f"{name}: {place}", flush=True)
        venv.create(place, clear=True, with_pip=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        failed |= subprocess.run([*pip, *wanted[name], *common], check=False).returncode
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
