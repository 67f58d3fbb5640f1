"""Errors about a configuration repeat nothing of it that could be a secret, wherever it came to stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker import Broker
from broker.addresses import mask_url, redis_address
from broker.cli import configverbs, main
from broker.config import load_config
from broker.errors import BrokerError, ConfigError
from broker.quoting import quoted, variable, yaml_text

SECRET = "hunter2/S3cr3t"
WORD = "hunter2S3cr3t"  # where a '/' would not get so far
LONG = f"{WORD}{'x' * 90}"
HEAD = "pools:\n  llm:\n    endpoints:\n      - {id: a, url: 'http://a', %s}\n"

# text of a file; line, key and a part of the message of its problem
MISPLACED = {
    "a space forgotten in an endpoint": (HEAD % f"api_key:{WORD}", 4, "[0].***", "did you mean 'api_key: ...'"),
    "a space forgotten in redis": (
        f"redis: {{url: 'redis://h', password:{WORD}}}\n", 1, "redis.***", "A space belongs behind the colon"),
    "a space forgotten in a header": (
        HEAD % f"headers: {{Authorization:Bearer {WORD}}}", 4, "headers.***", "a space belongs behind the colon"),
    "a comma for a colon": (HEAD % f"api_key, {WORD}", 4, "endpoints[0].***", "unknown key"),
    "a comma for a colon, plain letters": ("redis: {password, swordfish}\n", 1, "redis.***", "unknown key"),
    "as the name of a pool": (f"pools: {{llm: {{}}, key:{WORD}}}\n", 1, "pools.***", "a pool's name"),
    "as a key that is unknown": (f"redis: {{{WORD}: 1}}\n", 1, "redis.***", "unknown key"),
    "an exclamation mark unquoted": (f"redis:\n  password: !{WORD}\n", 2, "redis.password", "a tag (!...)"),
    "two of them": (f"redis:\n  password: !{WORD}!x\n", 2, "", "not valid YAML"),
    "an ampersand unquoted": (f"redis:\n  password: &{WORD}\n", 2, "redis.password", "an anchor (&...)"),
    "a star unquoted": (f"api: {{token: *{WORD} }}\n", 1, "api.token", "an alias (*...)"),
    "a percent sign unquoted": (f"redis:\n  password: %{WORD}\n", 2, "", "not valid YAML"),
    "a backslash in quotes": (f'redis:\n  password: "\\q{WORD}"\n', 2, "", "not valid YAML"),
    "quotes in quotes": (f'redis:\n  password: "a"{WORD}"\n', 2, "", "not valid YAML"),
    "a brace unquoted": (f"redis:\n  password: {{{WORD}\n", 3, "", "not valid YAML"),
    "a reference that is none": (f"redis:\n  password: 'a${{{WORD}'\n", 2, "redis.password", "names no variable"),
    "a variable that is none": (f"redis:\n  password: 'a${{{WORD}}}b'\n", 2, "redis.password", "a variable that it"),
    "a key where its file should be": (HEAD % f"api_key_file: {SECRET}", 4, "api_key_file", "path of a readable file"),
    "headers as text": (HEAD % f"headers: 'Bearer {SECRET}'", 4, "headers", "must be a mapping of names"),
    "redis as a URL": (f"redis: 'redis://:{SECRET}@h'\n", 1, "redis", "must be a mapping of keys to values, not text"),
    "api as a token": (f"api: {WORD}\n", 1, "api", "must be a mapping of keys to values, not text"),
    "a token of digits": ("api: 8137264950\n", 1, "api", "not a number"),
    "a key in the list of endpoints": (f"pools: {{a: {{endpoints: [{WORD}]}}}}\n", 1, "endpoints[0]", "must be a map"),
    "in another key": (HEAD % f"priority: {WORD}", 4, "priority", "not what stands there"),
    "in a default": (f"processes: ${{N:-{WORD}}}\n", 1, "processes", "not '${N:-...}'"),
    "a host in an NPU worker": (f"npu: {{workers: [{{id: a, host: '{WORD}@h'}}]}}\n", 1, "host", "user or password"),
    "an interpolated host": ("npu: {workers: [{id: a, host: 'x${SECRET}'}]}\n", 1, "host", "not a valid name"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISPLACED)
def test_a_misplaced_secret_is_not_repeated(tmp_path: Path, name: str) -> None:
    text, line, key, part = MISPLACED[name]
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {"SECRET": f"..{SECRET}"})
    told = str(caught.value)
    for secret in ("hunter2", "S3cr3t", "swordfish", "8137264950"):
        assert secret not in told
    problem = caught.value.problems[0]
    assert (problem.file, problem.line) == (str(path), line), told
    assert problem.key.endswith(key), told
    assert part in problem.message, told


URLS = (
    f"redis://:{SECRET}@127.0.0.1:6379/0", f"redis://:pa?{WORD}@h:1/0", f"redis://:pa#{WORD}@h:1/0",
    f"redis://user?{WORD.lower()}=x@h", "redis://user?swordfish=x@h", f"redis://user:1234/5#{WORD}@h",
    f"redis://user:{WORD}", f"redis://u:{LONG}@127.0.0.1:6379/abc", f"redis://u:{LONG}@h:99999", f"redis://:{WORD} x@h",
    f"rediz://{WORD}", WORD, f"{WORD}@h:1", f"unix://:pa/{WORD}@/run/r.sock", f"redis://h/x?password={WORD}",
    f"redis://h/?ssl_cert_reqs={WORD}", f"http://u:{WORD}@h",
)  # fmt: skip


@pytest.mark.parametrize("url", URLS)
def test_a_refused_redis_url_is_not_repeated(tmp_path: Path, url: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"redis: {{url: {json.dumps(url)}}}\n")
    raised: list[Exception] = []
    for read in (
        lambda: load_config(path, {}),
        lambda: load_config(None, {"REDIS_URL": url}),
        lambda: load_config(None, {}, {"redis.url": url}),
        lambda: Broker(url),
    ):
        with pytest.raises((ConfigError, BrokerError)) as caught:
            read()
        raised.append(caught.value)
    for error in raised:
        assert "hunter2" not in str(error).lower()
        assert "swordfish" not in str(error)
        assert "redis.url" in str(error)
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize("url", URLS[:6])
def test_what_is_to_be_percent_encoded_is_said(url: str) -> None:
    with pytest.raises(ValueError, match=r"write %2F, %3F, %23 and %40|must not set that; behind"):
        redis_address(url)


@pytest.mark.parametrize(
    "name", ["HEADRACE_LISTEN", "HEADRACE_PROCESSES", "HEADRACE_LOG_LEVEL", "HEADRACE_API_TOKEN_FILE"]
)
def test_a_variable_that_was_mixed_up_is_not_repeated(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {name: WORD})
    assert name in str(caught.value)
    assert WORD not in str(caught.value)


@pytest.mark.parametrize("urls", [f"http://u:{WORD}@h", f"http://u:pa,{WORD}@h", f"http://h/{WORD} x", WORD + "/"])
def test_endpoints_of_the_environment_are_not_repeated(urls: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"HEADRACE_ENDPOINT": urls, "HEADRACE_POOL": f"p:{WORD}"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("high", "'high'"),
        ("5 parsecs", "'5 parsecs'"),
        ("-5", "'-5'"),
        ("1e300", "'1e300'"),
        ("half_open", "'half_open'"),
        ("a b", "'a b'"),
        ("", "''"),
        ("${WORD}", "'${WORD}'"),
        ("${WORD:-hunter2}", "'${WORD:-...}'"),
        ("ftp://h/x", "'ftp://...'"),
        ("redis+sentinel://:pw@h", "'redis+sentinel://...'"),
        ("hunter2", None),
        ("x${WORD}", None),
        ("correct horse battery staple", None),
        ("7" * 40, None),
        ("a@b", None),
        ("a\nb", None),
    ],
)
def test_what_may_be_repeated(written: str, shown: str | None) -> None:
    assert quoted(written) == shown


def test_names_of_variables() -> None:
    assert variable("KEY", "x${KEY}") == "variable KEY"
    assert variable("key", "${key}") == "variable key"
    assert variable("ss", "pa${ss}") == "a variable that it names"


def test_words_of_the_file_are_cut_from_what_yaml_says() -> None:
    assert yaml_text("found undefined tag handle '!secret!'") == "found undefined tag handle ***"
    assert yaml_text("found character '%' that cannot start any token") == (
        "found character '%' that cannot start any token")  # fmt: skip
    assert yaml_text("expected ',' or '}', but got '<scalar>'") == "expected ',' or '}', but got '<scalar>'"


def test_an_unforeseen_error_tells_its_place_and_not_its_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(configverbs, "load", lambda _: int(SECRET))
    assert main(["config", "check"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("headrace: ValueError at broker/cli/configverbs.py:")
    assert "this is a fault of headrace, run it with -v" in told
    assert "hunter2" not in told


@example("/")
@example("a@b")
@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=30))
def test_no_part_of_a_password_outlives_the_mask(password: str) -> None:
    hidden = f"hunter2{password}hunter2"
    for url in (f"redis://:{hidden}@h:1/0", f"redis://{hidden}@h:1/0"):
        assert "hunter2" not in mask_url(url)
    assert "hunter2" not in told_of(f"redis://:{hidden}@h:1/0")


def told_of(url: str) -> str:
    """What may be shown of it, or of its refusal."""
    try:
        return redis_address(url).url
    except ValueError as error:
        return str(error)
