"""Durations, sizes and addresses as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.addresses import RedisNodes, endpoint_id, mask_url, redis_address, redis_nodes, redis_url_with
from broker.durations import format_seconds, format_size, parse_seconds, parse_size, span


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (5, 5.0), (0.25, 0.25), ("500ms", 0.5), ("30s", 30.0), ("30 s", 30.0), ("5m", 300.0), ("5min", 300.0),
        ("24h", 86400.0), ("14d", 1209600.0), ("1w", 604800.0), ("1h30m", 5400.0), ("1.5s", 1.5),
        (" 7 ", 7.0), ("0", 0.0),
    ],
)  # fmt: skip
def test_parse_seconds(written: object, seconds: float) -> None:
    assert parse_seconds(written) == seconds


@pytest.mark.parametrize(
    "written", ["", "s", "5 x", "5s!", "-5s", "1,5s", "5S", True, None, [], "inf", "nan", "1e999", float("nan")]
)
def test_parse_seconds_refuses(written: object) -> None:
    with pytest.raises(ValueError, match="a duration such as"):
        parse_seconds(written)


@given(st.one_of(st.integers(0, 10**9).map(float), st.floats(0, 1e9), st.integers(0, 10**7).map(lambda ms: ms / 1000)))
def test_seconds_survive_writing(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == seconds


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.5, "500ms"),
        (30.0, "30s"),
        (90.0, "90s"),
        (300.0, "5m"),
        (86400.0, "1d"),
        (7200.0, "2h"),
        (0.0, "0s"),
        (2.5, "2500ms"),
    ],
)
def test_format_seconds(seconds: float, written: str) -> None:
    assert format_seconds(seconds) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.0032, "3.2 ms"),
        (0.34, "340 ms"),
        (2.1, "2.1 s"),
        (99.97, "1 min 40 s"),
        (3599.6, "1 h 0 min"),
        (86_400.0, "24 h 0 min"),
        (1209598.993, "14 d 0 h"),
    ],
)
def test_a_span_for_people(seconds: float, written: str) -> None:
    assert span(seconds) == written


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (7, 7),
        ("7", 7),
        ("256KiB", 262144),
        ("256k", 262144),
        ("1 MiB", 1 << 20),
        ("64KB", 64000),
        ("1.5MiB", 1572864),
        ("2Gi", 2 << 30),
    ],
)
def test_parse_size(written: object, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize("written", ["", "KiB", "1.3B", "5 apples", "-1", True, 1.5, None])
def test_parse_size_refuses(written: object) -> None:
    with pytest.raises(ValueError, match="a size such as"):
        parse_size(written)


@given(st.integers(0, 1 << 40))
def test_sizes_survive_writing(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "url", "username", "password"),
    [
        ("embedded", "embedded", None, None),
        ("redis://h", "redis://h", None, None),
        ("valkey://h:1/2", "redis://h:1/2", None, None),
        ("rediss://u:p%40w@h:1/0", "rediss://h:1/0", "u", "p@w"),
        ("redis://:pw@[::1]:6379/0?protocol=3", "redis://[::1]:6379/0?protocol=3", None, "pw"),
        ("unix:///run/r.sock", "unix:///run/r.sock", None, None),
        ("unix://u:pw@/run/r.sock?db=1", "unix:///run/r.sock?db=1", "u", "pw"),
        ("redis://h?password=pw&db=1", "redis://h?db=1", None, "pw"),
        ("redis+sentinel://:pw@a:1,b:2/main/0", "redis+sentinel://a:1,b:2/main/0", None, "pw"),
        ("valkey+sentinel://:pw@a/main", "redis+sentinel://a/main", None, "pw"),
        ("rediss+cluster://u:pw@a:1,[::1]:2", "rediss+cluster://a:1,[::1]:2", "u", "pw"),
    ],
)
def test_redis_address(text: str, url: str, username: str | None, password: str | None) -> None:
    address = redis_address(text)
    assert (address.url, address.username, address.password) == (url, username, password)
    again = redis_address(redis_url_with(address.url, username, password)) if password else address
    assert again == address


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("redis+sentinel://a:1", "has no service"),
        ("redis+sentinel://a:1/ /0", "spaces"),
        ("redis+sentinel://a:1/main/x", "database that is not a number"),
        ("redis+sentinel://a:1,:2/main", "host or port"),
        ("redis+sentinel://a:x/main", "host or port"),
        ("redis+cluster://a:1,b:99999", "host or port"),
        ("redis+cluster://a:1/3", "has a database"),
    ],
)
def test_a_redis_address_that_is_none(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        redis_address(text)


def test_credentials_of_sentinels_are_apart_from_those_of_servers() -> None:
    text = "redis+sentinel://u:p@a:1,b/main/3?sentinel_username=watch&sentinel_password=s%26%40&protocol=2"
    address = redis_address(text)
    assert address.url == "redis+sentinel://a:1,b/main/3?protocol=2"
    assert (address.sentinel_username, address.sentinel_password) == ("watch", "s&@")
    whole = redis_url_with(address.url, "u", "p", address.sentinel_username, address.sentinel_password)
    assert redis_address(whole) == address
    assert "s%26" not in mask_url(whole)
    assert redis_nodes(whole) == RedisNodes(
        (("a", 1), ("b", 26379)), "main", "redis://u:p@node/3?protocol=2", "watch", "s&@"
    )
    assert redis_nodes("rediss+cluster://:p@a:1,b") == RedisNodes((("a", 1), ("b", 6379)), "", "rediss://:p@node/")
    assert redis_nodes("redis://a:1/0") is None


@given(st.text(min_size=1), st.text())
def test_credentials_survive_the_url(password: str, username: str) -> None:
    if any("\ud800" <= c <= "\udfff" for c in password + username):
        return
    address = redis_address(redis_url_with("redis://h:1/0", username or None, password))
    assert (address.username or "", address.password) == (username, password)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://10.0.0.1:8000", "10-0-0-1-8000"),
        ("https://api.example.com/v1", "api-example-com-443-v1"),
        ("http://[::1]:80", "1-80"),
        ("http://" + "a" * 80, "a" * 64),
    ],
)
def test_endpoint_id(url: str, name: str) -> None:
    assert endpoint_id(url) == name
