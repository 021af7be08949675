"""Grammars made from the JSON Schema Test Suite accept its valid instances only.

The cases are of the keywords that grammars support. Each instance is written compactly and as by
Python's json. `DEVIATIONS` lists every difference.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.render.grammars.structured import grammar_of
from tests.support.render.grammar_matching import byte_tokenizer

CASES = json.loads(Path(__file__).with_name("json_schema_suite.json").read_text("utf-8"))[1:]

# (case, text of an instance): why it is wrongly rejected, or wrongly accepted.
ORDER = "properties have the order of the schema"
FLOATS = "numbers of a constant, and integers, are written in one way"
LEAPS = "leap days and leap seconds are not checked"
QUOTED = "quoted names and address literals are rejected"
MIXED = "an IPv4 address in an IPv6 address is rejected"
DEVIATIONS = {
    ("allOf", '{"foo":"baz","bar":2}'): ORDER,
    ("allOf with base schema", '{"foo":"quux","bar":2,"baz":null}'): ORDER,
    ("const with object", '{"baz":"bax","foo":"bar"}'): ORDER,
    ("const with 0 does not match other zero-like types", "0.0"): FLOATS,
    ("const with 1 does not match true", "1.0"): FLOATS,
    ("const with -2.0 matches integer and float types", "-2.0"): FLOATS,
    (
        "float and integers are equal up to 64-bit representation limits", "9007199254740992.0",
    ): FLOATS,
    ("enum with 0 does not match false", "0.0"): FLOATS,
    ("enum with [0] does not match [false]", "[0.0]"): FLOATS,
    ("enum with 1 does not match true", "1.0"): FLOATS,
    ("enum with [1] does not match [true]", "[1.0]"): FLOATS,
    ("integer type matches integers", "1.0"): FLOATS,
    ("validation of date strings", '"2021-02-29"'): LEAPS,
    ("validation of date-time strings", '"1998-12-31T23:58:60Z"'): LEAPS,
    ("validation of date-time strings", '"1998-12-31T22:59:60Z"'): LEAPS,
    **{
        ("validation of time strings", f'"{time}"'): LEAPS
        for time in (
            "22:59:60Z", "23:58:60Z", "22:59:60+00:00", "23:58:60+00:00", "23:59:60+01:00",
            "23:59:60+00:30", "23:59:60-01:00", "23:59:60-00:30",
        )
    },
    ("validation of e-mail addresses", '"\\"joe bloggs\\"@example.com"'): QUOTED,
    ("validation of e-mail addresses", '"\\"joe..bloggs\\"@example.com"'): QUOTED,
    ("validation of e-mail addresses", '"\\"joe@bloggs\\"@example.com"'): QUOTED,
    ("validation of e-mail addresses", '"joe.bloggs@[IPv6:::1]"'): QUOTED,
    **{
        ("validation of IPv6 addresses", f'"{address}"'): MIXED
        for address in (
            "1::d6:192.168.0.1", "1:2::192.168.0.1", "::ffff:192.168.0.1",
            "1000:1000:1000:1000:1000:1000:255.255.255.255",
        )
    },
}  # fmt: skip
# (keyword, the beginning of a case): why its schema is rejected as a whole.
NO_ANSWER = "Unsatisfiable schema"
DECIMAL = "Expected positive integer"
REFUSED = {
    ("additionalProperties", "additionalProperties with propertyNames"): "propertyNames",
    ("additionalProperties", "dependentSchemas"): "dependentSchemas",
    ("allOf", "allOf with boolean schemas, some false"): NO_ANSWER,
    ("allOf", "allOf with boolean schemas, all false"): NO_ANSWER,
    ("anyOf", "anyOf with boolean schemas, all false"): NO_ANSWER,
    ("multipleOf", "float division"): "too many digits",
    ("oneOf", "oneOf with boolean schemas, all false"): NO_ANSWER,
    ("patternProperties", "multiple simultaneous"): "not disjoint",
    ("patternProperties", "regexes are not anchored"): "not disjoint",
    ("patternProperties", "patternProperties with boolean"): "not disjoint",
    ("ref", "remote ref"): "$dynamicAnchor",
    ("ref", "$ref to boolean schema false"): NO_ANSWER,
    ("ref", "ref creates new scope"): "unevaluatedProperties",
    ("ref", "ref to if"): "if",
    ("ref", "ref to then"): "then",
    ("ref", "ref to else"): "else",
    **{
        (keyword, f"{keyword} validation with a decimal"): DECIMAL
        for keyword in (
            "maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties",
        )
    },
}  # fmt: skip
# oneOf is rejected unless its alternatives certainly exclude each other.
ONE_OF = "oneOf constraints are not supported"


def texts(value: object) -> set[str]:
    return {
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.dumps(value, ensure_ascii=False),
    }


def refusal_of(keyword: str, case: str) -> str | None:
    for (name, begin), reason in REFUSED.items():
        if name == keyword and case.startswith(begin):
            return reason
    return None


@pytest.mark.parametrize(
    ("keyword", "case", "schema", "instances"),
    [case for case in CASES if isinstance(case[2], dict)],
    ids=[f"{case[0]}: {case[1]}" for case in CASES if isinstance(case[2], dict)],
)
def test_grammar_accepts_only_the_valid_instances(
    keyword: str, case: str, schema: dict[str, Any], instances: list[Any]
) -> None:
    grammar = grammar_of(StructuredOutputsParams(json=schema), strict=True)
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)
    reason = refusal_of(keyword, case)
    if reason is not None:
        assert reason in matcher.get_error()
        return
    if keyword == "oneOf" and matcher.is_error():
        assert ONE_OF in matcher.get_error()
        return
    assert not matcher.is_error(), matcher.get_error()
    for value, is_valid in instances:
        compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        expected = is_valid != ((case, compact) in DEVIATIONS)
        for text in texts(value):
            token_ids = list(text.encode("utf-8", "surrogatepass"))
            copy = matcher.deep_copy()
            taken = copy.try_consume_tokens(token_ids) == len(token_ids) and copy.is_accepting()
            assert taken == expected, text
