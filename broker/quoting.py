"""What an error may repeat of what stands in a configuration: nothing that could be a secret.

A password can stand anywhere: unquoted behind `!`, in a URL that is no URL because of it, glued to its key where a
space was forgotten, in a variable that was mixed up with another. So only that is repeated which is known to be none:
numbers, plain words, references to variables, the scheme of a URL. File, line and key say where the rest stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

HIDDEN: Final = "***"
UNSAID: Final = "what stands there"

_NUMBER: Final = re.compile(r"[-+]?\d{0,18}(?:\.\d{0,9})?(?:[eE][-+]?\d{1,3})?(?: ?[A-Za-z%]{1,10})?")
_WORDS: Final = re.compile(r"[A-Za-z]+(?:[ ._-][A-Za-z]+)*")
_MOST_LETTERS: Final = 24
_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(:-[^}]*)?\}")
_CAPITALS: Final = re.compile(r"[A-Z][A-Z0-9_]*")
_SCHEME: Final = re.compile(r"([A-Za-z]{2,8}(?:\+[a-z]{2,8})?)://.*", re.DOTALL)
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}|<<|\$\{[A-Z][A-Z0-9_]*\}")
_KEY_WORD: Final = re.compile(r"[A-Za-z]+(?:[_-][A-Za-z]+)*")
_QUOTED: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_OF_YAML: Final = re.compile(r"['\"](?:<[a-z ]+>|\\?.)['\"]")


def quoted(written: str) -> str | None:
    """A value as an error may repeat it, in quotes; None if it may not. `written` is as in the file: `${VAR}`."""
    text = written.strip()
    if not text:
        return repr(written[:8])
    if reference := _REFERENCE.fullmatch(text):
        return repr(f"${{{reference[1]}:-...}}" if reference[2] else text)
    if scheme := _SCHEME.fullmatch(text):
        return repr(f"{scheme[1]}://...")
    harmless = _NUMBER.fullmatch(text) or (len(text) <= _MOST_LETTERS and _WORDS.fullmatch(text))
    return repr(written) if harmless and len(written) <= _MOST_LETTERS + 8 else None


def variable(name: str, written: str) -> str:
    """How an error names a variable that `written` refers to: a password may hold a `${` that was not meant as one."""
    known = _CAPITALS.fullmatch(name) or written.strip() == f"${{{name}}}"
    return f"variable {name}" if known else "a variable that it names"


def key_name(name: str) -> str:
    """A key as one step of a dotted key. Names of pools, headers and labels are shown; what cannot be one is not."""
    return name if _NAME.fullmatch(name) else HIDDEN


def unknown_key(name: str, known: Iterable[str], close: bool, empty: bool) -> tuple[str, str]:
    """An unknown key's step in the dotted key, and a hint for the end of the message, or "".

    close  it is near a known one
    empty  it has no value: `{password, hunter}` is a mapping with two keys
    """
    glued, colon, _ = name.partition(":")
    if colon and glued in known:
        return HIDDEN, f"; did you mean '{glued}: ...'? A space belongs behind the colon"
    plain = len(name) <= _MOST_LETTERS and _KEY_WORD.fullmatch(name)
    return (name if name == "<<" or (key_name(name) == name and (close or plain) and not empty) else HIDDEN), ""


def scheme_hint(written: str, scheme: str) -> str:
    """`; did you mean http://...?` for a bare host. `written` is as in the file: `${VAR}`, not its value."""
    if re.fullmatch(r"(?:localhost|[0-9.]{7,15}|[A-Za-z0-9._-]+(?=:))(?::\d{1,5})?(?:/v\d)?", written):
        return f"; did you mean {scheme}://{written}?"
    return "" if "://" in written else f"; is {scheme}:// missing in front of it?"


def yaml_text(problem: str) -> str:
    """What PyYAML says, without the words of the file that it quotes; single characters and its own tokens stay."""
    text = " ".join(problem.split())
    return _QUOTED.sub(lambda part: part[0] if _OF_YAML.fullmatch(part[0]) else HIDDEN, text)
