"""Environment and flags over the file; interpolation; single-endpoint mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.config import Secret, load_config
from broker.errors import ConfigError

BASE = """\
redis: {url: "redis://file:1"}
processes: 2
pools:
  a.b: {endpoints: [{id: a, url: "http://a"}], retry: {max_attempts: 2}}
  a: {endpoints: [{id: b, url: "http://b"}]}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "headrace.yaml"
    path.write_text(BASE)
    return path


def test_flags_over_environment_over_file(base: Path) -> None:
    environ = {"HEADRACE_PROCESSES": "5", "HEADRACE_REDIS_URL": "redis://env:2", "REDIS_URL": "redis://plain:3"}
    assert load_config(base, {}).processes == 2
    assert load_config(base, environ).processes == 5
    assert load_config(base, environ).redis.url == "redis://env:2"
    assert load_config(base, {"REDIS_URL": "redis://plain:3"}).redis.url == "redis://plain:3"
    config = load_config(base, environ, {"processes": 7, "redis.url": "redis://flag:4"})
    assert (config.processes, config.redis.url) == (7, "redis://flag:4")


def test_unset_flags_and_empty_variables_change_nothing(base: Path) -> None:
    config = load_config(base, {"HEADRACE_PROCESSES": "", "REDIS_URL": ""}, {"processes": None, "redis.url": None})
    assert (config.processes, config.redis.url) == (2, "redis://file:1")


def test_flags_reach_into_pools(base: Path) -> None:
    config = load_config(base, {}, {"pools.*.retry.max_attempts": 9, "pools.a.b.drain": "1s", "pools.a.drain": 4})
    assert [pool.retry.max_attempts for pool in config.pools.values()] == [9, 9]
    assert [pool.queue.drain for pool in config.pools.values()] == [1.0, 4.0]


