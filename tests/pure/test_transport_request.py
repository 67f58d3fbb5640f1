"""What a call looks like on the wire, and which calls never get there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.errors import AttemptFailed
from workers.transport.request import Origin, begin, head_of
from workers.transport.types import Call


def head(method: str = "POST", url: str = "http://h/", **fields: Any) -> str:
    call = Call(method, url, **fields)
    return head_of(call, begin(method, url)[1]).decode()


@pytest.mark.parametrize(
    ("url", "origin", "host", "target"),
    [
        ("http://h", Origin(False, "h", 80), "h", "/"),
        ("HTTP://h:80/a%20b?c=d&e=%22", Origin(False, "h", 80), "h", "/a%20b?c=d&e=%22"),
        ("http://127.0.0.1:8000/v1", Origin(False, "127.0.0.1", 8000), "127.0.0.1:8000", "/v1"),
        ("https://h.example:8443?q", Origin(True, "h.example", 8443), "h.example:8443", "/?q"),
        ("https://[::1]:443/x#part", Origin(True, "::1", 443), "[::1]", "/x"),
        ("http://[fe80::1]:81/", Origin(False, "fe80::1", 81), "[fe80::1]:81", "/"),
        ("http://b\xfccher.example/", Origin(False, "xn--bcher-kva.example", 80), "xn--bcher-kva.example", "/"),
    ],
)
def test_where_a_url_leads(url: str, origin: Origin, host: str, target: str) -> None:
    assert begin("GET", url) == (
        origin,
        f"GET {target} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\n",
    )


@pytest.mark.parametrize(
    "url",
    [
        "", "/v1", "ftp://h/", "http:///x", "http://h:x/", "http://h:99999/", "http://me:secret@h/", "http://h/a b",
        "http://h/a\r\nX: y", "http://h\r\nX: y/", "http://h/\xe9", "http://[::1/", "http://h/\0",
        "http://h/ HTTP/1.1\r\n\r\nGET /", "http://h\\@x/\n",
    ],
)  # fmt: skip
def test_what_is_no_url_is_the_tasks_fault(url: str) -> None:
    with pytest.raises(AttemptFailed) as caught:
        begin("GET", url)
    assert caught.value.kind == "task_error"


@pytest.mark.parametrize("url", ["http://a..b/", "http://" + "a" * 64 + "/"])
def test_a_host_that_cannot_exist_is_the_endpoints_fault(url: str) -> None:
    with pytest.raises(AttemptFailed) as caught:
        begin("GET", url)
    assert caught.value.kind == "connect"


@pytest.mark.parametrize("method", ["", "GE T", "GET /x HTTP/1.1\r\nX:", "CONNECT", "G\xc9T", "GET\n"])
def test_what_is_no_method_is_the_tasks_fault(method: str) -> None:
    with pytest.raises(AttemptFailed, match="not a method"):
        begin(method, "http://h/")


def test_a_head_is_what_the_call_says_and_what_the_connection_needs() -> None:
    assert head(body=b"hello", headers=(("X-A", "caf\xe9"), ("host", "evil"), ("Content-Length", "9"))) == (
        "POST / HTTP/1.1\r\nHost: h\r\nAccept-Encoding: identity\r\nX-A: caf\xe9\r\n"
        "User-Agent: headrace\r\nContent-Length: 5\r\n\r\n"
    )
    assert "Content-Length: 0\r\n" in head()
    assert "Content-Length" not in head("GET")
    assert head(headers=(("user-agent", "me"),)).lower().count("user-agent") == 1


@pytest.mark.parametrize(
    "field",
    [
        ("X-A", "a\r\nX-B: b"), ("X-A", "a\nX-B: b"), ("X-A", "a\r"), ("X-A", "\0"), ("X-A: b\r\nX-C", "c"),
        ("X A", "a"), ("", "a"), ("X-\xc4", "a"), ("X-A:", "a"), ("X-A", "\ud800"), ("X-A", "a\r\n\r\nGET / HTTP/1.1"),
    ],
)  # fmt: skip
def test_a_header_cannot_become_two(field: tuple[str, str]) -> None:
    with pytest.raises(AttemptFailed) as caught:
        head(headers=(("X-Ok", "1"), field))
    assert caught.value.kind == "task_error"
    assert "GET" not in caught.value.detail


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=12)), max_size=4))
def test_whatever_the_headers_it_is_one_head(fields: list[tuple[str, str]]) -> None:
    try:
        lines = head(headers=tuple(fields)).split("\r\n")
    except AttemptFailed:
        return
    sent = {name.lower() for name, _ in fields}
    assert {line.partition(":")[0].lower() for line in lines[1:-2]} <= sent | {
        "host", "accept-encoding", "user-agent", "content-length",
    }  # fmt: skip
    assert not any("\r" in line or "\n" in line for line in lines)
