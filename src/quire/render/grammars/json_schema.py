"""Prepare a JSON schema for llguidance (`prepared`).

White space between JSON tokens is limited, because a model that may repeat it for ever sometimes
does. An unsupported keyword is an error if `strict` is set. Otherwise llguidance ignores it, and
the check of the grammar returns a warning.
"""

import json
import math
from collections.abc import Callable
from typing import Any

from quire.base.errors import RequestError
from quire.render.grammars.lark import OPTIONS, WHITESPACE

MAX_SCHEMA_CHARS = 1 << 18
MAX_DEPTH = 64

# Keywords whose value is a schema or a list of schemas; and keywords that map names to schemas.
_SCHEMAS = (
    "additionalProperties", "unevaluatedProperties", "propertyNames", "contains",
    "additionalItems", "unevaluatedItems", "not", "if", "then", "else", "items", "prefixItems",
    "allOf", "anyOf", "oneOf",
)  # fmt: skip
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
_DIRECTIONS = ((_BOUNDS[0], _BOUNDS[1], 1), (_BOUNDS[1], _BOUNDS[0], -1))
STEP, RELATIVE_STEP = 1e-6, 2.0**-40  # above the rounding of llguidance, which drops digits

Schema = dict[str, Any]


def prepared(
    schema: object,
    field: str,
    *,
    strict: bool = False,
    whitespace: str | None = WHITESPACE,
    closed: bool = False,
) -> Schema:
    """Return the schema with llguidance's options.

    schema: an object, true, or one of these as JSON text.
    strict: whether an unsupported keyword is an error.
    whitespace: regular expression for white space between tokens; None allows no white space.
    closed: whether objects may have only the properties that the schema names.
    Raises RequestError if the schema is invalid or too large."""
    found = _parsed(schema, field)
    check_size(found, field)
    if closed:
        found = _mapped(found, _close)
    found = _with_inner_bounds(found)
    options: Schema = {"lenient": not strict, "whitespace_flexible": whitespace is not None}
    if whitespace is not None:
        options["whitespace_pattern"] = whitespace
    return found | {OPTIONS: options}


def check_size(value: object, field: str) -> None:
    """Raise RequestError if JSON is nested too deep or too long."""
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
    """Parse JSON text of bounded length. Raises RequestError."""
    if len(text) > MAX_SCHEMA_CHARS:
        raise RequestError(f"{field} has more than {MAX_SCHEMA_CHARS} characters.", field)
    try:
        return json.loads(text)
    except RecursionError:
        raise RequestError(f"{field} is nested too deep.", field) from None
    except ValueError as error:
        raise RequestError(f"{field} is not JSON: {error}.", field) from None


def _parsed(schema: object, field: str) -> Schema:
    if isinstance(schema, str):
        schema = parsed_json(schema, field)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        kind = type(schema).__name__
        raise RequestError(f"{field}: a JSON schema must be an object, got {kind}.", field)
    return schema


def _mapped(schema: Schema, change: Callable[[Schema], None]) -> Schema:
    """Return a copy of a schema after calling `change` on it and on each schema within."""
    made = dict(schema)
    for name in _SCHEMAS:
        value = made.get(name)
        if isinstance(value, dict):
            made[name] = _mapped(value, change)
        elif isinstance(value, list):
            made[name] = [_mapped(one, change) if isinstance(one, dict) else one for one in value]
    for name in _BY_NAME:
        value = made.get(name)
        if isinstance(value, dict):
            made[name] = {
                key: _mapped(one, change) if isinstance(one, dict) else one
                for key, one in value.items()
            }
    change(made)
    return made


def _close(schema: Schema) -> None:
    """Forbid properties that an object's schema does not name."""
    if "properties" in schema or "patternProperties" in schema:
        schema.setdefault("additionalProperties", False)


def _with_inner_bounds(schema: Schema) -> Schema:
    """Replace bounds that llguidance 1.9 gets wrong: for 3 < x < 3.75 it accepts 3.

    The bug concerns a whole exclusive bound with an opposite bound less than 1 away. Such a bound
    moves inwards by STEP and becomes inclusive, so values within STEP of it are lost. The function
    compares bounds of the whole document, because `allOf` and `$ref` can combine them."""
    bounds: dict[str, set[float]] = {name: set() for pair in _BOUNDS for name in pair}

    def collect(one: Schema) -> None:
        for name, found in bounds.items():
            if (bound := _number(one.get(name))) is not None:
                found.add(bound)

    def move(one: Schema) -> None:
        for (inclusive, exclusive), opposite, sign in _DIRECTIONS:
            bound = _number(one.get(exclusive))
            if bound is None or not bound.is_integer():
                continue
            others = (other for name in opposite for other in bounds[name])
            if any(0 < sign * (other - bound) < 1 for other in others):
                del one[exclusive]
                moved = bound + sign * max(STEP, abs(bound) * RELATIVE_STEP)
                before = _number(one.get(inclusive))
                one[inclusive] = (
                    moved if before is None else sign * max(sign * moved, sign * before)
                )

    _mapped(schema, collect)
    return _mapped(schema, move)


def _number(value: object) -> float | None:
    """Return a finite number as float; None for any other value."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an int outside the range of floats
        return None
