"""Logs of a command or a worker process: one line a record on standard error, as text or as JSON.

Control characters are written as escapes, so that no text of a user can forge a line or drive a terminal.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

ROOT: Final = "headrace"
MAX_MESSAGE_CHARS: Final = 4000

# C0 and C1 controls, line and paragraph separators, marks that turn the direction of text, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape(text: str) -> str:
    """The text on one line, what is not printable as `\\n`, `\\x1b`, `\\u2028`."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class TextFormatter(logging.Formatter):
    """`12:00:01 WARNING dispatch: message`, by local time; a traceback follows line by line."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix(f"{ROOT}.")
        line = f"{clock} {record.levelname} {name}: {escape(_message(record))}"
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "".join(f"\n  {escape(part)}" for part in trace.splitlines())
        return line


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "message", "pid"}`, and `exception` if there is one. Times in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            "pid": record.process,
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)  # ASCII, so nothing is left to escape


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}... ({len(text)} characters)"


def set_up(level: str = "info", format: str = "text", stream: TextIO | None = None) -> logging.Handler:
    """Headrace's logs at `level`, other libraries' from warnings on. Called again, it replaces what it set up.

    level   debug, info, warning or error
    format  text or json
    stream  None takes standard error
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.set_name(ROOT)
    root = logging.getLogger()
    for earlier in [each for each in root.handlers if each.get_name() == ROOT]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(level.upper())
    return handler
