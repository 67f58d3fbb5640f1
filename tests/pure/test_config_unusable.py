"""Values that no path, socket, resolver or parser can take: refused in one line, with file and line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from broker.addresses import is_host
from broker.cli import main
from broker.cli.serve import try_to_listen
from broker.config import Api, Config, load_config
from broker.errors import ConfigError

LABEL = "a" * 64
ENDPOINT = "pools:\n  llm:\n    endpoints:\n      - {id: a, url: 'http://a', %s}\n"
URL = "pools:\n  llm:\n    endpoints:\n      - {id: a, url: '%s'}\n"

# text of a file; line, key and a part of the message of its problem
FILES = {
    "the home of nobody": (ENDPOINT % "api_key_file: '~nosuchuser/key'", 4, "api_key_file", "no such user"),
    "a secret file with NUL": (ENDPOINT % 'api_key_file: "a\\0b"', 4, "api_key_file", "path of a file"),
    "a secret file with a long name": (f"api: {{token_file: {'a' * 5000}}}\n", 1, "api.token_file", "too long"),
    "a data folder with NUL": ('redis: {data_dir: "a\\0b"}\n', 1, "redis.data_dir", "path of a folder"),
    "a version of YAML": (f"%YAML 1.{'9' * 5000}\n---\na: 1\n", 1, "", "not valid YAML"),
    "an escape beyond Unicode": ('log:\n  level: "\\U00110000"\n', 2, "", "not valid YAML"),
    "an escape beyond C": ('log:\n  level: "\\UFFFFFFFF"\n', 2, "", "not valid YAML"),
    "half a character": ('log:\n  level: "\\ud800"\n', 2, "log.level", "text that is no text"),
    "half a character in a key": (ENDPOINT % 'labels: {"\\ud800": x}', 4, "labels", "text that is no text"),
    "a host with an empty label": (URL % "http://a..b:80", 4, "url", "not a valid name or address"),
    "a host with a long label": (URL % f"http://{LABEL}.example:80", 4, "url", "not a valid name or address"),
    "a redis host with an empty label": ("redis: {url: 'redis://a..b:80'}\n", 1, "redis.url", "host"),
    "a redis host with a long label": (f"redis: {{url: 'redis://{LABEL}:80'}}\n", 1, "redis.url", "host"),
    "a sentinel with a long label": (
        f"redis: {{url: 'redis+sentinel://a:1,{LABEL}:1/name'}}\n", 1, "redis.url", "host"),
    "a redis host outside ASCII": (f"redis: {{url: 'redis://ö{LABEL}:80'}}\n", 1, "redis.url", "host"),
    "a database": (f"redis: {{url: 'redis://h/{'9' * 5000}'}}\n", 1, "redis.url", "database"),
    "a database behind '?'": ("redis: {url: 'redis://h?db=abc'}\n", 1, "redis.url", "must set db to a number"),
    "a protocol": ("redis: {url: 'redis://h?protocol=4'}\n", 1, "redis.url", "must set protocol to 2 or 3"),
    "a TLS version": ("redis: {url: 'rediss://h?ssl_min_version=x'}\n", 1, "redis.url", "must set ssl_min_version"),
    "a TLS check": ("redis: {url: 'rediss://h?ssl_cert_reqs=bla'}\n", 1, "redis.url", "none, optional or required"),
    "a socket with NUL": ("redis: {url: 'unix:///tmp/%00x'}\n", 1, "redis.url", "path to the socket"),
    "a socket with a long path": (f"redis: {{url: 'unix:///{'a' * 107}'}}\n", 1, "redis.url", "at most 107 bytes"),
    "an API host with an empty label": ("api: {host: 'a..b', token: '${T:-t}'}\n", 1, "api.host", "host name"),
    "an API host with a long label": (f"api: {{host: {LABEL}, token: '${{T:-t}}'}}\n", 1, "api.host", "host name"),
    "an API host with NUL": ('api: {host: "a\\0b", token: "${T:-t}"}\n', 1, "api.host", "host name"),
    "an NPU host": (f"npu: {{workers: [{{id: a, host: {LABEL}, port: 1}}]}}\n", 1, "host", "not a valid name"),
    "an NPU host that is a list": ("npu: {workers: [{id: a, host: [h], port: 1}]}\n", 1, "host", "must be text"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, line, key, part = FILES[name]
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    (problem,) = caught.value.problems
    assert (problem.file, problem.line) == (str(path), line)
    assert problem.key.endswith(key)
    assert part in problem.message
    assert main(["config", "check", "-c", str(path)]) == 3
    (told,) = capsys.readouterr().err.splitlines()
    assert told == f"headrace: {problem}"


@pytest.mark.parametrize(
    "environ",
    [
        {"REDIS_URL": "redis://:\udcff@h"},
        {"REDIS_URL": f"redis://{LABEL}"},
        {"HEADRACE_LISTEN": "\udcff:1"},
        {"HEADRACE_LISTEN": "a..b:1"},
        {"HEADRACE_POOL": "\udcff", "HEADRACE_ENDPOINT": "http://a"},
        {"HEADRACE_ENDPOINT": f"http://{LABEL}"},
        {"HEADRACE_ENDPOINT": "http://a", "HEADRACE_ENDPOINT_API_KEY": "\udcff"},
        {"HEADRACE_API_TOKEN_FILE": "~nosuchuser/token"},
        {"HEADRACE_REDIS_PASSWORD_FILE": "a" * 5000},
        {"HEADRACE_CONFIG": "a" * 5000},
        {"HEADRACE_CONFIG": "a\0b"},
    ],
)
def test_the_environment(environ: Mapping[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, environ)
    for problem in caught.value.problems:
        assert problem.file in (environ.get("HEADRACE_CONFIG"), *(f"environment {name}" for name in environ))


@pytest.mark.parametrize("url", ["redis://\udcff:1/0", "redis://u:\udcff\udcfe@127.0.0.1:1/0", "redis://a..b:80"])
def test_the_command_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--redis", url]) == 3
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("headrace: command line: redis.url: has ")


@pytest.mark.parametrize(
    ("host", "usable"),
    [
        ("localhost", True), ("gpu_1.example.", True), ("127.0.0.1", True), ("::1", True), ("fe80::1%eth0", True),
        ("größe.example", True), ("a" * 63, True), (".".join(["a" * 63] * 3 + ["a" * 61]), True),
        ("", False), (".", False), ("a..b", False), (LABEL, False), (f"ö{'a' * 60}", False), ("a b", False),
        ("a:b", False), ("a\0", False), ("-a", False), (".".join(["a" * 63] * 4), False), ("\ud800", False),
    ],
)  # fmt: skip
def test_hosts(host: str, usable: bool) -> None:
    assert is_host(host) is usable


@pytest.mark.parametrize("host", ["a..b", LABEL])
def test_an_address_of_no_socket_is_a_word_and_no_exception(host: str) -> None:
    """A Config made in a program was not read by the rules of a file."""
    assert try_to_listen(Config(api=Api(host=host))) == "no such name can exist"


def test_a_secret_file_that_is_none(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("x" * 65_536)
    config = load_config(None, {"HEADRACE_API_TOKEN_FILE": str(secret)})
    assert config.api.token is not None
    assert len(config.api.token.reveal()) == 65_536
    secret.write_text("x" * 65_537)
    with pytest.raises(ConfigError, match=r"api.token_file: the file is larger than 65536 bytes; not a secret"):
        load_config(None, {"HEADRACE_API_TOKEN_FILE": str(secret)})


def test_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    try:
        with pytest.raises(ConfigError, match=r"^current folder: No such file or directory; go to"):
            load_config(None, {})
    finally:
        os.chdir(tmp_path)
