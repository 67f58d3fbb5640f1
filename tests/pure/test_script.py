"""How the scripts are put together: a name that is missing shows only when its line runs."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from broker.script import VERBS, load

FUNCTION = re.compile(r"^ *local function (\w+)", re.M)


def code(source: str) -> str:
    """Without comments and text."""
    return re.sub(r"--[^\n]*|'[^'\n]*'", "", source)


def parts() -> dict[str, str]:
    folder = resources.files("broker").joinpath("lua")
    return {file.name.removesuffix(".lua"): file.read_text(encoding="utf-8") for file in folder.iterdir()}


SHARED = {name for part, text in parts().items() if part not in VERBS for name in FUNCTION.findall(text)}


@pytest.mark.parametrize("verb", VERBS)
def test_a_script_has_all_functions_it_calls_before_it_calls_them(verb: str) -> None:
    source = code(load(verb).source)
    for call in re.finditer(r"(?<![.\w])(\w+)\(", source):
        if call[1] in SHARED:
            assert re.search(rf"^ *local function {call[1]}\(", source[: call.end()], re.M), call[1]


@pytest.mark.parametrize("verb", VERBS)
def test_what_a_verb_needs_rarely_is_made_by_its_first_call(verb: str) -> None:
    source = code(load(verb).source)
    made = set(re.findall(r"(\w+) = \1", source))
    assert set(re.findall(r"rarely\(\)\.(\w+)", source)) <= made


@pytest.mark.parametrize("verb", VERBS)
def test_a_part_stands_once_in_a_script(verb: str) -> None:
    defined = [name for name in FUNCTION.findall(load(verb).source) if name in SHARED]
    assert sorted(defined) == sorted(set(defined))
