"""Nothing that people or machines are shown contains a secret."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import pickle
from pathlib import Path

import orjson
import pytest
import yaml

from broker.addresses import mask_url
from broker.config import Config, RedisSettings, Secret, load_config
from broker.errors import ConfigError

HIDDEN = "hunter2"


@pytest.mark.parametrize(
    "shown",
    [
        repr,
        str,
        format,
        json.dumps,
        lambda secret: f"{secret} {secret!r} {secret!s:>20}",
        lambda secret: "%s %r" % (secret, secret),  # noqa: UP031 - the old way must mask too
        lambda secret: "Bearer " + secret,
        lambda secret: " ".join([secret, secret]),
        lambda secret: json.dumps({"a": [secret]}),
        lambda secret: orjson.dumps({"a": secret}, option=orjson.OPT_PASSTHROUGH_SUBCLASS, default=str).decode(),
        lambda secret: orjson.dumps({"a": secret}).decode(),
        lambda secret: secret.encode().decode(),
        lambda secret: repr(dataclasses.asdict(RedisSettings(password=secret))),
        lambda secret: repr(RedisSettings(password=secret)),
        lambda secret: logging.LogRecord("n", 10, "p", 1, "%s", (secret,), None).getMessage(),
        lambda secret: str(ValueError(secret)),
        lambda secret: repr([*secret]),
    ],
)
def test_a_secret_masks_itself(shown: object) -> None:
    assert callable(shown)
    text = shown(Secret(HIDDEN))
    assert HIDDEN not in text
    assert "*" in text


def test_a_secret_is_a_value() -> None:
    secret = Secret(HIDDEN)
    assert secret.reveal() == HIDDEN
    assert secret == Secret(HIDDEN)
    assert secret != Secret("other")
    assert Secret("other") != secret
    assert secret not in (HIDDEN, "***", Secret("***"))
    assert {secret: 1}[Secret(HIDDEN)] == 1
    assert secret.matches(HIDDEN)
    assert not secret.matches("***")
    assert not secret.matches("h\udcffé")
    for other in (pickle.loads(pickle.dumps(secret)), copy.deepcopy(secret), Secret(secret)):
        assert other.reveal() == HIDDEN


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "c.yaml"
    path.write_text(
        "redis: {url: '${U}'}\napi: {token: '${K}'}\npools:\n  p:\n    endpoints:\n"
        "      - {id: e, url: 'http://h', api_key: '${K}', hmac_secret: '${K}', headers: {X-Key: '${K}'}}\n"
        "    health: {probe: {path: /p, headers: {X-Key: '${K}'}}}\n"
    )
    return load_config(path, {"K": HIDDEN, "U": f"rediss://user:{HIDDEN}@h:1/0?password={HIDDEN}"})


def test_a_shown_configuration_has_no_secret(config: Config) -> None:
    for text in (repr(config), str(config), json.dumps(config.to_dict()), yaml.safe_dump(config.to_dict())):
        assert HIDDEN not in text
    assert config.redis.shown == "rediss://***@h:1/0"
    assert HIDDEN not in repr(config.origins)
    revealed = json.dumps(config.to_dict(masked=False))
    assert revealed.count(HIDDEN) == 6
    assert json.dumps(config.to_wire()).count(HIDDEN) == 6


@pytest.mark.parametrize(
    "text",
    [
        "redis: {url: 'rediz://u:hunter2@h'}\n",
        "redis: {url: 'redis://u:hunter2@h:port'}\n",
        "redis: {url: 'redis://h:6379/x?password=hunter2'}\n",
        "redis: {password: [hunter2]}\n",
        "processes: ${K}\n",
        "log: {level: '${K}'}\n",
        "pools: {p: {endpoints: [{id: a, url: 'http://u:hunter2@h'}]}}\n",
        "pools: {p: {endpoints: [{id: a, url: 'http://h', api_key: \"hunter2\\n.\"}]}}\n",
        "pools: {p: {endpoints: [{id: a, url: 'http://h', headers: {X: \"hunter2\\n.\"}}]}}\n",
        "pools: {p: {endpoints: [{id: '${K} ', url: 'http://h'}]}}\n",
        "pools: {p: {endpoints: [{id: a, url: '${K}'}]}}\n",
        "pools: {p: {retry: {max_attempts: '${K}'}}}\n",
        "pools: {p: {timeout: {attempt: '${K}'}}}\n",
        "pools: {p: {health: {path: '${K}'}}}\n",
    ],
)
def test_problems_never_repeat_a_secret(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {"K": HIDDEN})
    assert HIDDEN not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("redis://u:pw@h:1/0", "redis://***@h:1/0"),
        ("redis://:p@w@h:1", "redis://***@h:1"),
        ("redis://h:1/0?password=pw&db=1", "redis://h:1/0?password=***&db=1"),
        ("unix://u:pw@/run/r.sock", "unix://***@/run/r.sock"),
        ("Error 111 connecting to redis://:pw@h:1 refused", "Error 111 connecting to redis://***@h:1 refused"),
        ("redis://h:6379", "redis://h:6379"),
        ("mail me@example.org", "mail me@example.org"),
    ],
)
def test_mask_url(text: str, masked: str) -> None:
    assert mask_url(text) == masked
