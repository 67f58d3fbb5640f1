"""Every kind of bad input, and where it is told: file, line, dotted key, message; all of them at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.config import Config, load_config
from broker.errors import ConfigError
from tests.pure.conftest import Write

Expected = list[tuple[int | None, str | None, str]]
EXAMPLE = Path(__file__).resolve().parents[2] / "config" / "headrace.example.yaml"


HEAD = "pools:\n  llm:\n    endpoints:\n"
ENDPOINT = HEAD + "      - {id: a, url: 'http://a', %s}\n"
POOL = "pools:\n  llm:\n    endpoints: [{id: a, url: 'http://a'}]\n    %s\n"
P = "pools.llm."
IN_ENDPOINT = "pools.llm.endpoints[0]."

# text of the file; then line, key and a part of the message of every problem it must give, and no others
BAD: dict[str, tuple[str, Expected]] = {
    "unknown key at the top": ("poolz: {}\n", [(1, "poolz", "did you mean 'pools'?")]),
    "unknown key, nothing near": ("zzz: 1\n", [(1, "zzz", "known here: api, log, pools, processes, redis")]),
    "unknown key deep": (POOL % "retry: {max_atempts: 3}", [(4, P + "retry.max_atempts", "'max_attempts'?")]),
    "another system's word": (
        POOL % "breaker: {recovery_timeout: 3}", [(4, P + "breaker.recovery_timeout", "'cooldown'?")]),
    "workers for endpoints": ("pools:\n  llm:\n    workers: []\n", [(3, P + "workers", "'endpoints'?")]),
    "top is a list": ("- 1\n", [(1, "", "must be a mapping")]),
    "top is text": ("hello\n", [(1, "", "must be a mapping")]),
    "empty": ("", [(None, "", "empty")]),
    "only comments": ("# nothing\n", [(None, "", "empty")]),
    "broken yaml": ("processes: 1\npools: [\n", [(3, "", "not valid YAML")]),
    "tab": ("pools:\n\tllm: {}\n", [(2, "", "a tab; indent with spaces")]),
    "control character": ("processes: 1\nlog: \x01\n", [(2, "", "control character")]),
    "two documents": ("processes: 1\n---\nprocesses: 2\n", [(2, "", "second YAML document")]),
    "duplicate key": ("processes: 1\nlog: {}\nprocesses: 2\n", [(3, "processes", "given twice (first on line 1)")]),
    "duplicate key deep": (POOL % "drain: 1s\n    drain: 2s", [(5, P + "drain", "first on line 4")]),
    "duplicate pool": ("pools:\n  llm: {}\n  llm: {}\n", [(3, "pools.llm", "given twice")]),
    "anchor and alias": (
        "log: &l {level: info}\napi: *l\n",
        [(1, "log", "an anchor"), (2, "api", "an alias")],
    ),
    "merge key": ("log: {<<: {level: info}}\n", [(1, "log.<<", "unknown key")]),
    "tag": ("processes: !!python/object:os.system 1\n", [(1, "processes", "tags are not allowed")]),
    "key that is no text": ("? [a]\n: 1\n", [(1, "", "a key must be plain text")]),
    "too deep": ("log: " + "[" * 40 + "]" * 40 + "\n", [(1, None, "nested deeper than 32")]),
    "processes zero": ("processes: 0\n", [(1, "processes", "from 1 to 1024, or auto, not 0")]),
    "processes fraction": ("processes: 1.5\n", [(1, "processes", "whole number")]),
    "processes quoted": ("processes: '4'\n", [(1, "processes", "(remove the quotes)")]),
    "processes bool": ("processes: true\n", [(1, "processes", "not true")]),
    "processes list": ("processes: [1]\n", [(1, "processes", "not a list")]),
    "processes huge": (f"processes: {'9' * 5000}\n", [(1, "processes", "whole number")]),
    "pools a list": ("pools:\n  - llm\n", [(1, "pools", "must be a mapping")]),
    "pool name": ("pools:\n  'a b': {endpoints: [{id: a, url: 'http://a'}]}\n", [(2, "pools.***", "a pool's name")]),
    "pool is text": ("pools:\n  llm: http://a\n", [(2, "pools.llm", "must be a mapping")]),
    "endpoints a mapping": (HEAD + "      a: 1\n", [(3, P + "endpoints", "must be a list")]),
    "endpoint is text": (HEAD + "      - http://a\n", [(4, P + "endpoints[0]", "must be a mapping")]),
    "endpoint empty": (HEAD + "      -\n", [(4, P + "endpoints[0]", "not empty")]),
    "id missing": (HEAD + "      - priority: 3\n        url: http://a\n", [(4, IN_ENDPOINT + "id", "is missing")]),
    "url missing": (HEAD + "      - {id: a}\n", [(4, IN_ENDPOINT + "url", "is missing")]),
    "id charset": (HEAD + "      - {id: 'a.b', url: 'http://a'}\n", [(4, IN_ENDPOINT + "id", "not 'a.b'")]),
    "id too long": (HEAD + f"      - {{id: {'a' * 65}, url: 'http://a'}}\n", [(4, IN_ENDPOINT + "id", "1 to 64")]),
    "id twice": (
        HEAD + "      - {id: a, url: 'http://a'}\n      - id: a\n        url: http://b\n",
        [(5, P + "endpoints[1].id", "already the id of pools.llm.endpoints[0]")],
    ),
    "id twice over pools": (
        HEAD + "      - {id: a, url: 'http://a'}\n  other:\n    endpoints:\n      - {id: a, url: 'http://b'}\n",
        [(7, "pools.other.endpoints[0].id", "already the id")],
    ),
    "priority zero": (ENDPOINT % "priority: 0", [(4, IN_ENDPOINT + "priority", "1 to 10 (10 is preferred), not 0")]),
    "priority eleven": (ENDPOINT % "priority: 11", [(4, IN_ENDPOINT + "priority", "not 11")]),
    "priority word": (ENDPOINT % "priority: high", [(4, IN_ENDPOINT + "priority", "not 'high'")]),
    "no slots": (ENDPOINT % "max_concurrent: 0", [(4, IN_ENDPOINT + "max_concurrent", "from 1 to 65535, or auto")]),
    "negative slots": (ENDPOINT % "max_concurrent: -1", [(4, IN_ENDPOINT + "max_concurrent", "not -1")]),
    "enabled": (ENDPOINT % "enabled: maybe", [(4, IN_ENDPOINT + "enabled", "true or false")]),
    "enabled quoted": (ENDPOINT % "enabled: 'no'", [(4, IN_ENDPOINT + "enabled", "true or false")]),
    "capabilities text": (ENDPOINT % "capabilities: llm", [(4, IN_ENDPOINT + "capabilities", "write [llm]")]),
    "capability charset": (ENDPOINT % "capabilities: ['a b']", [(4, IN_ENDPOINT + "capabilities[0]", "not 'a b'")]),
    "labels": (ENDPOINT % "labels: {x: [1]}", [(4, IN_ENDPOINT + "labels.x", "must be text")]),
    "two keys": (
        ENDPOINT % "api_key: '${K:-k}', api_key_file: f",
        [(4, IN_ENDPOINT + "api_key", "api_key or api_key_file, not both")],
    ),
    "key file gone": (ENDPOINT % "api_key_file: nowhere", [(4, IN_ENDPOINT + "api_key_file", "No such file")]),
    "key and header": (
        ENDPOINT % "api_key: '${K:-k}', headers: {authorization: x}",
        [(4, IN_ENDPOINT + "headers", "keep one")],
    ),
    "header host": (ENDPOINT % "headers: {Host: x}", [(4, IN_ENDPOINT + "headers.Host", "belongs to the connection")]),
    "header proxy": (ENDPOINT % "headers: {Proxy-X: x}", [(4, IN_ENDPOINT + "headers.Proxy-X", "connection")]),
    "header crlf": (ENDPOINT % 'headers: {X-A: "a\\r\\nB: c"}', [(4, IN_ENDPOINT + "headers.X-A", "without CR or LF")]),
    "authorization crlf": (
        ENDPOINT % 'headers: {Authorization: "a\\nB: c"}',
        [(4, IN_ENDPOINT + "headers.Authorization", "without CR or LF")],
    ),
    "header twice": (ENDPOINT % "headers: {X-A: a, x-a: b}", [(4, IN_ENDPOINT + "headers.x-a", "given twice")]),
    "header name": (ENDPOINT % "headers: {'X A': a}", [(4, IN_ENDPOINT + "headers.***", "not a valid HTTP header")]),
    "adapter": (POOL % "adapter: grpc", [(4, P + "adapter", "one of http, npu")]),
    "attempts": (POOL % "retry: {max_attempts: 0}", [(4, P + "retry.max_attempts", "from 1 to 100")]),
    "backoff": (POOL % "retry: {backoff: 5s}", [(4, P + "retry.backoff", "must be a mapping")]),
    "backoff order": (
        POOL % "retry: {backoff: {initial: 10s, max: 1s}}",
        [(4, P + "retry.backoff.max", "less than initial (10s)")],
    ),
    "duration unit": (POOL % "timeout: {connect: 5 parsecs}", [(4, P + "timeout.connect", "a duration such as")]),
    "duration zero": (POOL % "timeout: {attempt: 0}", [(4, P + "timeout.attempt", "must be from")]),
    "duration long": (
        POOL % "queue: {result_ttl: 500ms}", [(4, P + "queue.result_ttl", "must be from 1s to 3650d, not '500ms'")]),
    "duration negative": (POOL % "timeout: {attempt: -5}", [(4, P + "timeout.attempt", "not -5")]),
    "duration huge": (POOL % "timeout: {attempt: 1e300}", [(4, P + "timeout.attempt", "must be from")]),
    "health path": (POOL % "health: {path: health}", [(4, P + "health.path", "a path that starts with '/'")]),
    "health url": (POOL % "health: {path: 'http://x/h'}", [(4, P + "health.path", "without host")]),
    "probe without path": (POOL % "health: {probe: {json: {}}}", [(4, P + "health.probe.path", "is missing")]),
    "probe method": (POOL % "health: {probe: {path: /a, method: PEEK}}", [(4, P + "health.probe.method", "one of")]),
    "probe path": (POOL % "health: {probe: {path: a}}", [(4, P + "health.probe.path", "starts with '/'")]),
    "probe bodies": (POOL % "health: {probe: {path: /, json: 1, body: x}}", [(4, P + "health.probe.body", "keep one")]),
    "probe is text": (POOL % "health: {probe: /x}", [(4, P + "health.probe", "must be a mapping")]),
    "failures": (POOL % "breaker: {failures: 0}", [(4, P + "breaker.failures", "from 1 to 1000")]),
    "cooldown order": (
        POOL % "breaker: {cooldown: 1h, cooldown_max: 1m}",
        [(4, P + "breaker.cooldown_max", "less than cooldown")],
    ),
    "size": (POOL % "queue: {payload_limit: 3 apples}", [(4, P + "queue.payload_limit", "a size such as")]),
    "size negative": (
        POOL % "queue: {payload_limit: -1}", [(4, P + "queue.payload_limit", "must be from 1 byte to 512MiB")]),
    "depth": (POOL % "queue: {max_depth: many}", [(4, P + "queue.max_depth", "whole number")]),
    "lease": (POOL % "queue: {lease: 10ms}", [(4, P + "queue.lease", "from 500ms to 1h, not '10ms'")]),
    "transport": (POOL % "connection: {transport: curl}", [(4, P + "connection.transport", "one of auto, httptools")]),
    "redis scheme": ("redis: {url: 'http://x'}\n", [(1, "redis.url", "must be 'embedded' or start with redis://")]),
    "redis no scheme": ("redis: {url: 'localhost:6379'}\n", [(1, "redis.url", "did you mean redis://localhost:6379?")]),
    "redis database": ("redis: {url: 'redis://h/x'}\n", [(1, "redis.url", "database")]),
    "redis port": ("redis: {url: 'redis://h:99999'}\n", [(1, "redis.url", "port")]),
    "redis two passwords": (
        "redis:\n  url: redis://:p@h\n  password: ${P:-q}\n",
        [(3, "redis.password", "in the URL too")],
    ),
    "api port": ("api: {port: 70000}\n", [(1, "api.port", "from 0 to 65535")]),
    "api host": ("api: {host: 'http://x', token: '${T:-t}'}\n", [(1, "api.host", "without port or scheme")]),
    "log level": ("log: {level: loud}\n", [(1, "log.level", "debug, info, warning, error")]),
    "variable unset": (ENDPOINT % "priority: 4, api_key: '${NOPE}'", [(4, IN_ENDPOINT + "api_key", "NOPE is not set")]),
    "variable empty": ("log:\n  level: ${EMPTY}\n", [(2, "log.level", "variable EMPTY is empty")]),
    "variable form": ("log:\n  level: ${LEVEL:?no}\n", [(2, "log.level", "write ${VAR} or ${VAR:-default}")]),
    "variable open": ("log:\n  level: '${LEVEL'\n", [(2, "log.level", "write ${VAR} or ${VAR:-default}")]),
    "variable in braces": ("log: {level: ${LEVEL}}\n", [(1, "", 'quote it: "${VAR}"')]),
    "variable not a number": ("processes: ${WORD}\n", [(1, "processes", "not '${WORD}'")]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_with_line_and_key(write: Write, name: str) -> None:
    text, expected = BAD[name]
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {"EMPTY": "", "WORD": "hunter2"})
    problems = caught.value.problems
    assert len(problems) == len(expected), str(caught.value)
    for problem, (line, key, part) in zip(problems, expected, strict=True):
        assert problem.file == str(path)
        assert problem.line == line, str(problem)
        assert key is None or problem.key == key, str(problem)
        assert part in problem.message, str(problem)
    assert len(str(caught.value).splitlines()) == len(expected)


BAD_URLS = {
    "10.0.0.1:8000": "did you mean http://10.0.0.1:8000?",
    "localhost": "did you mean http://localhost?",
    "ftp://h": "must start with http://",
    "http://": "has no host",
    "http:///v1": "has no host",
    "http://u:hunter2@h": "must not contain a user or password",
    "http://h?x=1": "query",
    "http://h/#f": "fragment",
    "http://h:0": "port",
    "http://h:99999": "port",
    "http://h:": "port",
    "http://h:http": "port",
    "http://a b": "spaces",
    "http://h\u00fc": "punycode",
    "http://[::1": "brackets",
    "http://[zz]": "",
    "http://a..b": "not a valid name",
    "http://-a": "not a valid name",
    "http://h/a/../b": "'..'",
    "http://h/a/%2e%2e/b": "'..'",
    "http://h/{x}": "percent-encoding",
    "": "must start with",
}


@pytest.mark.parametrize("url", BAD_URLS)
def test_bad_url(write: Write, url: str) -> None:
    path = write(HEAD + f"      - id: a\n        url: {json.dumps(url)}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    (problem,) = caught.value.problems
    assert (problem.line, problem.key) == (5, IN_ENDPOINT + "url")
    assert BAD_URLS[url] in problem.message
    assert "hunter2" not in problem.message


def test_all_problems_of_all_parts_come_together_in_file_order(write: Write) -> None:
    path = write(
        """\
