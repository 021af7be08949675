"""Each kind of constraint as a grammar: the texts it accepts, and the constraints it rejects."""

import json
from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.render.grammars.lark import Lark
from quire.render.grammars.structured import MAX_CHARS, content_rule, grammar_of
from tests.support.render.grammar_matching import ADDED, takes, with_tokens

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def grammar(**form: Any) -> str:
    return grammar_of(StructuredOutputsParams(**form), ADDED)


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)], ids=["object", "text"])
def test_json_schema_accepts_only_its_instances(schema: Any) -> None:
    found = grammar(json=schema)
    for text in (
        '{"name":"A","age":3}', json.dumps({"name": "A", "age": 3}), '{"name":"A","age":3,"x":[]}',
        json.dumps({"name": "A", "age": 3}, indent=4),
    ):  # fmt: skip
        assert takes(found, text)
    for text in (
        '{"age":3,"name":"A"}', '{"name":"A"}', '{"name":"A","age":"3"}', ' {"name":"A","age":3}',
        '{"name":"A","age":3} ', '{"name":"A",\n\n"age":3}', '{"name":"A",' + 17 * " " + '"age":3}',
    ):  # fmt: skip
        assert not takes(found, text)


def test_whitespace_of_json_follows_the_options() -> None:
    compact = grammar(json=PERSON, disable_any_whitespace=True)
    assert takes(compact, '{"name":"A","age":3}')
    assert not takes(compact, '{"name": "A","age":3}')
    own = grammar(json=PERSON, whitespace_pattern=r"\t{0,2}")
    assert takes(own, '{"name":\t\t"A","age":3}')
    assert not takes(own, '{"name":\t\t\t"A","age":3}')
    assert not takes(own, '{"name": "A","age":3}')


def test_additional_properties_can_be_disabled() -> None:
    schema = {"$defs": {"p": PERSON}, "anyOf": [{"$ref": "#/$defs/p"}, {"type": "array"}]}
    found = grammar(json=schema, disable_additional_properties=True)
    assert takes(found, '{"name":"A","age":3}')
    assert not takes(found, '{"name":"A","age":3,"x":1}')
    assert takes(grammar(json=schema), '{"name":"A","age":3,"x":1}')
    assert "additionalProperties" not in PERSON  # the caller's schema is unchanged


def test_json_object_accepts_only_objects() -> None:
    found = grammar(json_object=True)
    assert takes(found, '{"a": [1, {"b": null}]}')
    assert not takes(found, "[1]")


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"a/b\d+", ["a/b12"], ["a/b", "xa/b1", "a/b1x"]),
        (r"^abc$", ["abc"], ["xabc"]),
        (r"\/", ["/"], [""]),
        (r"\\/", ["\\/"], ["/"]),
        ("a\nb", ["a\nb"], ["anb"]),
        ("", [""], ["a"]),
        ("//x", ["//x"], [""]),
        (r"[/\]]+", ["/]/"], ["a"]),
        ("é|\u2028", ["é", "\u2028"], ["e"]),
    ],
)
def test_regex_accepts_only_full_matches(pattern: str, good: list[str], bad: list[str]) -> None:
    found = grammar(regex=pattern)
    assert all(takes(found, text) for text in good)
    assert not any(takes(found, text) for text in bad)


def test_choice_accepts_only_its_texts() -> None:
    words = ["a", "ab", 'say "hi"\n', "é\0", "c <|tool|>!"]
    found = grammar(choice=words)
    assert all(takes(found, text) for text in words)
    assert not takes(found, with_tokens("c ", "<|tool|>", "!"))
    assert not any(takes(found, text) for text in ("", "b", "aba"))


def test_lark_grammar_of_a_client_can_be_nested() -> None:
    """Its start rule, names and whitespace stay apart from those of the outer grammar."""
    text = """
        start: rule_1 ("," rule_1)* <|tool|>  // <|tool|> said in passing
        rule_1: "<|tool|>" | /[0-9]+/
        %ignore / +/
    """
    params = StructuredOutputsParams(grammar=text)
    assert takes(grammar_of(params, ADDED), with_tokens("1, 22 ,3", "<|tool|>"))
    lark = Lark(ADDED)
    rule = content_rule(lark, params)
    found = lark.text(f'{lark.rule(lark.literal("<"))} {rule} ">"')
    assert takes(found, with_tokens("<1, 2", "<|tool|>", ">"))
    assert not takes(found, with_tokens(" <1, 2", "<|tool|>", ">"))
    assert not takes(found, with_tokens("<1, 2<|tool|>>"))


def test_size_and_depth_of_constraints_are_bounded() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(70):
        deep = {"items": deep}
    for form in (
        {"json": deep}, {"json": json.dumps(deep)}, {"json": "[" * 100_000},
        {"json": {"enum": ["x" * MAX_CHARS]}}, {"json": json.dumps({"enum": ["x" * MAX_CHARS]})},
        {"json": {"enum": list(range(MAX_CHARS))}}, {"regex": "x" * MAX_CHARS + "y"},
        {"choice": ["x" * 1000] * 300}, {"choice": ["x"] * 20_000},
        {"grammar": "start: " + '"x"' * MAX_CHARS}, {"structural_tag": "[" * MAX_CHARS},
        {"json": {}, "whitespace_pattern": " " * MAX_CHARS + " "},
    ):  # fmt: skip
        with pytest.raises(RequestError, match=r"more than|at most|too deep") as raised:
            grammar(**form)
        assert raised.value.field == "structured_outputs"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": "{"}, "not JSON"),
        ({"json": "[1]"}, "must be an object, got list"),
        ({"json": {"enum": {1, 2}}}, "not JSON"),
        ({"regex": "a\0"}, "NUL"),
        ({"regex": "a\\"}, "half an escape"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"choice": ["\ud800"]}, "surrogate"),
        ({"grammar": " \n"}, "empty"),
    ],
)
def test_malformed_constraints_are_rejected(form: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        grammar_of(StructuredOutputsParams(**form), ADDED, field="response_format")
    assert raised.value.field == "response_format"
    assert str(raised.value).startswith("response_format")
