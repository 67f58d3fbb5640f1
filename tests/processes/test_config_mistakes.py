"""Whatever is wrong with the file of a running worker: one line of its log names it, and the watch goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from broker.web.reload import reload_pool
from tests.support.endpoints import SimulatedEndpoint
from tests.support.fleet import Fleet, fleet, pool_config, until

SECRET = "hunter2"


def errors(running: Fleet) -> list[str]:
    return [line for line in running.log.read_text().splitlines() if " ERROR " in line]


def text_of(redis_url: str, *urls: str) -> str:
    pools = {"llm": pool_config(urls)}
    return yaml.safe_dump({"redis": {"url": redis_url}, "processes": 1, "pools": pools}, sort_keys=False)


def endpoints(running: Fleet) -> set[str]:
    key = running.store.keys.endpoints("llm")
    return {name.decode() for name in running.store.pipelined([("SMEMBERS", key)])[0]}


MORE = "    - {id: k, url: 'http://127.0.0.1:9', %s}\n"

# what is done to the text; what the line says
MISTAKES: dict[str, tuple[Callable[[str], str], str]] = {
    "the home of nobody": (lambda text: text + MORE % "api_key_file: '~nosuchuser/key'", "no such user"),
    "a version of YAML": (lambda text: f"%YAML 1.{'9' * 5000}\n---\n{text}", "not valid YAML"),
    "a host that is none": (lambda text: text + MORE.replace("127.0.0.1", "a" * 64) % "", "not a valid name"),
    "a key glued to its value": (lambda text: text + MORE % f"api_key:{SECRET}", "did you mean 'api_key: ...'"),
    "a tag for a key": (lambda text: text + MORE % f"api_key: !{SECRET} x", "tags are not allowed"),
    "a fault of ours": (lambda text: text + "# stumble\n", "ValueError at "),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_the_repaired_file_is_taken_up(tmp_path: Path, redis_url: str, name: str) -> None:
    spoil, said = MISTAKES[name]
    with SimulatedEndpoint() as endpoint:
        pools = {"llm": pool_config([endpoint.url])}
        with fleet(tmp_path, redis_url, pools, module="tests.support.stumbling") as running:
            running.file.write_text(spoil(text_of(redis_url, endpoint.url)))
            (line,) = until(lambda: errors(running), f"an error in {running.log}", 20)
            assert f"nothing changed: {running.file}" in line
            assert said in line
            assert endpoints(running) == {"e0"}
            running.file.write_text(text_of(redis_url, endpoint.url, "http://localhost:9"))
            until(lambda: "e1" in endpoints(running), "the repaired file is taken up", 20)
            assert errors(running) == [line]
            assert SECRET not in running.log.read_text()
            assert "Traceback" not in running.log.read_text()


@pytest.mark.parametrize("name", ["a tag for a key", "a fault of ours"])
def test_who_asked_for_a_reload_is_told_the_same(tmp_path: Path, redis_url: str, name: str) -> None:
    spoil, said = MISTAKES[name]
    with SimulatedEndpoint() as endpoint:
        pools = {"llm": pool_config([endpoint.url])}
        with fleet(tmp_path, redis_url, pools, module="tests.support.stumbling") as running:
            running.file.write_text(spoil(text_of(redis_url, endpoint.url)))
            reply = asyncio.run(reload_pool(running.store, "llm", patience=30))
    assert (reply.success, reply.answered) == (False, True)
    assert said in reply.message
    assert SECRET not in reply.message