processes: none
pools:
  llm:
    endpoints:
      - {id: a, url: ftp://x, priority: 77}
      - {id: a, url: "http://x", colour: red}
    retry: {max_attempts: 0}
redis: {url: 5}
api: *x
"""
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, {"HEADRACE_LOG_LEVEL": "loud"}, {"api.port": -1})
    found = [(problem.line, problem.key) for problem in caught.value.problems]
    assert found == [
        (1, "processes"),
        (5, P + "endpoints[0].url"),
        (5, P + "endpoints[0].priority"),
        (6, P + "endpoints[1].colour"),
        (6, P + "endpoints[1].id"),
        (7, P + "retry.max_attempts"),
        (8, "redis.url"),
        (9, "api"),
        (None, "api.port"),
        (None, "log.level"),
    ]
    assert str(caught.value.problems[-1]).startswith("environment HEADRACE_LOG_LEVEL: log.level: must be one of")
    assert caught.value.exit_code == 3


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    latin, big = tmp_path / "latin.yaml", tmp_path / "big.yaml"
    latin.write_bytes("processes: 1\n# gr\u00f6\u00dfe\n".encode("latin-1"))
    big.write_bytes(b"# " + b"x" * (1 << 20))
    for path, line, part in (
        (tmp_path / "gone.yaml", None, "no such file"),
        (tmp_path, None, "is a directory"),
        (latin, 2, "not UTF-8"),
        (big, None, "larger than 1 MiB"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(path, {})
        (problem,) = caught.value.problems
        assert (problem.file, problem.line, problem.key) == (str(path), line, "")
        assert part in problem.message


DAMAGE = ["", "x", "- ", "  ", "{", "[1]", "5", "'", ": ", "&a ", "${", "!t ", "null"]


def load(path: Path) -> Config | ConfigError:
    try:
        return load_config(path, {})
    except ConfigError as error:
        return error


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_gives_a_configuration_or_problems(write: Write, data: st.DataObject) -> None:
    lines = EXAMPLE.read_text().splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        damage = data.draw(st.sampled_from(DAMAGE))
        column = data.draw(st.integers(0, len(lines[at])))
        cut = data.draw(st.integers(0, 6))
        lines[at] = lines[at][:column] + damage + lines[at][column + cut :]
    path = write("".join(lines))
    result = load(path)
    assert isinstance(result, Config) or all(problem.line is not None for problem in result.problems)
