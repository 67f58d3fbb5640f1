"""What every transport checks in an answer, whichever library brought it."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable
from typing import Final

from workers.errors import AttemptFailed
from workers.transport.types import Answer, Call

# The events that end a stream: OpenAI completions say [DONE], OpenAI responses and Anthropic messages name it.
_LAST_TYPES: Final = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})
_BODILESS: Final = frozenset({204, 304})


def plain_headers(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names lower-cased, values of a repeated name joined by ", "."""
    headers: dict[str, str] = {}
    for name, value in pairs:
        lowered = name.lower()
        headers[lowered] = f"{headers[lowered]}, {value}" if lowered in headers else value
    return headers


def has_body(call: Call, status: int) -> bool:
    return call.method != "HEAD" and status not in _BODILESS and status >= 200


def check_head(call: Call, status: int, headers: dict[str, str]) -> None:
    """Refuse what must not be read. Raises AttemptFailed: `malformed`, `too_large`."""
    if status == 101:
        raise AttemptFailed("malformed", "the endpoint switched protocols without being asked", headers=headers)
    if not 200 <= status < 300 or not has_body(call, status):
        return
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        detail = f"content-encoding {coding!r} although 'identity' was asked for"
        raise AttemptFailed("malformed", detail, status=status, headers=headers)
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > call.max_bytes:
        raise too_large(call, status, headers)


def too_large(call: Call, status: int, headers: dict[str, str]) -> AttemptFailed:
    size = headers.get("content-length")
    detail = f"an answer of {f'{size} bytes' if size else 'unknown size'}, over the limit of {call.max_bytes}"
    return AttemptFailed("too_large", detail, status=status, headers=headers)


class Collector:
    """The body so far. `add` returns False when no more must be read: over the limit, in an answer that is no success.

    Raises AttemptFailed `too_large` for a success over the limit.
    """

    __slots__ = ("_call", "_chunks", "_headers", "_size", "_status", "whole")

    def __init__(self, call: Call, status: int, headers: dict[str, str]) -> None:
        self._call, self._status, self._headers = call, status, headers
        self._chunks: list[bytes] = []
        self._size = 0
        self.whole = True

    def add(self, chunk: bytes) -> bool:
        self._size += len(chunk)
        if self._size > self._call.max_bytes:
            if 200 <= self._status < 300:
                raise too_large(self._call, self._status, self._headers)
            self._chunks.append(chunk[: len(chunk) - (self._size - self._call.max_bytes)])
            self.whole = False
            return False
        self._chunks.append(chunk)
        return True

    def body(self) -> bytes:
        if not 200 <= self._status < 300 and self._headers.get("content-encoding", "identity").lower() != "identity":
            return b""
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)


def check_whole(answer: Answer) -> Answer:
    """The answer, unless it is an event stream that stops before its last event. Raises AttemptFailed `cut`."""
    streamed = answer.headers.get("content-type", "").lower().startswith("text/event-stream")
    if streamed and 200 <= answer.status < 300 and not stream_is_whole(answer.body):
        detail = f"the event stream stopped before its last event ({len(answer.body)} bytes)"
        raise AttemptFailed("cut", detail, status=answer.status, headers=answer.headers)
    return answer


def stream_is_whole(body: bytes) -> bool:
    """Does this event stream end with the event that says it is done (`data: [DONE]`, or its like)?

    Answers of other protocols' streams, which have no such event, are cut by this measure.
    """
    data = b"\n".join(reversed([line[5:].lstrip() for line in _last_event(body) if line.startswith(b"data:")]))
    if data.rstrip() == b"[DONE]":
        return True
    try:  # the name alone will not do: the event itself may be cut
        event = jsonlib.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(event, dict) and event.get("type") in _LAST_TYPES


def _last_event(body: bytes) -> list[bytes]:
    """Its lines, last one first; comments left out."""
    lines: list[bytes] = []
    for line in reversed(body.splitlines()):
        if line and not line.startswith(b":"):
            lines.append(line)
        elif lines and not line:
            break
    return lines
