"""Checks a JSON value against the part of JSON Schema that our own descriptions use: what is described is enforced."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from broker.web.errors import ApiError, invalid

Schema = dict[str, Any]

_IS: Final[dict[str, Callable[[Any], bool]]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_CALLED: Final = {
    "string": "text", "integer": "a whole number", "boolean": "true or false", "array": "a list", "object": "an object",
}  # fmt: skip


def check(value: Any, schema: Schema, name: str = "the body") -> None:
    """Raises ApiError for the first thing that is wrong."""
    if "anyOf" in schema:
        _check_any(value, schema["anyOf"], name)
        return
    if "enum" in schema and value not in schema["enum"]:
        raise invalid(f"{name}: must be one of {', '.join(map(str, schema['enum']))}")
    kind = schema.get("type")
    if kind is not None and not _IS[kind](value):
        raise invalid(f"{name}: must be {_CALLED[kind]}")
    if kind == "string":
        _check_text(value, schema, name)
    elif kind == "integer":
        least, most = schema.get("minimum", 0), schema.get("maximum", 1 << 53)
        if not least <= value <= most:
            raise invalid(f"{name}: must be from {least} to {most}")
    elif kind == "array":
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30):
            raise invalid(f"{name}: must have {schema.get('minItems', 0)} to {schema.get('maxItems')} items")
        for at, item in enumerate(value):
            check(item, schema["items"], f"{name}[{at}]")
    elif kind == "object":
        _check_object(value, schema, name)


def _check_any(value: Any, schemas: list[Schema], name: str) -> None:
    failures = []
    for schema in schemas:
        try:
            check(value, schema, name)
        except ApiError as error:
            failures.append(str(error).partition(": ")[2])
        else:
            return
    raise invalid(f"{name}: {', or '.join(failures)}")


def _check_text(value: str, schema: Schema, name: str) -> None:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 30):
        raise invalid(f"{name}: must be {schema.get('minLength', 0)} to {schema.get('maxLength')} characters long")
    pattern = schema.get("pattern")
    if pattern is not None and not re.fullmatch(pattern.removeprefix("^").removesuffix("$"), value, re.ASCII):
        raise invalid(f"{name}: {value[:80]!r} must match {pattern}")


def _check_object(value: dict[str, Any], schema: Schema, name: str) -> None:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for wanted in schema.get("required", ()):
        if wanted not in value:
            raise invalid(f"{name}: {wanted} is missing")
    for key, item in value.items():
        if key in known:
            check(item, known[key], key)
        elif others is False:
            told = f"known here: {', '.join(known)}" if known else "nothing is expected"
            raise invalid(f"unknown key {key[:80]!r} in {name}; {told}")
        elif isinstance(others, dict):
            check(item, others, f"{name}.{key[:80]}")
    if len(value) > schema.get("maxProperties", 1 << 30):
        raise invalid(f"{name}: must have at most {schema['maxProperties']} entries")
