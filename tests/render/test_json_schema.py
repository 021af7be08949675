"""Schemas as they are passed to llguidance: size limits, options and closed properties."""

from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.render.grammars.json_schema import MAX_DEPTH, MAX_SCHEMA_CHARS, check_size, prepared
from quire.render.grammars.lark import WHITESPACE


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"items": found}
    return found


def test_options_in_the_schema_of_a_client_are_replaced() -> None:
    given = {"type": "object", "x-guidance": {"lenient": False, "item_separator": ".*"}}
    assert prepared(given, "f")["x-guidance"] == {
        "lenient": True, "whitespace_flexible": True, "whitespace_pattern": WHITESPACE,
    }  # fmt: skip
    compact = prepared("true", "f", strict=True, whitespace=None)
    assert compact == {"x-guidance": {"lenient": False, "whitespace_flexible": False}}


def test_order_of_keys_is_kept() -> None:
    for given in ('{"properties": {"b": {}, "a": {}}}', {"properties": {"b": {}, "a": {}}}):
        assert list(prepared(given, "f", closed=True)["properties"]) == ["b", "a"]


def test_closed_schemas_forbid_additional_properties() -> None:
    given = {
        "properties": {"a": {"properties": {"properties": {"type": "string"}}}, "b": True},
        "items": [{"patternProperties": {}}],
        "$defs": {"d": {"properties": {}, "additionalProperties": {"properties": {}}}},
        "enum": [{"properties": {}}],
    }
    found = prepared(given, "f", closed=True)
    assert found["additionalProperties"] is False
    assert found["properties"]["a"]["additionalProperties"] is False
    assert found["properties"]["a"]["properties"]["properties"] == {"type": "string"}
    assert found["items"][0]["additionalProperties"] is False
    assert found["$defs"]["d"]["additionalProperties"]["additionalProperties"] is False
    assert found["enum"] == [{"properties": {}}]


def test_depth_of_schemas_is_bounded_even_with_cycles() -> None:
    check_size(nested(MAX_DEPTH), "f")
    circle: dict[str, Any] = {}
    circle["a"] = circle
    for value in (nested(MAX_DEPTH + 1), circle):
        with pytest.raises(RequestError, match=f"more than {MAX_DEPTH} levels deep") as raised:
            check_size(value, "f")
        assert raised.value.field == "f"


def test_size_of_schemas_is_bounded() -> None:
    check_size(["x" * (MAX_SCHEMA_CHARS - 2)], "f")
    for value in (["x" * MAX_SCHEMA_CHARS], {"x" * MAX_SCHEMA_CHARS: 1}, [0] * MAX_SCHEMA_CHARS):
        with pytest.raises(RequestError, match="characters"):
            check_size(value, "f")
