"""Structured output"""

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.support.serve.vllm_cases import Asked, refused, text_of

CHOICES = ["Python", "Java", "C++", "Go"]
REGEX = r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= "SELECT " column " from " table
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
"""
WRONG_SCHEMA = {"type": "object", "properties": {"foo": "bar"}}
LONG = {"max_completion_tokens": 120, "max_tokens": None}


def structured(asked: Asked, name: str, **form: Any) -> str:
    """Return an answer of a form, of a completion or a chat."""
    given = {"structured_outputs": form, "temperature": 1, "seed": 3}
    if name == "chat":
        return str(asked.chat(max_completion_tokens=120, **given).choices[0].message.content)
    return str(asked.complete(max_tokens=120, **given).choices[0].text)


both = pytest.mark.parametrize("name", ["complete", "chat"])


@both
def test_choice(asked: Asked, name: str) -> None:
    """one of some texts"""
    assert structured(asked, name, choice=CHOICES) in CHOICES


@both
def test_schema(asked: Asked, name: str) -> None:
    """JSON of a schema"""
    jsonschema.validate(json.loads(structured(asked, name, json=PERSON)), PERSON)


def test_schema_as_text(asked: Asked) -> None:
    """also of a schema that is a text"""
    jsonschema.validate(json.loads(structured(asked, "chat", json=json.dumps(PERSON))), PERSON)


@both
def test_regex(asked: Asked, name: str) -> None:
    """a text of a regular expression"""
    assert re.fullmatch(REGEX, structured(asked, name, regex=REGEX))


@both
def test_grammar(asked: Asked, name: str) -> None:
    """a text of a grammar in EBNF"""
    text = structured(asked, name, grammar=GRAMMAR)
    assert re.fullmatch("SELECT col_[12] from table_[12]", text)


def test_streamed(asked: Asked) -> None:
    """a stream of a form joins to it"""
    given = {"structured_outputs": {"json": PERSON}, "max_completion_tokens": 120}
    jsonschema.validate(json.loads(text_of(asked.chat(stream=True, **given))), PERSON)


WRONG: dict[str, dict[str, Any]] = {
    "a schema that is none": {"json": WRONG_SCHEMA},
    "a wrong expression": {"regex": "[.*"},
    "a wrong grammar": {"grammar": 'root ::= select_statementinvalid\nselect ::= "SELECT"'},
    "an empty grammar": {"grammar": ""},
    "an expression that is no text": {"regex": {"1": "Python"}},
    "no choices": {"choice": []},
    "two forms": {"regex": "a", "choice": ["a"]},
}


@both
@pytest.mark.parametrize("what", WRONG)
def test_wrong(asked: Asked, name: str, what: str) -> None:
    """wrong forms are refused: schema, expression, grammar, an empty one, two at once"""
    error = refused(getattr(asked, name), structured_outputs=WRONG[what])
    assert error["param"].startswith("structured_outputs")


def test_json_object(asked: Asked) -> None:
    """response_format json_object gives JSON"""
    bias = {str(asked.tokens(text)[-1]): value for text, value in (('"', 100), ("}", 90))}
    more = {"response_format": {"type": "json_object"}, "logit_bias": bias}
    text = asked.chat(max_completion_tokens=60, **more).choices[0].message.content
    assert isinstance(json.loads(text), dict)


@both
def test_json_schema(asked: Asked, name: str) -> None:
    """json_schema gives JSON of a schema"""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    more = {"response_format": form, "max_tokens": 120}
    if name == "chat":
        more["max_completion_tokens"] = 120
        text = asked.chat(**more).choices[0].message.content
    else:
        text = asked.complete(**more).choices[0].text
    jsonschema.validate(json.loads(text), PERSON)


def test_text(asked: Asked) -> None:
    """text is no form"""
    plain = asked.chat().choices[0].message
    assert asked.chat(response_format={"type": "text"}).choices[0].message == plain


def test_no_schema(asked: Asked) -> None:
    """json_schema without a schema is refused"""
    error = refused(asked.chat, response_format={"type": "json_schema"})
    assert error["param"].startswith("response_format")


def test_unknown_format(asked: Asked) -> None:
    """so is a format that there is not"""
    error = refused(asked.chat, response_format={"type": "yaml"})
    assert error["param"].startswith("response_format")


def test_structural_tag(asked: Asked) -> None:
    """a structural tag holds what stands in its tags to a schema"""
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<p>", "schema": PERSON, "end": "</p>"}],
        "triggers": ["<p>"],
    }
    text = asked.chat(response_format=tag, max_completion_tokens=40).choices[0].message.content
    for found in re.findall("<p>(.*?)</p>", text, re.DOTALL):
        jsonschema.validate(json.loads(found), PERSON)


def test_older_names(asked: Asked) -> None:
    """guided_choice and the other older names mean the same"""
    text = asked.chat(guided_choice=CHOICES, max_completion_tokens=10).choices[0].message.content
    assert text in CHOICES


def test_compact(asked: Asked) -> None:
    """disable_any_whitespace gives JSON without blanks"""
    text = structured(asked, "chat", json=PERSON, disable_any_whitespace=True)
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
