"""Reads what a request carries: a small JSON object, or nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request

from broker.web.errors import ApiError, invalid
from broker.web.operations import PATH, Asked, Operation
from broker.web.validate import check

MOST_BYTES: Final = 1 << 20  # a body; enough for some 20,000 task ids
NOTHING: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}


async def read(operation: Operation, request: Request) -> Asked:
    """Raises ApiError."""
    for name in operation.path_names:
        if "pattern" in PATH[name]:  # another name that cannot be is not found
            check(request.path_params[name], PATH[name], name)
    query = {each.name: each.read(request.query_params.get(each.name)) for each in operation.query}
    data = b"" if operation.method == "GET" else await _bytes(request)
    return Asked(dict(request.path_params), query, _object(operation, request, data))


async def _bytes(request: Request) -> bytes:
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MOST_BYTES:
                raise ApiError(413, "too_large", f"the body is larger than {MOST_BYTES} bytes")
            parts.append(part)
    except ClientDisconnect:
        raise invalid("the connection was closed within the body") from None
    return b"".join(parts)


def _number(text: str) -> int | float:
    """JSON has one kind of number: 5.0 is a whole one."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _object(operation: Operation, request: Request, data: bytes) -> Mapping[str, Any]:
    if not data:
        if operation.body is not None and operation.body.get("required"):
            raise invalid("a JSON object is needed as the body")
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "not_json", "the body must be JSON, with Content-Type: application/json")
    try:
        value = json.loads(data, parse_float=_number)
    except (ValueError, RecursionError) as error:  # ValueError: also what is no UTF-8
        raise invalid(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(f"the body must be a JSON object, not {type(value).__name__}")
    check(value, operation.body if operation.body is not None else NOTHING)
    return value
