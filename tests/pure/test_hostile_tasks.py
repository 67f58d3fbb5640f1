"""What a task may not say is refused where it is made and where it is read, whoever wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.errors import InvalidTask
from broker.rqjob import decode_data
from broker.task import ALLOWED_HEADERS, Request, check_headers
from tests.support.hostile import HEADERS, OWN_PATHS, PATHS, call

LIMIT = 262_144


def refusal(make: Any) -> str:
    with pytest.raises(InvalidTask) as caught:
        make()
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 700
    return text


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_might_lead_elsewhere(path: str) -> None:
    assert "path" in refusal(lambda: Request("GET", path))
    assert "path" in refusal(lambda: decode_data(call(path), LIMIT))


@pytest.mark.parametrize("path", OWN_PATHS)
def test_an_odd_path_of_the_endpoint_itself(path: str) -> None:
    assert Request("GET", path).path == path


@pytest.mark.parametrize("headers", HEADERS, ids=lambda headers: next(iter(headers)).strip() or "empty")
def test_a_header_that_is_not_the_tasks_to_set(headers: dict[str, Any]) -> None:
    assert "header" in refusal(lambda: Request("GET", "/", headers=headers))
    assert "header" in refusal(lambda: decode_data(call(headers=headers), LIMIT))


def test_headers_that_a_task_may_set() -> None:
    names = [*ALLOWED_HEADERS, "x-request-id", "x-trace", "X-Stainless-Arch", "x-tenant"]
    assert check_headers(dict.fromkeys(names, "v")) == {name.lower(): "v" for name in names}


@pytest.mark.parametrize("method", ["CONNECT", "TRACE", "get", "POST ", "GET /x HTTP/1.1\r\nX:", "", 1, None])
def test_a_method_that_is_none(method: Any) -> None:
    refusal(lambda: Request(method, "/"))
    data = json.dumps(["workers.jobs.request", None, [], {"method": method, "path": "/"}]).encode()
    refusal(lambda: decode_data(data, LIMIT))


@pytest.mark.parametrize("name", ["url", "endpoint", "base_url", "host", "api_key", "proxies", "verify", "follow"])
def test_no_other_argument_is_taken(name: str) -> None:
    assert "unknown argument" in refusal(lambda: decode_data(call(**{name: "http://evil.invalid"}), LIMIT))
