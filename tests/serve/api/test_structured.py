"""The body's fields that say what an answer must be, to StructuredOutputsParams."""

import json
from typing import Any

import pytest

from quire.base.structured_outputs import StructuredOutputsParams
from quire.serve.api.errors import ApiError
from quire.serve.api.protocol import CompletionRequest
from quire.serve.api.structured import structured_outputs_of

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


def asked(**fields: Any) -> tuple[StructuredOutputsParams | None, bool, str]:
    return structured_outputs_of(CompletionRequest.model_validate({"prompt": "Hi", **fields}))


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"response_format": None}, {"response_format": {"type": "text"}},
        {"structured_outputs": {}}, {"structured_outputs": {"json": None}},
        {"guided_decoding_backend": "xgrammar"},
    ],
)  # fmt: skip
def test_anything_goes(fields: dict[str, Any]) -> None:
    assert asked(**fields)[0] is None


def test_response_format() -> None:
    def of(**more: Any) -> Any:
        return asked(response_format={"type": "json_schema", "json_schema": more})

    same = StructuredOutputsParams(json=SCHEMA)
    assert of(name="x", schema=SCHEMA) == (same, False, "response_format")
    assert of(name="x", schema=SCHEMA, strict=True, description="d")[1] is True
    found = of(name="x", schema=SCHEMA, strict=None)[0]
    assert list(found.json["properties"]) == ["b", "a"]
    wanted, strict, field = asked(response_format={"type": "json_object"})
    assert wanted == StructuredOutputsParams(json_object=True) and not strict
    wanted, _, _ = asked(response_format=TAG)
    assert wanted is not None and json.loads(wanted.structural_tag or "") == TAG


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": "{}"}, {"json": "{}"}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        (
            {"guided_json": {}, "guided_whitespace_pattern": " ?"},
            {"json": {}, "whitespace_pattern": " ?"},
        ),
    ],
)
def test_older_names(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    found, strict, field = asked(**fields)
    assert (found, strict) == (StructuredOutputsParams(**wanted), False)
    assert field == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "says", "param"),
    [
        ({"response_format": {"type": "xml"}}, "text, json_object", "response_format"),
        ({"response_format": {"type": "json_schema"}}, ".json_schema is", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "json_schema.name", "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": 1,
                                                                        "schema": {}}}},
            "json_schema.strict", "response_format",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format and structured_outputs exclude", "structured_outputs",
        ),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "got json and regex",
         "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "got none", "structured_outputs"),
        ({"structured_outputs": {"regexp": " "}}, "regexp", "structured_outputs"),
        ({"structured_outputs": {"choice": "ab"}}, "choice must be a list", "structured_outputs"),
        ({"guided_json": {}, "guided_regex": "a"}, "got json and regex", "guided_json"),
        ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "exclude", "guided_json"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], says: str, param: str) -> None:
    with pytest.raises(ApiError, match=says) as raised:
        asked(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)