def test_bad_flag_is_told_by_key(base: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(base, {}, {"processes": 0, "pools.a.retry.max_atempts": 1})
    assert [(p.file, p.line, p.key) for p in caught.value.problems] == [
        ("command line", None, "pools.a.retry.max_atempts"),
        ("command line", None, "processes"),
    ]


def test_file_from_environment(base: Path) -> None:
    config = load_config(None, {"HEADRACE_CONFIG": str(base)})
    assert (config.source, config.processes) == (str(base), 2)


def test_secrets_of_a_higher_layer_replace_both_spellings(tmp_path: Path) -> None:
    (tmp_path / "pw").write_text("from-file")
    path = tmp_path / "c.yaml"
    path.write_text("redis: {url: 'redis://h', password_file: pw}\napi: {token: '${T:-low}'}\n")
    config = load_config(path, {"HEADRACE_REDIS_PASSWORD": "env", "HEADRACE_API_TOKEN_FILE": str(tmp_path / "pw")})
    assert (config.redis.password, config.api.token) == (Secret("env"), Secret("from-file"))
    assert load_config(path, {}).redis.password == Secret("from-file")


def test_password_of_the_file_stays_unless_the_new_url_has_one(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("redis: {url: 'redis://h', username: u, password: '${PW}'}\n")
    same = load_config(path, {"PW": "p/w", "REDIS_URL": "redis://other:1"})
    assert same.redis.connection_url() == "redis://u:p%2Fw@other:1"
    own = load_config(path, {"PW": "p/w", "REDIS_URL": "redis://x:y@other:1"})
    assert own.redis.connection_url() == "redis://x:y@other:1"


def test_password_variable_wins_over_the_url_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("redis: {url: '${U}'}\n")
    config = load_config(path, {"U": "redis://:old@h", "HEADRACE_REDIS_PASSWORD": "new"})
    assert config.redis.password == Secret("new")


def test_listen(base: Path) -> None:
    for listen, expected in (("0.0.0.0:99", ("0.0.0.0", 99)), (":98", ("127.0.0.1", 98)), ("[::1]:97", ("::1", 97))):
        api = load_config(base, {"HEADRACE_LISTEN": listen}).api
        assert (api.host, api.port) == expected
    with pytest.raises(ConfigError, match="environment HEADRACE_LISTEN: must be HOST:PORT"):
        load_config(base, {"HEADRACE_LISTEN": "nowhere"})


def test_slips_are_warned_of_and_strangers_are_not(base: Path) -> None:
    environ = {"HEADRACE_PROCESES": "4", "HEADRACE_PORT": "tcp://10.0.0.1:80", "HEADRACE_TEST_SERVER": "redis"}
    environ["HEADRACE_REDIS_PORT"] = "tcp://10.0.0.1:6379"
    assert load_config(base, environ).warnings == (
        "environment HEADRACE_PROCESES: not used; did you mean HEADRACE_PROCESSES?",
    )


def test_interpolation(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "processes: ${N}\n"
        "redis: {url: '${SCHEME:-redis}://${HOST}:6379'}\n"
        "log: {level: '${LEVEL:-debug}'}\n"
        "api: {port: '${PORT:-}', token: '$${x} $y ${TOKEN}'}\n"
        "pools:\n  p: {endpoints: [{id: e, url: 'http://${HOST}', labels: {l: '${YAML}'}}]}\n"
    )
    environ = {"N": "4", "HOST": "h", "LEVEL": "", "TOKEN": "t", "YAML": "{a: [1]}"}
    config = load_config(path, environ)
    assert (config.processes, config.redis.url, config.log.level) == (4, "redis://h:6379", "debug")
    assert config.api.port == 8080
    assert config.api.token == Secret("${x} $y t")
    assert config.pools["p"].endpoints[0].labels == {"l": "{a: [1]}"}


def test_keys_are_not_interpolated(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("pools:\n  ${POOL}: {}\n")
    with pytest.raises(ConfigError, match=r":2: pools.\$\{POOL\}: a pool's name"):
        load_config(path, {"POOL": "x"})


def test_single_endpoint_mode() -> None:
    environ = {
        "HEADRACE_ENDPOINT": "http://h:8000, http://h:8001",
        "HEADRACE_SLOTS": "3",
        "HEADRACE_ENDPOINT_API_KEY": "k",
    }
    config = load_config(None, environ)
    pool = config.pools["default"]
    assert [(endpoint.id, endpoint.max_concurrent) for endpoint in pool.endpoints] == [("h-8000", 3), ("h-8001", 3)]
    assert pool.endpoints[0].api_key == Secret("k")
    (warning,) = config.warnings
    assert warning == "environment HEADRACE_ENDPOINT: single-endpoint mode, 2 endpoint(s) in pool 'default'"


def test_single_endpoint_mode_serves_the_pool_that_has_no_enabled_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("pools:\n  npu: {endpoints: [{id: h-80, url: 'http://x', enabled: false}], drain: 1s}\n")
    pool = load_config(path, {"HEADRACE_ENDPOINT": "http://h"}).pools["npu"]
    assert [(endpoint.id, endpoint.enabled) for endpoint in pool.endpoints] == [("h-80", False), ("h-80-2", True)]
    assert (pool.adapter, pool.queue.drain) == ("npu", 1.0)


def test_single_endpoint_mode_needs_a_name_among_several_pools(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("pools:\n  a: {}\n  b: {}\n")
    with pytest.raises(ConfigError, match="name one of a, b in HEADRACE_POOL"):
        load_config(path, {"HEADRACE_ENDPOINT": "http://h"})
    config = load_config(path, {"HEADRACE_ENDPOINT": "http://h", "HEADRACE_POOL": "b"})
    assert [len(pool.enabled) for pool in config.pools.values()] == [0, 1]


def test_single_endpoint_mode_yields_to_a_configuration(base: Path) -> None:
    config = load_config(base, {"HEADRACE_ENDPOINT": "http://h"})
    assert list(config.pools) == ["a.b", "a"]
    assert config.warnings == ("environment HEADRACE_ENDPOINT: not used, there are enabled endpoints in pool a.b, a",)


def test_bad_single_endpoint() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"HEADRACE_ENDPOINT": "h:8000", "HEADRACE_SLOTS": "none"})
    assert {problem.file for problem in caught.value.problems} == {"environment HEADRACE_ENDPOINT"}
    assert "did you mean http://h:8000?" in str(caught.value)
    assert "max_concurrent: must be a whole number" in str(caught.value)
