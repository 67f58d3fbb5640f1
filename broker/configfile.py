"""A YAML file as a tree of nodes that know where they stand: file, line, dotted key.

Read from YAML's event stream rather than by a loader, which keeps no lines and would follow aliases. Only
mappings, lists and scalars are understood. Plain scalars are null, true/false, numbers or text as in YAML 1.2: `no`
and `12:30` stay text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from broker.errors import Problem
from broker.quoting import UNSAID, key_name, quoted, variable, yaml_text

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32

Scalar = str | int | float | bool | None

_INT = re.compile(r"[-+]?\d{1,18}")
_FLOAT = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d{1,3})?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)(\}?)")
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)


@dataclass(slots=True)
class Node:
    """A value and where it stands.

    key    dotted, as written: `pools.npu.endpoints[0].url`
    line   1-based line of its key (of the value, in a list); None outside files
    raw    the scalar's text as written, so that `007` can be an id and a message need not show an interpolated secret
    loose  came from the environment or a flag: text that looks like a number may serve as one
    broken already reported; readers pass over it in silence
    """

    value: Scalar | dict[str, Node] | list[Node]
    key: str
    file: str
    line: int | None = None
    raw: str = ""
    plain: bool = True
    loose: bool = False
    broken: bool = False

    def children(self) -> list[Node]:
        if isinstance(self.value, dict):
            return list(self.value.values())
        return self.value if isinstance(self.value, list) else []

    def child_key(self, name: str) -> str:
        return f"{self.key}.{key_name(name)}" if self.key else key_name(name)

    def kind(self) -> str:
        """What it is, for messages that must not repeat it."""
        if isinstance(self.value, dict):
            return "a mapping"
        if isinstance(self.value, list):
            return "a list"
        if self.value is None:
            return "empty"
        return "text" if isinstance(self.value, str) else "a number or a word"

    def show(self) -> str:
        """What a message may repeat of it: as written (`${VAR}`, not its value), and only what can be no secret."""
        if isinstance(self.value, (dict, list)) or (self.value is None and not self.raw):
            return self.kind()
        if isinstance(self.value, str) or not self.raw:
            return quoted(self.raw) or UNSAID
        return self.raw

    def where(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(slots=True)
class Findings:
    """Problems and warnings, collected while everything is read, so that all can be told together."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def problem(self, node: Node, message: str, key: str | None = None) -> None:
        if not node.broken:
            self.problems.append(Problem(node.file, node.line, node.key if key is None else key, message))

    def warn(self, node: Node, message: str) -> None:
        self.warnings.append(str(Problem(node.file, node.line, node.key, message)))


def from_python(value: Any, key: str, file: str) -> Node:
    """A tree made from Python values (flags, environment): no lines."""
    node = Node(None, key, file, loose=True)
    if isinstance(value, Mapping):
        node.value = {str(name): from_python(item, node.child_key(str(name)), file) for name, item in value.items()}
    elif isinstance(value, (list, tuple)):
        node.value = [from_python(item, f"{key}[{index}]", file) for index, item in enumerate(value)]
    else:
        node.value = value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
        node.raw = "" if value is None else str(value)
    return node


def read_file(path: Path, findings: Findings) -> Node:
    """The file's tree. Whatever is wrong goes to `findings`; then the tree may be empty or partly broken."""
    name = str(path)
    empty = Node({}, "", name, 1)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        reasons = {FileNotFoundError: "no such file", IsADirectoryError: "is a directory, not a file"}
        reasons[PermissionError] = "may not be read (permission denied)"
        message = reasons.get(type(error)) or f"cannot be read: {error.strerror or type(error).__name__}"
        findings.problems.append(Problem(name, None, "", message))
        return empty
    except ValueError:  # a NUL in it
        findings.problems.append(Problem(name, None, "", "no such file can exist"))
        return empty
    if len(data) > MAX_FILE_BYTES:
        findings.problems.append(
            Problem(name, None, "", f"larger than {MAX_FILE_BYTES >> 20} MiB; is it a configuration?")
        )
        return empty
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        findings.problems.append(Problem(name, line, "", "not UTF-8 text; save the file as UTF-8"))
        return empty
    return parse(text, name, findings)


def parse(text: str, file: str, findings: Findings) -> Node:
    """The text's tree; its root is always a mapping."""
    tree = _Builder(file, findings).build(text)
    if tree is not None and isinstance(tree.value, dict) and tree.value:
        return tree
    if tree is not None and not tree.broken:
        message = "must be a mapping of keys to values" if tree.value not in (None, {}) else "empty: no keys in it"
        findings.problems.append(Problem(file, tree.line if tree.value else None, "", message))
    return Node({}, "", file, 1)


