"""What a changed configuration means: for people, for processes, for workers. And what added endpoints make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from broker.configmodel import Breaker, Config, Endpoint, Log, Pool, RedisSettings, Retry, Timeouts
from broker.errors import ConfigError
from broker.registered import endpoint_from, with_registered
from broker.secret import Secret
from workers.layout import Selection, layout
from workers.reload import WorkerChanges, changes, match, worker_changes
from workers.spec import Spec

A = Endpoint("a", "http://10.0.0.1:8000", max_concurrent=4)
B = Endpoint("b", "http://10.0.0.2:8000", max_concurrent=4)


def config(*endpoints: Endpoint, name: str = "llm", **more: Any) -> Config:
    return Config(pools={name: Pool(name, endpoints, **more)}, processes=1)


# What is said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (config(A), config(A), "nothing changed"),
        (config(A), config(A, B), "endpoint b added"),
        (config(A), config(A, replace(B, enabled=False)), "endpoint b added, disabled"),
        (config(A, B), config(A), "endpoint b removed: it finishes what it runs"),
        (config(A), config(replace(A, enabled=False)), "endpoint a disabled"),
        (config(replace(A, enabled=False)), config(A), "endpoint a enabled"),
        (config(A), config(replace(A, priority=9)), "endpoint a priority 5 -> 9"),
        (config(A), config(replace(A, max_concurrent="auto")), "endpoint a max_concurrent 4 -> auto"),
        (config(A), config(replace(A, capabilities=("vision",))), "endpoint a capabilities [] -> [vision]"),
        (config(A), config(A, retry=Retry(max_attempts=5)), "pool llm: retry.max_attempts 3 -> 5"),
        (config(A), config(A, timeout=Timeouts(attempt=1.5)), "pool llm: timeout.attempt 300 -> 1.5"),
        (config(A), config(A, breaker=Breaker(slow_start=False)), "pool llm: breaker.slow_start true -> false"),
        (config(A), config(A, adapter="npu"), "pool llm: adapter http -> npu"),
        (config(A), replace(config(A), processes="auto"), "processes 1 -> auto"),
        (config(A), replace(config(A), log=Log("debug")), "log.level info -> debug"),
        (config(A), replace(config(A), pools={}), "pool llm removed"),
        (Config(processes=1), config(A, B), "pool llm added with a, b"),
        (config(A), replace(config(A), redis=RedisSettings("redis://h:1/0")), "redis takes effect at the next start"),
    ],
)
def test_a_change_is_said_in_one_line(old: Config, new: Config, said: str) -> None:
    assert str(changes(old, new)) == said


def test_a_changed_url_is_said_with_both_addresses() -> None:
    told = str(changes(config(A), config(replace(A, url="http://10.0.0.9:1"))))
    assert told == "endpoint a url http://10.0.0.1:8000 -> http://10.0.0.9:1"


@pytest.mark.parametrize(
    "changed",
    [{"api_key": Secret("s3cret")}, {"hmac_secret": Secret("s3cret")}, {"headers": {"authorization": "s3cret"}}],
)
def test_a_changed_secret_is_named_and_not_shown(changed: dict[str, Any]) -> None:
    told = str(changes(config(A), config(replace(A, **changed))))
    assert told == f"endpoint a {next(iter(changed))} changed"


# Processes


@pytest.mark.parametrize(
    ("running", "wanted", "takers"),
    [
        ([], [("a",)], [None]),
        ([("a",), ("b",)], [("b",), ("a",)], [1, 0]),
        ([("a", "b"), ("c",)], [("c", "d"), ("b", "a")], [1, 0]),
        ([("a",)], [("a",), ("a",), ("b",)], [0, None, None]),
        ([("a",), ("a",), ("b",)], [("b",)], [2]),
        ([("a",)], [("z",)], [0]),
        ([("a",)], [], []),
    ],
)
def test_a_share_goes_to_who_serves_most_of_it(
    running: list[tuple[str, ...]], wanted: list[tuple[str, ...]], takers: list[int | None]
) -> None:
    assert match(running, wanted) == takers


def test_a_spec_has_the_pools_and_endpoints_of_its_share() -> None:
    whole = replace(config(A, B), pools={**config(A, B).pools, "npu": Pool("npu", (replace(A, id="n"),))})
    found = layout(replace(whole, processes=3), Selection(), 1)
    assert found.shares == (("llm/a",), ("llm/b",), ("npu/n",))
    spec = found.spec(("llm/b",), Spec("redis://h", (), {}, number=7))
    assert spec.attach == {"llm": ("b",)}
    assert [pool.name for pool in spec.pools] == ["llm"]
    assert spec.number == 7
    assert Spec.from_json(spec.to_json()) == spec


def test_a_selection_leaves_out_other_pools_and_endpoints() -> None:
    assert layout(config(A, B), Selection(endpoints=("b",)), 1).shares == (("llm/b",),)
    assert layout(config(A, B), Selection(endpoints=(A.url,)), 1).shares == (("llm/a",),)
    with pytest.raises(ConfigError, match="no pool is called npu; there are llm"):
        layout(config(A, B), Selection(pools=("npu",)), 1)


# Workers


POOL = Pool("llm", (A, B))


@pytest.mark.parametrize(
    ("new", "wanted", "expected"),
    [
        (POOL, [A, B], {"kept": ("a", "b")}),
        (replace(POOL, breaker=Breaker(failures=9)), [A, B], {"kept": ("a", "b")}),
        (replace(POOL, retry=Retry(max_attempts=9)), [A, B], {"replaced": ("a", "b")}),
        (POOL, [replace(A, priority=9), B], {"replaced": ("a",), "kept": ("b",)}),
        (POOL, [replace(A, api_key=Secret("k")), B], {"replaced": ("a",), "kept": ("b",)}),
        (POOL, [replace(A, headers={"x": "1"}), B], {"replaced": ("a",), "kept": ("b",)}),
        (POOL, [replace(A, url="http://h:1"), B], {"reconnected": ("a",), "kept": ("b",)}),
        (POOL, [replace(A, max_concurrent=9), B], {"reconnected": ("a",), "kept": ("b",)}),
        (POOL, [A], {"kept": ("a",), "removed": ("b",)}),
        (POOL, [A, B, replace(A, id="c")], {"kept": ("a", "b"), "added": ("c",)}),
        (POOL, [], {"removed": ("a", "b")}),
    ],
)
def test_workers_are_kept_where_nothing_they_use_changed(
    new: Pool, wanted: list[Endpoint], expected: dict[str, tuple[str, ...]]
) -> None:
    assert worker_changes(POOL, [A, B], new, wanted) == WorkerChanges(**expected)


def test_other_connection_settings_mean_new_connections() -> None:
    new = replace(POOL, connection=replace(POOL.connection, idle_discard=9.0))
    assert worker_changes(POOL, [A, B], new, [A, B]).reconnected == ("a", "b")


# Endpoints added at run time


def test_added_endpoints_stand_behind_those_of_the_file() -> None:
    whole, warnings = with_registered(config(A), {"llm": [B], "other": [replace(B, id="x")]})
    assert whole.pools["llm"].endpoints == (A, B)
    assert warnings == ()


def test_of_two_with_one_id_the_files_wins_and_a_server_counts_once() -> None:
    twice = replace(B, id="c", url=A.url)
    whole, warnings = with_registered(config(A), {"llm": [replace(B, id="a"), twice]})
    assert whole.pools["llm"].endpoints == (A,)
    assert [text.split(":")[0] for text in warnings] == [
        "endpoint a, added to pool llm at run time, is left out",
        "endpoint c, added to pool llm at run time, is left out",
    ]


def test_an_id_of_another_pool_is_taken_too() -> None:
    both = replace(config(A), pools={"llm": Pool("llm", (A,)), "npu": Pool("npu")})
    whole, warnings = with_registered(both, {"npu": [replace(B, id="a")]})
    assert whole.pools["npu"].endpoints == ()
    assert len(warnings) == 1


def test_what_a_request_gave_is_read_by_the_files_rules() -> None:
    given = {"id": "c", "url": "HTTP://Host:80/v1/", "max_concurrent": "auto", "capabilities": ["b", "a"]}
    endpoint = endpoint_from("llm", given)
    assert endpoint == Endpoint("c", "http://host:80/v1", max_concurrent="auto", capabilities=("a", "b"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": "http://h"}, "id: is missing"),
        ({"id": "a b", "url": "http://h"}, "id: must be 1 to 64 letters"),
        ({"id": "a", "url": "ftp://h"}, "url: must start with http"),
        ({"id": "a", "url": "http://h", "priority": 11}, "priority: must be a whole number from 1 to 10"),
        ({"id": "a", "url": "http://h", "weight": 1}, "weight: unknown key"),
        ({"id": "a", "url": "http://h", "api_key": "k3y"}, "api_key: secrets are never kept in Redis"),
        ({"id": "a", "url": "http://h", "headers": {"x": "k3y"}}, "headers: secrets are never kept in Redis"),
        ({"id": "a", "url": "http://h", "enabled": False}, "enabled: an added endpoint is enabled"),
    ],
)
def test_what_is_wrong_with_an_added_endpoint_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        endpoint_from("llm", given)
    assert any(str(problem).startswith(f"added endpoint: {said}") for problem in raised.value.problems), raised.value
    assert "k3y" not in str(raised.value)


def test_everything_wrong_is_said_together() -> None:
    with pytest.raises(ConfigError) as raised:
        endpoint_from("llm", {"id": "", "url": "x", "priority": 0, "api_key": "k"})
    assert len(raised.value.problems) == 4
