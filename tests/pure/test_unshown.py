"""What never gets into a line for people: control characters, and the text of probes and headers that changed."""

from __future__ import annotations

import pytest

from broker.config import Config, Endpoint, Health, Pool
from broker.logs import escape
from broker.task import Request
from workers.reload import changes


@pytest.mark.parametrize("code", [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x200E, 0x202E, 0x2066, 0xD800])
def test_a_character_that_drives_a_terminal_or_forges_a_line(code: int) -> None:
    shown = escape(f"a{chr(code)}b")
    assert chr(code) not in shown
    assert shown.isprintable()
    assert shown.startswith("a\\")


def test_a_changed_probe_is_named_and_not_shown() -> None:
    def config(text: str) -> Config:
        probe = Request("POST", "/v1/x", body=text, headers={"x-note": text})
        endpoint = Endpoint("a", "http://a", headers={"x-key": text})
        return Config(pools={"llm": Pool("llm", (endpoint,), health=Health(probe=probe))})

    told = str(changes(config("hunter1"), config("hunter2")))
    assert told == "endpoint a headers changed; pool llm: health.probe changed"
