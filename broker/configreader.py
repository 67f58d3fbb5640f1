"""Typed reading of one mapping: every wrong value becomes a Problem and reads as its default, so reading goes on."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from broker.configfile import Findings, Node
from broker.durations import format_seconds, format_size, parse_seconds, parse_size
from broker.errors import InvalidTask
from broker.quoting import quoted, unknown_key
from broker.secret import Secret
from broker.task import check_names

MAX_SECRET_FILE_BYTES = 1 << 16

# Words from other systems (and likely slips) that no edit distance would find.
_OTHER_WORDS = {
    "workers": "endpoints", "servers": "endpoints", "urls": "endpoints", "name": "id", "base_url": "url",
    "concurrency": "max_concurrent", "slots": "max_concurrent", "max_concurrency": "max_concurrent",
    "max_retries": "max_attempts", "failure_threshold": "failures", "threshold": "failures",
    "recovery_timeout": "cooldown", "success_threshold": "half_open_successes", "circuit_breaker": "breaker",
    "health_check": "health", "health_monitoring": "health", "token": "api_key", "type": "adapter",
    "total": "attempt", "read": "idle", "request": "attempt", "ttl": "result_ttl", "dsn": "url", "bind": "host",
}  # fmt: skip


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or the list of what is known here."""
    names = sorted(known)
    wanted = name.lower().replace("-", "_").replace(" ", "_")
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.6)
    best = close[0] if close else _OTHER_WORDS.get(wanted)
    return f"; did you mean {best!r}?" if best in names else f"; known here: {', '.join(names)}"


def tell_unknown(
    findings: Findings, parent: Node, name: str, child: Node, known: Iterable[str], asked: str | None = None
) -> None:
    """An unknown key. Its name is told only where it can be no secret. `asked`: the name without its unit."""
    names = tuple(known)
    meant = did_you_mean(name if asked is None else asked, names)
    step, hint = unknown_key(name, names, close="did you mean" in meant, empty=child.value is None)
    key = f"{parent.key}.{step}" if parent.key else step
    findings.problem(child, f"unknown key{hint or meant}", key=key)


