"""JSON Schema of our dataclasses, so that the description of the API cannot say anything else than the code."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

Schema = dict[str, Any]

_PLAIN: Final[dict[Any, Schema]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}


def schema_of(kind: Any) -> Schema:
    """Dataclasses, tuples, mappings, unions and plain types. Raises TypeError for others."""
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return record({each.name: schema_of(hints[each.name]) for each in dataclasses.fields(kind)})
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(each) for each in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple and len(args) == 2 and args[1] is ...:
        return array(schema_of(args[0]))
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema_of(args[1])}
    raise TypeError(f"{kind!r} has no JSON schema here")


def record(properties: Mapping[str, Schema], *, optional: tuple[str, ...] = ()) -> Schema:
    """An object with exactly these properties, all there but the `optional` ones."""
    needed = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": dict(properties),
        "additionalProperties": False,
        **({"required": needed} if needed else {}),
    }


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}
