"""The whole way from text to values: what is accepted, what is refused and where, what is only warned of."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import yaml

from broker.config import (
    Breaker,
    Config,
    Connection,
    Endpoint,
    Health,
    Pool,
    QueuePolicy,
    Retry,
    Secret,
    Timeouts,
    config_for_endpoints,
    load_config,
)
from broker.errors import ConfigError
from broker.task import Request
from tests.pure.conftest import Write

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "config" / "headrace.example.yaml"


FULL = """\
redis: {url: "redis://:s3cret@redis.internal:6379/2"}
processes: 3
pools:
  npu:
    endpoints:
      - {id: low, url: "http://10.0.0.2:8081/", priority: 2, max_concurrent: auto, auto_min: 2,
         auto_max: 9}
      - {id: high, url: "HTTP://NPU.internal:8082/v1/", priority: 10, max_concurrent: 4, capabilities: [llm, vision]}
      - {id: off, url: "http://10.0.0.9", enabled: false, priority: 9}
    retry: {max_attempts: 4, backoff: {initial: 250ms, max: 1m}}
    timeout: {connect: 1, first_byte: 10s, idle: 2.5, attempt: 2m}
    health: {path: /healthz, interval: 10s, timeout: 2s, probe: {path: /inference, json: {model_id: m, max_tokens: 1}}}
    breaker: {failures: 3, cooldown: 30s, cooldown_max: 5m, half_open_successes: 2, failure_percent: 40,
              minimum_volume: 9, rate_window: 1m, slow_start: false}
    queue: {max_depth: 10, result_ttl: 1h, dead_letter_ttl: 2d, payload_limit: 64KiB, result_limit: 2000000,
            spill_after: 0s, lease: 10s, max_deliveries: 3}
    connection: {transport: aiohttp, idle_discard: 1s}
    drain: 5s
