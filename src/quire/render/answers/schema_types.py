"""Find the JSON types that a schema allows, from its outline: type, const, enum and references."""

import json
from collections.abc import Mapping
from typing import Any

from quire.render.answers.json_reader import strict_json

MAX_REFERENCES = 32
_NUMBERS = frozenset(("integer", "number"))
_TYPED = frozenset(("type", "const", "enum"))


def property_schema(parameters: Mapping[str, Any] | None, name: str) -> object:
    """Return the schema of one property; True if the parameters do not mention it."""
    parameters = parameters or {}
    properties = resolved(parameters, parameters).get("properties")
    return properties.get(name, True) if isinstance(properties, Mapping) else True


def resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema, or the schema that its `$ref` points to; {} without an object."""
    for _ in range(MAX_REFERENCES):
        if not (isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str)):
            break
        schema = _target(schema["$ref"], root)
    return schema if isinstance(schema, Mapping) else {}


def is_text(schema: object, root: Mapping[str, Any]) -> bool:
    """Return whether the schema allows only strings."""
    types = types_of(schema, root)
    return types is not None and types == frozenset(("string",))


def alternatives(schema: object, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the leaf schemas of nested `anyOf` and `oneOf`, each once."""
    found, left, seen = list[Mapping[str, Any]](), [schema], set[int]()
    for one in left:
        one = resolved(one, root)
        if id(one) in seen:
            continue
        seen.add(id(one))
        several = next(
            (one[key] for key in ("anyOf", "oneOf") if isinstance(one.get(key), list)), None
        )
        if several is None or not _TYPED.isdisjoint(one):
            found.append(one)
        else:
            left += several
    return found


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the names of the allowed types; None if the schema allows any type."""
    each = [_own_types(one) for one in alternatives(schema, root)]
    known = [one for one in each if one is not None]
    return frozenset().union(*known) if len(known) == len(each) else None


def _own_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(filter(lambda one: isinstance(one, str), named))
    if "const" in schema:
        return frozenset((type_of(schema["const"]),))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, schema["enum"]))
    return None


def type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def typed(text: str, types: frozenset[str] | None) -> str:
    """Return an unquoted value as JSON text of one of the allowed types.

    A value of no allowed type becomes a JSON string, so that no text is lost."""
    solid = text.strip()
    word = solid.lower()
    if types is not None:
        if "boolean" in types and word in ("true", "false"):
            return word
        if "null" in types and word in ("null", "none"):
            return "null"
    try:
        found = type_of(strict_json(solid))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types is None or found in types or (found in _NUMBERS and types & _NUMBERS):
        return solid
    return json.dumps(text, ensure_ascii=False)


def _target(reference: str, root: Mapping[str, Any]) -> object:
    """Return the target of a reference within the schema; None if there is none."""
    found: object = root
    path, *steps = reference.split("/")
    if path != "#":
        return None
    for step in steps:
        if not isinstance(found, Mapping):
            return None
        found = found.get(step.replace("~1", "/").replace("~0", "~"))
    return found
