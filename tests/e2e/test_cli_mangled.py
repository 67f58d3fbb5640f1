"""What others wrote into Redis is shown as unset where it cannot be read: the commands go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis import Redis

from broker import Broker, Request
from broker.cli.doctorredis import _judge_server
from tests.support.commands import headrace

pytestmark = pytest.mark.e2e
TIMES = ("x_born", "x_dl", "x_run", "started_at", "ended_at")


@pytest.mark.parametrize("mangled", ["1e300", "9" * 20, "-99999999999999999", "nan"])
def test_a_time_that_is_none(tmp_path: Path, redis_url: str, mangled: str) -> None:
    with Broker(redis_url) as broker, Redis.from_url(redis_url) as redis:
        task = broker.enqueue("llm", Request("POST", "/x", json={}), deadline=600)
        redis.hset(f"rq:job:{task.id}", mapping=dict.fromkeys(TIMES, mangled))
        for words in (("task", "show", task.id), ("task", "explain", task.id)):
            told = headrace(*words, "--redis", redis_url, cwd=tmp_path)
            assert (told.returncode, told.stderr) == (0, "")
            assert "fault of headrace" not in told.stdout


def test_a_dead_letter_with_a_time_that_is_none(tmp_path: Path, redis_url: str) -> None:
    with Broker(redis_url) as broker, Redis.from_url(redis_url) as redis:
        task = broker.enqueue("llm", Request("POST", "/x", json={}))
        redis.lrem("rq:queue:llm", 0, task.id)
        redis.hset(f"rq:job:{task.id}", mapping={"status": "failed", "x_out": "dead", **dict.fromkeys(TIMES, "1e300")})
        redis.zadd("rq:failed:llm", {task.id: 4e9})
        redis.sadd("rq:x:pools", "llm")
        for words in (("dead", "list"), ("dead", "show", task.id)):
            told = headrace(*words, "--redis", redis_url, cwd=tmp_path)
            assert (told.returncode, told.stderr) == (0, "")
            assert task.id in told.stdout


def test_doctor_reads_an_odd_info() -> None:
    odd = {"redis_version": "7.2.0", "maxmemory": "lots", "used_memory": [1], "aof_enabled": 1}
    assert [each.word for each in _judge_server("redis://h", odd)] == ["ok"]