class _Builder:
    """Builds the tree from events with a stack of its own, so depth costs no recursion."""

    def __init__(self, file: str, findings: Findings) -> None:
        self.file, self.findings = file, findings
        self.root: Node | None = None
        self.stack: list[Node] = []
        self.names: list[tuple[str, int] | None] = []  # per open mapping: the key that waits for its value

    def build(self, text: str) -> Node | None:
        documents = 0
        loader: Any = None
        try:
            loader = yaml.SafeLoader(text)
            while loader.check_event():
                event = loader.get_event()
                if isinstance(event, yaml.DocumentStartEvent):
                    documents += 1
                    if documents > 1:
                        self._problem(event, "a second YAML document ('---'); keep one")
                        break
                elif not self._take(event):
                    return Node({}, "", self.file, 1, broken=True)
        except yaml.YAMLError as error:
            self.findings.problems.append(_syntax_problem(self.file, text, error))
            return Node({}, "", self.file, 1, broken=True)
        except (ValueError, OverflowError):  # PyYAML makes numbers and characters of what it finds, unchecked
            line = 1 if loader is None else int(loader.line) + 1
            message = "not valid YAML: a number or an escape is too large"
            self.findings.problems.append(Problem(self.file, line, "", message))
            return Node({}, "", self.file, line, broken=True)
        return self.root if self.root is not None else Node(None, "", self.file, 1)

    def _take(self, event: Any) -> bool:
        if isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self.stack.pop()
            self.names.pop()
        elif isinstance(event, yaml.NodeEvent):
            return self._open(event)
        return True

    def _open(self, event: Any) -> bool:
        node = self._make(event)
        if self.stack and isinstance(self.stack[-1].value, dict) and self.names[-1] is None:
            if not isinstance(event, yaml.ScalarEvent):
                self._problem(event, "a key must be plain text")
                return False
            self.names[-1] = (event.value, _line(event))
            return True
        self._attach(node)
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self.stack.append(node)
            self.names.append(None)
            if len(self.stack) > MAX_DEPTH:
                self._problem(event, f"nested deeper than {MAX_DEPTH} levels")
                return False
        return True

    def _make(self, event: Any) -> Node:
        node = Node(None, "", self.file, _line(event))
        if isinstance(event, yaml.AliasEvent):
            self._problem(event, "an alias (*...): not allowed; write the value out, or quote it")
            node.broken = True
            return node
        if event.anchor is not None:
            self._problem(event, "an anchor (&...): not allowed; leave it out, or quote the value")
        if event.tag is not None:
            self._problem(event, "a tag (!...): tags are not allowed; leave it out, or quote the value")
            node.broken = True
        if isinstance(event, yaml.MappingStartEvent):
            node.value = {}
        elif isinstance(event, yaml.SequenceStartEvent):
            node.value = []
        else:
            node.raw, node.plain = event.value, event.style is None
            node.value = plain_scalar(event.value) if node.plain else event.value
        return node

    def _attach(self, node: Node) -> None:
        if not self.stack:
            self.root = node
            return
        parent = self.stack[-1]
        if isinstance(parent.value, list):
            node.key = f"{parent.key}[{len(parent.value)}]"
            parent.value.append(node)
        elif isinstance(parent.value, dict):
            name, line = self.names[-1] or ("", 0)
            self.names[-1] = None
            node.key, node.line = parent.child_key(name), line
            if (first := parent.value.get(name)) is not None:
                self.findings.problem(node, f"given twice (first on line {first.line}); keep one")
            else:
                parent.value[name] = node

    def _problem(self, event: Any, message: str) -> None:
        key = ""
        if self.stack:
            waiting = self.names[-1]
            key = self.stack[-1].child_key(waiting[0]) if waiting else self.stack[-1].key
        self.findings.problems.append(Problem(self.file, _line(event), key, message))


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def plain_scalar(text: str) -> Scalar:
    """What an unquoted scalar means."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _syntax_problem(file: str, text: str, error: yaml.YAMLError) -> Problem:
    line: int | None = None
    message = "cannot be read as YAML"
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        message = f"not valid YAML: {yaml_text(error.problem or 'syntax error')}"
        if "'\\t'" in message:
            message = "not valid YAML: a tab; indent with spaces"
        elif line is not None and "${" in (text.splitlines() or [""])[min(line, text.count("\n")) - 1]:
            message += ' (inside braces, quote it: "${VAR}")'
    elif isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        message = "contains a control character"
    return Problem(file, line, "", " ".join(message.split()))


def check_text(tree: Node, findings: Findings) -> None:
    """Reports text that cannot be written out: bytes of the environment that are not UTF-8, `"\\ud800"` in a file."""
    pending = [tree]
    while pending:
        node = pending.pop()
        pending.extend(reversed(node.children()))
        names = list(node.value) if isinstance(node.value, dict) else [node.value]
        if any(isinstance(name, str) and _SURROGATE.search(name) for name in names):
            findings.problem(node, "has text that is no text: bytes that are not UTF-8, or half of a surrogate pair")
            node.broken = True


def interpolate(tree: Node, environ: Mapping[str, str], findings: Findings) -> None:
    """Replaces `${VAR}` and `${VAR:-default}` in every string of the tree; `$${` stands for a literal `${`.

    An empty variable counts as unset. The text put in is never read as YAML structure; an empty result is no value.
    """
    pending = [tree]
    while pending:
        node = pending.pop()
        pending.extend(reversed(node.children()))
        if isinstance(node.value, str) and "${" in node.value:
            _interpolate_scalar(node, environ, findings)


def _interpolate_scalar(node: Node, environ: Mapping[str, str], findings: Findings) -> None:
    faults: list[str] = []

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        parts = _VARIABLE.fullmatch(match[1])
        if not match[2] or parts is None:
            faults.append("a '${' that names no variable: write ${VAR} or ${VAR:-default} ('$${' for a literal '${')")
            return ""
        name, default = parts[1], parts[2]
        value = environ.get(name)
        if default is not None:
            return value or default
        if not value:
            state = "is not set" if value is None else "is empty"
            told = variable(name, str(node.value))
            faults.append(f"{told} {state}; set it, or write ${{VAR:-default}} ('$${{' for a literal '${{')")
        return value or ""

    text = _REFERENCE.sub(replace, str(node.value))
    for fault in faults:
        findings.problem(node, fault)
    node.value = None if not text else plain_scalar(text) if node.plain else text
    node.loose, node.broken = True, node.broken or bool(faults)
