"""A JSON schema as llguidance is to read it: `prepared`.

White space between the tokens of JSON is bounded, since a model that may write it for ever does. An
unsupported keyword is an error where the caller is strict; otherwise the schema is taken without
it, and the check of the grammar says so.
"""

import json
from typing import Any

from quire.base.errors import RequestError
from quire.render.lark import OPTIONS, WHITESPACE

MAX_SCHEMA_CHARS = 1 << 18
MAX_DEPTH = 64

# Keywords whose value is a schema or a list of them, and those whose value has schemas by name.
_SCHEMAS = (
    "additionalProperties", "unevaluatedProperties", "propertyNames", "contains",
    "additionalItems", "unevaluatedItems", "not", "if", "then", "else", "items", "prefixItems",
    "allOf", "anyOf", "oneOf",
)  # fmt: skip
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

Schema = dict[str, Any]


def prepared(
    schema: object,
    field: str,
    *,
    strict: bool = False,
    whitespace: str | None = WHITESPACE,
    closed: bool = False,
) -> Schema:
    """Return a schema with llguidance's options. Raises RequestError for what is no schema, or too
    large.

    schema: an object, true, or a JSON text of these. whitespace: a regular expression of what may
    stand between tokens; None is nothing. closed: objects have no properties but those named.
    """
    found = _parsed(schema, field)
    check_size(found, field)
    if closed:
        found = _closed(found)
    options: Schema = {"lenient": not strict, "whitespace_flexible": whitespace is not None}
    if whitespace is not None:
        options["whitespace_pattern"] = whitespace
    return found | {OPTIONS: options}


def check_size(value: object, field: str) -> None:
    """Raise RequestError for JSON that is too deep or too long."""
    left = MAX_SCHEMA_CHARS
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        left -= sum(len(one) if isinstance(one, str) else 1 for one in level)
        if left < 0:
            raise RequestError(f"{field} has more than {MAX_SCHEMA_CHARS} characters.", field)
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner.extend(one.values())
                left -= sum(len(str(name)) for name in one)
            elif isinstance(one, list | tuple):
                inner.extend(one)
        level = inner
        if not level:
            return
    raise RequestError(f"{field} is nested more than {MAX_DEPTH} levels deep.", field)


def parsed_json(text: str, field: str) -> object:
    """Return what a JSON text says. Raises RequestError."""
    if len(text) > MAX_SCHEMA_CHARS:
        raise RequestError(f"{field} has more than {MAX_SCHEMA_CHARS} characters.", field)
    try:
        return json.loads(text)
    except RecursionError:
        raise RequestError(f"{field} is nested too deep.", field) from None
    except ValueError as error:
        raise RequestError(f"{field} is no JSON: {error}.", field) from None


def _parsed(schema: object, field: str) -> Schema:
    if isinstance(schema, str):
        schema = parsed_json(schema, field)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        kind = type(schema).__name__
        raise RequestError(f"{field}: a JSON schema must be an object, got {kind}.", field)
    return schema


def _closed(schema: Schema) -> Schema:
    """Return a schema whose objects have no properties but those named."""
    made = dict(schema)
    for name in _SCHEMAS:
        value = made.get(name)
        if isinstance(value, dict):
            made[name] = _closed(value)
        elif isinstance(value, list):
            made[name] = [_closed(one) if isinstance(one, dict) else one for one in value]
    for name in _BY_NAME:
        value = made.get(name)
        if isinstance(value, dict):
            made[name] = {
                key: _closed(one) if isinstance(one, dict) else one for key, one in value.items()
            }
    if "properties" in made or "patternProperties" in made:
        made.setdefault("additionalProperties", False)
    return made
