"""What hostile producers send: paths, headers and pickles that must go nowhere, and jobs written past every check."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

EVIL = "evil.invalid"

# Refused wherever they come in.
PATHS = (
    f"//{EVIL}/x", f"///{EVIL}/x", f"http://{EVIL}/x", f"https:{EVIL}", f"HTTP://{EVIL}", f"\\\\{EVIL}\\x",
    f"/\\{EVIL}/x", f"@{EVIL}/x", f":80@{EVIL}/x", f".{EVIL}/x", "x", "", "?x", "*", f"/x://{EVIL}", "/a/../../b",
    "/a/%2e%2e/b", "/..%2fb",
    "/%252e%252e/b", "/a/..;/b", "/a%5c..%5cb", "/a b", "/a\tb", "/a\r\nHost: x", "/a\nX-A: b",
    "/a HTTP/1.1\r\n\r\nGET /",
    "/a\0b", "/a%00b", "/a%0d%0aX:b", "/é", "/a#b", "/" + "a" * 5000,
)  # fmt: skip

# Odd, but paths of the endpoint itself.
OWN_PATHS = (f"/@{EVIL}/x", f"/%2f%2f{EVIL}/x", f"/:80@{EVIL}", f"/?url=http://{EVIL}", f"/x?a=//{EVIL}@b")

HEADERS: tuple[dict[str, Any], ...] = (
    {"Host": EVIL}, {"host": EVIL}, {"Authorization": "Bearer x"}, {"Cookie": "a=b"}, {"Content-Length": "0"},
    {"Transfer-Encoding": "chunked"}, {"Connection": "close"}, {"Keep-Alive": "1"}, {"Upgrade": "h2c"},
    {"TE": "trailers"},
    {"Trailer": "X-A"}, {"Expect": "100-continue"}, {"Proxy-Authorization": "x"}, {"Proxy-Anything": "x"},
    {"Accept-Encoding": "gzip"}, {"Idempotency-Key": "x"}, {"X-Task-Attempt": "9"}, {"X-Signature": "x"},
    {"X-Timestamp": "1"}, {"X-Api-Key": "x"}, {"Api-Key": "x"},
    {"X-Forwarded-For": "127.0.0.1"}, {"Forwarded": "for=x"},
    {"X-Forwarded-Host": EVIL}, {"X-Original-URL": "/admin"}, {"X-Rewrite-URL": "/admin"},
    {"Range": "bytes=0-1"},
    {"X-HTTP-Method-Override": "DELETE"},
    {"X-Real-IP": "127.0.0.1"}, {"Content_Length": "0"},
    {":authority": EVIL},
    {"X-Real_IP": "127.0.0.1"}, {"X_Real_IP": "127.0.0.1"}, {"X-Api_Key": "x"}, {"X-Access_Token": "x"}, {"X-A_B": "x"},
    {"X-HTTP_Method_Override": "PUT"}, {"X-Client_IP": "x"}, {"X-Amz_Date": "x"}, {"X-Task_Attempt": "9"},
    {"X-Real.IP": "127.0.0.1"}, {"X-Real!IP": "127.0.0.1"}, {"X-Remote-User": "root"}, {"X-WebAuth-User": "root"},
    {"X-Remote-Addr": "127.0.0.1"}, {"X-Scheme": "https"}, {"X-URL-Scheme": "https"}, {"X-Envoy-Original-Path": "/x"},
    {"X-JWT-Assertion": "x"}, {"X-Middleware-Subrequest": "x"}, {"X-Amzn-Oidc-Identity": "x"}, {"X-Vault-Token": "x"},
    {"X-Client-Cert": "x"}, {"X-CSRF-Token": "x"}, {"X-CSRFToken": "x"}, {"X-XSRF-Token": "x"}, {"X-CSRF": "x"},
    {"X-XSRF": "x"}, {"X-Session-Cookie": "x"}, {"X-Goog-Api-Key": "x"}, {"X-Consumer-ID": "x"},
    {"X-A": "a\r\nX-B: b"}, {"X-A": "a\nb"}, {"X-A": "a\rb"}, {"X-A": "a\0b"}, {"X-A": "é"}, {"X-A": 1}, {"X-A": None},
    {"X-A\r\nX-B": "c"}, {"X-A:": "b"}, {"X A": "b"}, {"": "b"}, {"X-É": "b"}, {"X-A": "b", "x-a": "c"},
    {f"X-{n}": "v" for n in range(40)}, {"X-A": "v" * 10_000},
)  # fmt: skip


class Canary:
    """Its unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str, int], int], tuple[str, int]]:
        return os.open, (str(self.path), os.O_CREAT | os.O_WRONLY)


def pickles(path: Path) -> dict[str, bytes]:
    """Calls of our own function whose reading would run the canary, or eat memory: by name."""
    canary, name = Canary(path), "workers.jobs.request"
    found = {}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        call = (name, None, ("POST", "/"), {"json": canary})
        found[f"argument-{protocol}"] = pickle.dumps(call, protocol)
    found["packed"] = zlib.compress(found["argument-4"])
    found["instance"] = pickle.dumps((name, canary, (), {}), 4)
    found["function"] = pickle.dumps((canary, None, (), {}), 4)
    found["whole"] = pickle.dumps(canary, 4)
    found["memo-bomb"] = b"]q\x00" + b"(h\x00h\x00h\x00h\x00lq\x00" * 50 + b"."
    found["deep"] = b"(" * 100_000 + b"."
    found["long-integer"] = b"\x8b\xff\xff\xff\x7f."
    found["endless-text"] = b"X\xff\xff\xff\xff."
    found["packed-zeros"] = zlib.compress(bytes(200_000_000), 9)
    return found


def call(path: str = "/inference", **kwargs: Any) -> bytes:
    """The field `data` of a request, as our own producers write it, unchecked."""
    return json.dumps(["workers.jobs.request", None, [], {"method": "POST", "path": path, **kwargs}]).encode()


def write_job(client: redis.Redis, pool: str, task_id: str, data: bytes, **fields: bytes | str) -> str:
    """A job as RQ has it, written past RQ and headrace alike."""
    now = "2026-01-01T00:00:00.000000Z"
    row: dict[Any, Any] = {
        "created_at": now, "enqueued_at": now, "status": "queued", "origin": pool, "data": data, **fields,
    }  # fmt: skip
    client.hset(f"rq:job:{task_id}", mapping=row)
    client.sadd("rq:queues", f"rq:queue:{pool}")
    client.rpush(f"rq:queue:{pool}", task_id)
    return task_id
