"""One script of `lua/` and one call of it. What a verb takes and answers is in `scripts` and `adminscripts`."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Generic, TypeVar

from broker.keys import Keys

T = TypeVar("T")

VERBS = (
    "enqueue", "claim", "renew", "finish", "retry", "release", "dead_letter", "promote", "reap", "expire", "cancel",
    "redrive", "purge", "watch", "leave", "register", "health", "drain", "reset", "ticket", "scrub", "retire",
    "restore",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Script:
    """Source of one verb and its SHA-1, as EVALSHA wants it."""

    name: str
    source: str
    sha: str


@dataclass(frozen=True, slots=True)
class Command(Generic[T]):
    """One call of one script: `key` routes it in a cluster, `parse` turns the reply into T."""

    script: Script
    key: str
    args: Sequence[str | bytes | int]
    parse: Callable[[Any], T]


@cache
def _part(name: str) -> str:
    return resources.files("broker").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


def _header(part: str, word: str) -> list[str]:
    line = re.search(rf"^-- {word}: (.*)$", _part(part), re.M)
    return line.group(1).split(", ") if line is not None else []


def _with_needs(parts: Sequence[str], before: Sequence[str]) -> list[str]:
    """The parts and what they need, each once and behind what it needs, without what stands before already."""
    found: list[str] = []
    for part in parts:
        if part not in before and part not in found:
            found += _with_needs(_header(part, "needs"), [*before, *found])
            found.append(part)
    return found


def _rarely(parts: Sequence[str]) -> str:
    """`rarely()`: a table of the functions of these parts, made at its first call."""
    source = "\n".join(_part(part) for part in parts)
    names = re.findall(r"^local function (\w+)", source, re.M)
    table = ", ".join(f"{name} = {name}" for name in names)
    first = "local made\nlocal function rarely()\nif made then return made end"
    return f"{first}\n{source}\nmade = {{{table}}}\nreturn made\nend"


@cache
def load(verb: str, clock_key: str = "") -> Script:
    """The verb's script: common.lua, the parts that it and they need, what is needed rarely as one function, the verb.

    clock_key  for tests: the scripts read the time, in milliseconds, from this key instead of asking the server.
    """
    parts = ["common", *_with_needs(_header(verb, "needs"), ["common"])]
    texts = [_part(part) for part in parts]
    if rare := _with_needs(_header(verb, "rarely"), parts):
        texts.append(_rarely(rare))
    # A script makes its functions anew at each call, half of what a call for one task costs. What one uses of those
    # around it is looked for among all that is used so, but in the function around it first: so the verb is one, and
    # what it needs rarely another.
    source = "\n".join([*texts, "local function verb()", _part(verb), "end", "return verb()"])
    if clock_key:
        source = source.replace(
            "local time = call('TIME')", f"do return tonumber(call('GET', '{clock_key}')) end local time = call('TIME')"
        )
    return Script(verb, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def in_ms(seconds: float) -> int:
    """Rounded up: a moment is not nothing, 0 means none."""
    return max(0, math.ceil(seconds * 1000))


def as_text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def as_words(reply: Any) -> list[Any]:
    return [as_text(word) for word in reply]


class Builder:
    """Makes commands under one key prefix. `clock_key`: see `load`."""

    def __init__(self, keys: Keys, clock_key: str = "") -> None:
        self.keys = keys
        self._clock_key = clock_key

    def all(self) -> list[Script]:
        return [load(verb, self._clock_key) for verb in VERBS]

    def _command(
        self, verb: str, pool: str, args: Sequence[str | bytes | int], parse: Callable[[Any], T]
    ) -> Command[T]:
        script = load(verb, self._clock_key)
        return Command(script, self.keys.pool(pool), [self.keys.prefix, pool, *args], parse)