"""


def test_every_key_is_read(write: Write) -> None:
    config = load_config(write(FULL), {})
    pool = config.pools["npu"]
    assert config.processes == 3
    assert config.redis.url == "redis://redis.internal:6379/2"
    assert config.redis.connection_url() == "redis://:s3cret@redis.internal:6379/2"
    assert pool == Pool(
        name="npu",
        adapter="npu",
        endpoints=(
            Endpoint("low", "http://10.0.0.2:8081", priority=2, max_concurrent="auto", auto_min=2, auto_max=9),
            Endpoint("high", "http://npu.internal:8082/v1", 10, 4, ("llm", "vision")),
            Endpoint("off", "http://10.0.0.9", priority=9, enabled=False),
        ),
        retry=Retry(4, 0.25, 60.0),
        timeout=Timeouts(1.0, 10.0, 2.5, 120.0),
        health=Health("/healthz", 10.0, 2.0, Request("POST", "/inference", {"model_id": "m", "max_tokens": 1})),
        breaker=Breaker(3, 30.0, 300.0, 2, 40, 9, 60.0, False),
        queue=QueuePolicy(10, 3600.0, 172800.0, 65536, 2_000_000, 0.0, 10.0, 3, 5.0),
        connection=Connection("aiohttp", 1.0),
    )
    assert [endpoint.id for endpoint in pool.order] == ["high", "low"]


def test_without_file_everything_has_its_default() -> None:
    config = load_config(None, {})
    assert config == Config()
    assert config.redis.embedded
    assert config.origins == {}


def test_unset_is_distinct_from_default(write: Write) -> None:
    path = write("processes: auto\napi:\n  port:\nlog: {level: info}\n")
    config = load_config(path, {"REDIS_URL": "redis://h"}, {"log.format": "json"})
    assert config.origins == {
        "processes": f"{path}:1",
        "log.level": f"{path}:4",
        "redis.url": "environment REDIS_URL",
        "log.format": "command line",
    }


def test_example_holds_every_default_it_claims(tmp_path: Path) -> None:
    pool = load_config(EXAMPLE, {}).pools["llm"]
    defaults = Pool("llm")
    for part in ("adapter", "retry", "timeout", "breaker", "queue", "connection"):
        assert getattr(pool, part) == getattr(defaults, part), part
    assert load_config(EXAMPLE, {}).warnings == ()


def test_example_documents_every_key() -> None:
    from broker import configendpoints, configschema

    text = EXAMPLE.read_text()
    known = [configendpoints.ENDPOINT]
    known += [getattr(configschema, name) for name in dir(configschema) if name.isupper()]
    words = {word for names in known if isinstance(names, tuple) for word in names if isinstance(word, str)}
    missing = sorted(word for word in words if f"{word}:" not in text and f"({word})" not in text and word not in text)
    assert len(words) > 50
    assert missing == []
    settings = [line for line in text.splitlines() if line.strip().startswith("#")]
    assert sum("Default" in line or "Required" in line for line in settings) >= 40


HEAD = "pools:\n  llm:\n    endpoints:\n"
ENDPOINT = HEAD + "      - {id: a, url: 'http://a', %s}\n"
POOL = "pools:\n  llm:\n    endpoints: [{id: a, url: 'http://a'}]\n    %s\n"


def test_byte_order_mark_and_windows_lines_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbfprocesses: 2\r\nlog:\r\n  level: debug\r\n")
    config = load_config(path, {})
    assert (config.processes, config.log.level) == (2, "debug")


def test_words_stay_text_and_ids_stay_as_written(write: Write) -> None:
    path = write(HEAD + "      - {id: 007, url: 'http://a', labels: {zone: no, since: 2024-01-01, rack: 12:30}}\n")
    (endpoint,) = load_config(path, {}).pools["llm"].endpoints
    assert endpoint.id == "007"
    assert endpoint.labels == {"zone": "no", "since": "2024-01-01", "rack": "12:30"}


@pytest.mark.parametrize(
    "same",
    ["http://HOST.example/v1", "http://host.example:80/v1", "http://host.example/v1/", "HTTP://host.example./v1"],
)
def test_same_server_twice_counts_once_with_a_warning(write: Write, same: str) -> None:
    path = write(HEAD + f"      - {{id: a, url: 'http://host.example/v1'}}\n      - {{id: b, url: '{same}'}}\n")
    config = load_config(path, {})
    assert [endpoint.id for endpoint in config.pools["llm"].endpoints] == ["a"]
    (warning,) = config.warnings
    assert warning.startswith(f"{path}:5: pools.llm.endpoints[1].url: the same server as endpoint 'a'")


@pytest.mark.parametrize("other", ["http://host.example/v2", "https://host.example/v1", "http://host.example:81/v1"])
def test_other_servers_are_kept(write: Write, other: str) -> None:
    path = write(HEAD + f"      - {{id: a, url: 'http://host.example/v1'}}\n      - {{id: b, url: '{other}'}}\n")
    config = load_config(path, {})
    assert len(config.pools["llm"].endpoints) == 2
    assert config.warnings == ()


def test_ipv6_spellings_are_one_server(write: Write) -> None:
    path = write(HEAD + "      - {id: a, url: 'http://[::1]:8000'}\n      - {id: b, url: 'http://[0:0::1]:8000/'}\n")
    config = load_config(path, {})
    assert [endpoint.url for endpoint in config.pools["llm"].endpoints] == ["http://[::1]:8000"]


def test_disabled_twin_does_not_shadow(write: Write) -> None:
    path = write(HEAD + "      - {id: a, url: 'http://a', enabled: false}\n      - {id: b, url: 'http://a'}\n")
    config = load_config(path, {})
    assert [endpoint.id for endpoint in config.pools["llm"].enabled] == ["b"]
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("pools:\n  llm: {}\n", ":2: pools.llm: has no enabled endpoint"),
        (ENDPOINT % "enabled: false", ":2: pools.llm: has no enabled endpoint"),
        (ENDPOINT % "api_key: clear", "api_key: a secret in clear text"),
        ("redis: {url: 'redis://:p@h'}\n", "redis.url: a password in clear text"),
        ("api: {host: 0.0.0.0}\n", "api.host: 0.0.0.0 is not loopback"),
        (POOL % "timeout: {first_byte: 10s, attempt: 5s}", "first_byte: longer than the whole attempt (5s)"),
    ],
)
def test_warnings(write: Write, text: str, part: str) -> None:
    (warning,) = load_config(write(text), {}).warnings
    assert part in warning


def test_a_default_longer_than_a_set_attempt_is_not_warned_of(write: Write) -> None:
    assert load_config(write(POOL % "timeout: {attempt: 5s}"), {}).warnings == ()


def test_limits_follow_a_larger_lower_bound(write: Write) -> None:
    pool = load_config(write(POOL % "breaker: {cooldown: 1h}\n    retry: {backoff: {initial: 2m}}"), {}).pools["llm"]
    assert (pool.breaker.cooldown_max, pool.retry.backoff_max) == (3600.0, 120.0)


def test_shown_configuration_reads_back_equal(write: Write, tmp_path: Path) -> None:
    config = load_config(write(FULL), {})
    text = yaml.safe_dump(config.to_dict(masked=False))
    again = tmp_path / "again.yaml"
    again.write_text(text)
    loaded = load_config(again, {})
    assert loaded.pools == config.pools
    assert (loaded.redis, loaded.api, loaded.log, loaded.processes) == (config.redis, config.api, config.log, 3)
    json.dumps(config.to_dict())


def test_wire_carries_everything(write: Write) -> None:
    text = FULL.replace("priority: 10,", "priority: 10, api_key: '${K}', headers: {X-A: b}, labels: {r: a7},")
    config = load_config(write(text), {"K": "sk-1"})
    pool = config.pools["npu"]
    key = pool.endpoints[1].api_key
    assert key is not None
    assert key.reveal() == "sk-1"
    assert Pool.from_wire(json.loads(json.dumps(pool.to_wire()))) == pool
    assert Config.from_wire(json.loads(json.dumps(config.to_wire()))) == config
    assert (
        Config.from_wire(json.loads(json.dumps(config.to_wire())))
        .redis.connection_url()
        .endswith("s3cret@redis.internal:6379/2")
    )
    assert pickle.loads(pickle.dumps(config)) == config


def test_values_are_frozen_and_hashable(write: Write) -> None:
    config = load_config(write(FULL), {})
    with pytest.raises(AttributeError):
        config.pools["npu"].retry.max_attempts = 9  # type: ignore[misc]
    assert hash(config) == hash(load_config(write(FULL), {}))


def test_endpoints_without_a_file() -> None:
    config = config_for_endpoints(
        [
            "http://127.0.0.1:8001",
            "http://127.0.0.1:8002/v1/",
            "http://127.0.0.1:8001/",
            "http://gpu",
            "http://127.0.0.1:8002/v1-",
        ],
        slots=16,
        overrides={"pools.run.retry.max_attempts": 5, "processes": 2},
    )
    pool = config.pools["run"]
    assert [(endpoint.id, endpoint.url, endpoint.max_concurrent) for endpoint in pool.endpoints] == [
        ("127-0-0-1-8001", "http://127.0.0.1:8001", 16),
        ("127-0-0-1-8002-v1", "http://127.0.0.1:8002/v1", 16),
        ("gpu-80", "http://gpu", 16),
        ("127-0-0-1-8002-v1-2", "http://127.0.0.1:8002/v1-", 16),
    ]
    assert (pool.adapter, pool.retry.max_attempts, config.processes) == ("http", 5, 2)
    (warning,) = config.warnings
    assert "the same server as endpoint '127-0-0-1-8001'" in warning


def test_endpoints_on_top_of_a_configuration(write: Write) -> None:
    base = load_config(write(FULL), {})
    config = config_for_endpoints(["http://h"], "mine", slots="auto", adapter="npu", base=base)
    assert list(config.pools) == ["mine"]
    assert (config.redis, config.processes, config.source) == (base.redis, 3, base.source)
    assert config.pools["mine"].adapter == "npu"


@pytest.mark.parametrize(
    ("urls", "slots", "part"),
    [(["h:8000"], None, "did you mean http://h:8000?"), ([], None, "no URL"), (["http://h"], 0, "from 1 to 65535")],
)
def test_bad_endpoints_without_a_file(urls: list[str], slots: int | None, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_for_endpoints(urls, slots=slots)
    (problem,) = caught.value.problems
    assert problem.line is None
    assert problem.file == "--endpoint"
    assert part in problem.message


def test_data_folder(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path.parent)
    assert load_config(write("processes: 1\n"), {}).data_dir == tmp_path / ".headrace"
    assert load_config(write("redis: {data_dir: q}\n"), {}).data_dir == tmp_path / "q"
    assert load_config(None, {}).data_dir == tmp_path.parent / ".headrace"


def test_secrets_from_files(write: Write, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-file\n")
    (tmp_path / "empty").write_text("\n")
    path = write(
        ENDPOINT % "api_key_file: key, hmac_secret_file: key" + "redis: {password_file: key}\napi: {token_file: key}\n"
    )
    config = load_config(path, {})
    endpoint = config.pools["llm"].endpoints[0]
    assert endpoint.api_key == endpoint.hmac_secret == config.redis.password == config.api.token == Secret("sk-file")
    assert config.warnings == ()
    with pytest.raises(ConfigError, match=r"4: pools.llm.endpoints\[0\].api_key_file: must be printable ASCII"):
        load_config(write(ENDPOINT % "api_key_file: empty"), {})
