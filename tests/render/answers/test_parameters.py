"""Arguments in parameter marks: typed by the schema, which the grammar enforces.

Covers `render/answers/parameters.py` and `render/answers/parameters_grammar.py`.
"""

import json
import time
from typing import Any

import jsonschema
import pytest

from quire.base.errors import RequestError
from quire.render.answers import table
from quire.render.answers.format import AnswerFormat, RequestedAnswer
from quire.render.answers.grammar import answer_grammar
from quire.render.answers.parts import CallArguments, CallBegun
from quire.render.answers.schema_types import typed, types_of
from quire.render.answers.syntax import Tool
from tests.support.render.byte_vocabulary import Vocabulary, accepts

CODER = AnswerFormat(table.QWEN3_CODER)
VOCABULARY = Vocabulary(["<tool_call>", "</tool_call>"])


def written(values: dict[str, str]) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
    )
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


def requested(properties: dict[str, Any], **schema: object) -> RequestedAnswer:
    whole = {"type": "object", "properties": properties} | schema
    return RequestedAnswer(CODER, (Tool("f", whole),), "required")


def fault(one: RequestedAnswer, text: str) -> str:
    return accepts(VOCABULARY, answer_grammar(one, VOCABULARY.added), VOCABULARY.split(text))


def read(one: RequestedAnswer, text: str) -> str:
    parser = one.parser()
    parts = [part for char in text for part in parser.push(char)] + parser.flush()
    assert [part.name for part in parts if isinstance(part, CallBegun)] == ["f"]
    return "".join(part.text for part in parts if isinstance(part, CallArguments))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["a", "", "5", "\n", '"q"', "<parameter=x>", "true\n"], []),
        (
            {"type": "string", "minLength": 2, "maxLength": 3},
            ["ab", "a\n", "a\n\n"],
            ["a", "abcd", ""],
        ),
        ({"type": "string", "pattern": "^[a-c]+$"}, ["ab"], ["abd", ""]),
        ({"type": "string", "pattern": "b|d"}, ["abc", "d"], ["ac"]),
        ({"enum": ["x", "y z"]}, ["x", "y z"], ["y", "xx", '"x"']),
        ({"const": "x"}, ["x"], ["y"]),
        ({"anyOf": [{"const": "x"}, {"oneOf": [{"enum": ["y"]}]}]}, ["x", "y"], ["z", "xy"]),
        ({"type": "integer"}, ["5", "-7"], ["5.5", "five", '"5"', "true"]),
        ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
        ({"type": ["string", "null"]}, ['"5"', "null", '"null"'], ["5", "abc"]),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ['"5"', "5"], ["abc"]),
        ({"$ref": "#/$defs/word"}, ["ab"], ["abc"]),
        ({"type": "array", "items": {"$ref": "#/$defs/word"}}, ["[]", '["a", "b"]'], ['["abc"]']),
        ({}, ["5", '"a"', "[null]"], ["abc"]),
    ],
)
def test_grammar_accepts_only_values_that_the_schema_allows(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    definitions = {"word": {"type": "string", "maxLength": 2}}
    one = requested({"p": schema}, required=["p"], **{"$defs": definitions})
    whole = {"properties": {"p": schema}, "$defs": definitions}
    for value in good:
        text = written({"p": value})
        assert fault(one, text) == ""
        jsonschema.validate(json.loads(read(one, text)), whole)
    for value in bad:
        assert fault(one, written({"p": value})), value


def test_required_parameters_must_be_present_and_others_may_be() -> None:
    one = requested({"a": {"type": "integer"}, "b": {"type": "integer"}}, required=["b", "c"])
    assert fault(one, written({"b": "1", "c": "[2]"})) == ""
    assert fault(one, written({"a": "1", "b": "1", "c": "2"})) == ""
    for keys in ("a", "b", "ab", "bac", "abcd"):
        assert fault(one, written(dict.fromkeys(keys, "1")))
    assert fault(RequestedAnswer(CODER, (Tool("f"),), "required"), written({})) == ""


def test_values_are_converted_to_the_types_of_the_schema_if_possible() -> None:
    for value, types, expected in [
        ("5", {"integer"}, "5"), ("5", {"number"}, "5"), ("5", {"string", "null"}, '"5"'),
        ("null", {"string", "null"}, "null"), ("None", {"string", "null"}, "null"),
        ("True", {"boolean"}, "true"), ("true", {"string"}, '"true"'), ("1.5", {"integer"}, "1.5"),
        ("[1", {"array"}, '"[1"'), (" {} ", {"object"}, "{}"), ("x", None, '"x"'), ("7", None, "7"),
        ("NaN", {"number"}, '"NaN"'), ("[" * 9999, {"array"}, json.dumps("[" * 9999)),
    ]:  # fmt: skip
        assert typed(value, None if types is None else frozenset(types)) == expected


def test_strings_stream_and_truncated_calls_keep_their_values() -> None:
    one = requested({"s": {"type": "string"}, "n": {"type": "integer"}})
    parser = one.parser()
    parser.push("<tool_call>\n<function=f>\n<parameter=s>\nab")
    assert parser.push('c"') == [CallArguments(0, 'c\\"')]
    assert parser.push("\n</para") == []
    assert parser.push("x") == [CallArguments(0, "\\n</parax")]
    whole = written({"s": "abc", "n": "12"})
    assert read(one, whole) == '{"s": "abc", "n": 12}'
    assert read(one, whole[: whole.index("bc\n")]) == '{"s": "a'
    assert read(one, whole[: whole.index("2\n")]) == '{"s": "abc", "n": 1'


@pytest.mark.parametrize(
    "schema",
    [
        {"required": None}, {"properties": [1]}, {"properties": {'q"<x>': {}}},
        {"properties": {" a": {}}}, {"required": ["a\nb"]}, {"properties": {"a": {"const": 1,
                                                                            "type": "string"}}},
        {"properties": {"a": {"type": "string", "enum": []}}},
        {"properties": {"a": {"type": "string", "enum": 5}}},
        {"properties": {"a": {"enum": ["</parameter>"]}}},
    ],
)  # fmt: skip
def test_schemas_that_the_format_cannot_express_are_rejected(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as raised:
        answer_grammar(RequestedAnswer(CODER, (Tool("f", schema),), "required"), VOCABULARY.added)
    assert raised.value.field == "tools"


def test_enum_skips_values_of_other_types_or_with_the_closing_mark() -> None:
    one = requested({"p": {"type": "string", "enum": ["x", 1, "a</parameter>"]}}, required=["p"])
    assert fault(one, written({"p": "x"})) == ""
    assert fault(one, written({"p": "1"})) and fault(one, written({"p": "a"}))


def test_whole_schema_may_be_a_reference() -> None:
    pair = {
        "properties": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/pair"}},
        "required": ["a"],
    }
    tool = Tool("f", {"$ref": "#/$defs/pair", "$defs": {"pair": pair}})
    one = RequestedAnswer(CODER, (tool,), "required")
    text = written({"a": "5", "b": '{"a": "x"}'})
    assert fault(one, text) == "" and fault(one, written({}))
    assert json.loads(read(one, text)) == {"a": "5", "b": {"a": "x"}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "array"}, ["a</parameter>b", "\n</parameter>\n</function>"]),
        ({"type": "object"}, {"</parameter>": {"a": '\\"'}}),
        ({"type": ["string", "null"]}, "x</parameter>"),
        ({}, "\n</parameter>"),
    ],
)
def test_json_values_may_contain_the_closing_mark(schema: dict[str, Any], value: Any) -> None:
    one = requested({"p": schema, "q": {"type": "string"}}, required=["p", "q"])
    text = written({"p": json.dumps(value), "q": '["a'})
    assert fault(one, text) == ""
    assert json.loads(read(one, text)) == {"p": value, "q": '["a'}


@pytest.mark.parametrize("value", ['"a', '["a"', '{"a": 1} x', '["a"]]', '"a" "b"', "[", '"\\q"'])
def test_values_that_only_begin_as_json_are_text(value: str) -> None:
    one = requested({"p": {}, "q": {"type": "string"}}, required=["p", "q"])
    assert json.loads(read(one, written({"p": value, "q": "b"}))) == {"p": value, "q": "b"}


def test_types_of_a_recursive_schema_are_found() -> None:
    itself = {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}, {"type": "integer"}]}
    root = {"$defs": {"x": itself}}
    assert types_of(itself, root) == {"integer"}
    itself["anyOf"].append({})
    assert types_of(itself, root) is None


def test_schema_with_a_huge_grammar_is_rejected_before_it_is_built() -> None:
    """The grammar would repeat the definitions for each of 4000 references."""
    names = {f"d{i}": {"type": "integer"} for i in range(4000)}
    one = requested({f"p{i}": {"$ref": "#/$defs/d0"} for i in range(4000)}, **{"$defs": names})
    begun = time.process_time()
    with pytest.raises(RequestError, match="use a smaller one"):
        answer_grammar(one, VOCABULARY.added)
    assert time.process_time() - begun < 2.0
