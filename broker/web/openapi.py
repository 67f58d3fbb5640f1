"""The description of the API, OpenAPI 3.1, made from the table of operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from broker import __version__
from broker.web.operations import PATH, Operation, Param, Schema
from broker.web.schema import record

TEXT: Final[Schema] = {"type": "string"}
ERROR: Final = record({"error": record({"code": TEXT, "message": TEXT})})
MEANING: Final = {
    400: "A parameter or the body is not as described",
    401: "The bearer token is missing or wrong",
    403: "No token is set, and the request may come from another site's page",
    404: "No such pool, endpoint or task",
    409: "It cannot be done as things stand; the message says why",
    413: "The body is too large",
    415: "The body is not JSON",
    503: "Redis cannot be reached or must not be used",
}
YES: Final = {"enum": [True]}
PLAIN: Final = (
    ("/livez", "Whether the server runs", "application/json", record({"live": YES}), (403,)),
    ("/readyz", "Whether Redis can be reached and used", "application/json", record({"ready": YES}), (403, 503)),
    ("/metrics", "For Prometheus", "text/plain", TEXT, (401, 403, 503)),
)


def describe(operations: Iterable[Operation]) -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    for path, about, kind, schema, errors in PLAIN:
        name = path.strip("/")
        told: dict[str, Any] = {"operationId": name, "summary": about, "tags": ["server"]}
        told["responses"] = {"200": {"description": about, "content": {kind: {"schema": schema}}}, **_errors(errors)}
        if name != "metrics":
            told["security"] = []
        paths[path] = {"get": told}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "headrace",
            "version": __version__,
            "description": "Looking changes nothing; times are Unix seconds by the Redis server's clock.",
        },
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    parts = operation.path.split("/")
    told: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.about,
        "tags": [parts[2]],
        "responses": {
            str(operation.status): {
                "description": operation.about,
                "content": {"application/json": {"schema": operation.answer}},
            },
            **_errors(sorted({400, 401, 403, 503, *operation.errors, *_of_body(operation)})),
        },
    }
    parameters = [_in_path(name) for name in operation.path_names] + [_in_query(each) for each in operation.query]
    if parameters:
        told["parameters"] = parameters
    if operation.body is not None:
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": operation.body}}}
    return told


def _of_body(operation: Operation) -> tuple[int, ...]:
    return () if operation.method == "GET" else (413, 415)


def _errors(statuses: Iterable[int]) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {
        str(status): {"description": MEANING[status], "content": {"application/json": {"schema": schema}}}
        for status in statuses
    }


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": PATH[name]}


def _in_query(param: Param) -> dict[str, Any]:
    schema: Schema = {"type": "string"}
    if param.kind == "flag":
        schema = {"type": "boolean"}
    elif param.kind == "whole":
        schema = {"type": "integer", "minimum": param.least, "maximum": param.most}
    elif param.words:
        schema = {"type": "string", "enum": list(param.words)}
    if param.default not in (None, ""):
        schema["default"] = param.default
    return {"name": param.name, "in": "query", "required": False, "description": param.about, "schema": schema}