class Section:
    """A mapping of known keys. A missing key, or one with an empty value, is unset: getters give the default."""

    def __init__(self, node: Node | None, known: Sequence[str], findings: Findings, base: Path) -> None:
        self.findings, self.base, self.known = findings, base, known
        self.node = node if node is not None else Node({}, "", "")
        self.entries: dict[str, Node] = {}
        if isinstance(self.node.value, dict):
            self.entries = self.node.value
        elif self.node.value is not None:
            findings.problem(self.node, f"must be a mapping of keys to values, not {self.node.kind()}")
        for name, child in self.entries.items():
            if name not in known:
                tell_unknown(findings, self.node, name, child, known)

    def get(self, name: str) -> Node | None:
        child = self.entries.get(name)
        return None if child is None or child.value is None or child.broken else child

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def given(self, name: str) -> bool:
        """Present in any way, be it broken: what to ask before calling a key missing."""
        child = self.entries.get(name)
        return child is not None and (child.broken or child.value is not None)

    def section(self, name: str, known: Sequence[str]) -> Section:
        return Section(self.get(name), known, self.findings, self.base)

    def problem(self, name: str, message: str) -> None:
        """At the key if it is there, else at the mapping that should have it."""
        self.findings.problem(self.entries.get(name, self.node), message, key=self.node.child_key(name))

    def text(self, name: str, default: str) -> str:
        node = self.get(name)
        if node is None:
            return default
        if not isinstance(node.value, str):
            self.findings.problem(node, f"must be text, not {node.kind()}")
            return default
        return node.value

    def identifier(self, name: str) -> str | None:
        """Text, or a number taken as it was written."""
        node = self.get(name)
        if node is None:
            return None
        if isinstance(node.value, (dict, list)):
            self.findings.problem(node, f"must be text, not {node.kind()}")
            return None
        return node.value if isinstance(node.value, str) else node.raw

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        node = self.get(name)
        if node is None:
            return default
        if isinstance(node.value, str) and node.value.lower() in allowed:
            return node.value.lower()
        self.findings.problem(node, f"must be one of {', '.join(allowed)}, not {node.show()}")
        return default

    def flag(self, name: str, default: bool) -> bool:
        node = self.get(name)
        if node is None:
            return default
        if isinstance(node.value, bool):
            return node.value
        words = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
        if isinstance(node.value, str) and (node.plain or node.loose) and node.value.lower() in words:
            return words[node.value.lower()]
        self.findings.problem(node, f"must be true or false, not {node.show()}")
        return default

    def whole(self, name: str, default: int, least: int, most: int, also: str = "") -> int:
        """A whole number from `least` to `most`. `also` names words the caller allows besides, for the message."""
        node = self.get(name)
        if node is None:
            return default
        value: object = node.value
        if node.loose and isinstance(value, str) and len(value.strip()) < 18 and value.strip().isdecimal():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        hint = " (remove the quotes)" if isinstance(value, str) and value.isdecimal() else ""
        self.findings.problem(node, f"must be a whole number from {least} to {most}{also}, not {node.show()}{hint}")
        return default

    def whole_or_auto(self, name: str, default: int | Literal["auto"], most: int) -> int | Literal["auto"]:
        node = self.get(name)
        if node is None:
            return default
        if isinstance(node.value, str) and node.value.strip().lower() == "auto":
            return "auto"
        return self.whole(name, 1, 1, most, also=", or auto")

    def seconds(self, name: str, default: float, least: float, most: float = 10 * 365 * 86400) -> float:
        return self._measure(name, default, parse_seconds, format_seconds, least, most)

    def size(self, name: str, default: int, least: int, most: int) -> int:
        return int(self._measure(name, default, parse_size, _format_bytes, least, most))

    def _measure(
        self,
        name: str,
        default: float,
        parse: Callable[[object], float],
        show: Callable[[float], str],
        least: float,
        most: float,
    ) -> float:
        node = self.get(name)
        if node is None:
            return default
        try:
            value = parse(node.value)
        except ValueError as error:
            self.findings.problem(node, f"{error}, not {node.show()}")
            return default
        if math.isfinite(value) and least <= value <= most:
            return value
        self.findings.problem(node, f"must be from {show(least)} to {show(most)}, not {node.show()}")
        return default

    def names(self, name: str) -> tuple[str, ...]:
        """A list of names, each 1-64 of letters, digits, `_`, `-`; sorted, without repeats."""
        node = self.get(name)
        if node is None:
            return ()
        if not isinstance(node.value, list):
            shown = quoted(node.raw) if isinstance(node.value, str) and not node.loose else None
            hint = f": write [{node.raw}]" if shown else ""
            self.findings.problem(node, f"must be a list, not {node.kind()}{hint}")
            return ()
        found: list[str] = []
        for item in node.value:
            try:
                found.extend(check_names(name, [item.raw if isinstance(item.value, (int, float)) else item.value]))
            except InvalidTask:
                self.findings.problem(item, f"must be 1 to 64 letters, digits, '_' or '-', not {item.show()}")
        return tuple(sorted(set(found)))

    def secret(self, name: str) -> Secret | None:
        """`name`, or the content of the file that `name`_file names (relative to the configuration). Never shown."""
        node, file_node = self.get(name), self.get(f"{name}_file")
        if self.given(name) and self.given(f"{name}_file"):
            self.problem(name, f"give {name} or {name}_file, not both")
            return None
        value: str | None = None
        if node is not None:
            if isinstance(node.value, (dict, list, bool)):
                self.findings.problem(node, "must be text")
                return None
            value = node.value if isinstance(node.value, str) else node.raw
            if not node.loose:
                self.findings.warn(node, f"a secret in clear text; use ${{VARIABLE}} or {name}_file")
        elif file_node is not None:
            value = self._secret_file(file_node)
        if value is None:
            return None
        source = node or file_node
        if source is not None and (not value or not value.isascii() or not value.isprintable()):
            self.findings.problem(source, "must be printable ASCII on one line, and not empty")
            return None
        return Secret(value)

    def _secret_file(self, node: Node) -> str | None:
        if not isinstance(node.value, str) or "\0" in node.value:
            self.findings.problem(node, "must be the path of a file")
            return None
        try:
            path = self.base / Path(node.value).expanduser()
        except RuntimeError:
            self.findings.problem(node, "begins with '~', and there is no such user; write the path out")
            return None
        try:
            with path.open("rb") as stream:
                data = stream.read(MAX_SECRET_FILE_BYTES + 1)
        except OSError as error:
            # its path is not repeated: it may be the secret itself, given where its file should be
            self.findings.problem(node, f"{error.strerror or 'cannot be read'}: must be the path of a readable file")
            return None
        if len(data) > MAX_SECRET_FILE_BYTES:
            self.findings.problem(node, f"the file is larger than {MAX_SECRET_FILE_BYTES} bytes; not a secret")
            return None
        try:
            return data.decode().strip()
        except UnicodeDecodeError:
            self.findings.problem(node, "the file is not text")
            return None


def _format_bytes(size: float) -> str:
    shown = format_size(int(size))
    return shown if isinstance(shown, str) else f"{shown} byte{'s' if shown != 1 else ''}"
