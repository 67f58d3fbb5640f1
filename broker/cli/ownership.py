"""Whose package `broker` is: another distribution on PyPI installs one of that name, too."""

from __future__ import annotations

import os
from importlib import metadata

import broker

OURS = "headrace"


def is_ours() -> bool:
    """A look at the package that was imported; costs nothing."""
    return hasattr(broker, "_HOMES") and hasattr(broker, "__version__")


def owners() -> list[str]:
    """Names of the installed distributions that hold a file `broker/__init__.py`. Reads every file list: slow."""
    found = set()
    for distribution in metadata.distributions():
        for file in distribution.files or ():
            if file.parts[:1] == ("broker",) and file.name == "__init__.py" and len(file.parts) == 2:
                found.add(str(distribution.metadata["Name"]))
    return sorted(found)


def explain() -> str:
    """One line with the remedy if the package is not, or not only, ours; else ""."""
    others = [name for name in owners() if name.lower() != OURS]
    where = os.path.dirname(getattr(broker, "__file__", None) or "?")
    if others:
        names = ", ".join(others)
        return (
            f"the package `broker` at {where} also belongs to {names}: uninstall that (pip uninstall {others[0]}) and "
            "install headrace again, or give each a virtual environment of its own"
        )
    if not is_ours():
        return f"the package `broker` at {where} is not headrace's: run headrace from another folder or environment"
    return ""
