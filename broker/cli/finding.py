"""What `headrace doctor` says: one line, what, where, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Word = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`exit_code` is what a failure means to the command."""

    word: Word
    what: str
    text: str
    exit_code: int = 1
