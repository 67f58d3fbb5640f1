"""What every system does for one task: POST a payload of 500 bytes to the endpoint, give back the answer of 328 bytes.

Only the standard library is needed; peers in environments of their own import this too.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import threading
from typing import Any
from urllib.parse import urlsplit

PATH = "/v1/chat/completions"
PAYLOAD_BYTES = 500
ANSWER = json.dumps(
    {
        "id": "chatcmpl-bench",
        "object": "chat.completion",
        "model": "bench",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "word " * 20}}],
        "usage": {"prompt_tokens": 96, "completion_tokens": 28, "total_tokens": 124},
    },
    separators=(",", ":"),
)

_local = threading.local()
_sessions: dict[asyncio.AbstractEventLoop, Any] = {}


def payload(number: int) -> dict[str, Any]:
    """The body of task `number`; 500 bytes of JSON whatever the number, and no two alike for a compressor."""
    bare = {"n": f"{number:09d}", "model": "bench", "max_tokens": 28, "messages": [{"role": "user", "content": ""}]}
    room = PAYLOAD_BYTES - len(encode(bare))
    bare["messages"] = [{"role": "user", "content": (f"question {number * 7919 % 99991} about pumps. " * 20)[:room]}]
    return bare


def encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def endpoint_url() -> str:
    """Of the first endpoint; the peers serve one."""
    return os.environ["BENCH_ENDPOINTS"].split(",")[0]


def redis_url() -> str:
    return os.environ["BENCH_REDIS"]


def slots() -> int:
    """Requests in flight that a worker may have."""
    return int(os.environ.get("BENCH_SLOTS", "256"))


def post(body: dict[str, Any]) -> str:
    """Blocking, over a kept connection of this thread: http.client is the leanest client there is for that."""
    connection = getattr(_local, "connection", None)
    if connection is None:
        address = urlsplit(endpoint_url())
        connection = _local.connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    try:
        connection.request("POST", PATH, encode(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text: str = answer.read().decode()
    except (http.client.HTTPException, OSError):
        _local.connection = None
        raise
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}")
    return text


async def apost(body: dict[str, Any]) -> str:
    """On the event loop, over pyreqwest if it is installed (a third of aiohttp's time), else over aiohttp."""
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        _sessions[loop] = _open_session()
    text: str = await _sessions[loop](encode(body))
    return text


def async_client() -> str:
    """The name of what `apost` uses."""
    try:
        import pyreqwest  # noqa: F401  # only asked whether it is there
    except ImportError:
        return "aiohttp"
    return "pyreqwest"


def _open_session() -> Any:
    url, headers = endpoint_url() + PATH, {"content-type": "application/json"}
    if async_client() == "pyreqwest":
        from pyreqwest.client import ClientBuilder

        client = ClientBuilder().no_proxy().http1_only().build()

        async def over_pyreqwest(body: bytes) -> str:
            answer = await client.post(url).headers(headers).body_bytes(body).build().send()
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}")
            return str(await answer.text())

        return over_pyreqwest
    import aiohttp

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def over_aiohttp(body: bytes) -> str:
        async with session.post(url, data=body, headers=headers) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}")
            return await answer.text()

    return over_aiohttp
