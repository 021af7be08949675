"""Bounds of numbers: whatever a grammar accepts, the jsonschema package accepts, too."""

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from quire.render.grammars.json_schema import prepared
from tests.support.render.grammar_matching import byte_tokenizer, takes

WHOLE = [0, 1, 3, -3, -1, 10, 100, -10, 1000]
EDGES = [0.0, 0.1, 0.01, 0.001, 0.25, 0.5, 1.0]
SPANS = [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.5, 5, 100]


def grammar_of(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(prepared(schema, "f")))


@pytest.mark.parametrize(
    ("schema", "outside", "inside"),
    [
        ({"exclusiveMinimum": 3, "exclusiveMaximum": 3.75}, ["3", "3.0", "3.75"], ["3.1", "3.749"]),
        ({"exclusiveMinimum": 3, "maximum": 3.75}, ["3", "3.0", "3.751"], ["3.01", "3.75"]),
        ({"minimum": -3.25, "exclusiveMaximum": -3}, ["-3", "-3.0"], ["-3.25", "-3.001"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.9}, ["0", "0.9"], ["0.5", "0.001"]),
        ({"exclusiveMinimum": 2, "minimum": 2.5, "maximum": 2.75}, ["2", "2.4"], ["2.5"]),
        (
            {"exclusiveMinimum": 10**9, "exclusiveMaximum": 10**9 + 0.5},
            ["1000000000", "1000000000.0"],
            [],
        ),
        ({"exclusiveMinimum": 10**400, "maximum": 0.5}, [], []),
    ],
)
def test_integer_exclusive_bound_near_the_other_bound_is_enforced(
    schema: dict[str, Any], outside: list[str], inside: list[str]
) -> None:
    grammar = grammar_of({"type": "number"} | schema)
    assert not any(takes(grammar, text) for text in outside)
    assert all(takes(grammar, text) for text in inside)


def test_bounds_of_several_subschemas_are_combined() -> None:
    """Constants that look like a schema stay unchanged."""
    part = {"allOf": [{"$ref": "#/$defs/above"}, {"type": "number", "maximum": 3.75}]}
    schema = {
        "$defs": {"above": {"exclusiveMinimum": 3}},
        "type": "object",
        "properties": {"a": part},
        "required": ["a"],
    }
    grammar = grammar_of(schema)
    assert takes(grammar, '{"a":3.5}') and not takes(grammar, '{"a":3}')
    constant = {"exclusiveMinimum": 3}
    assert prepared({"const": constant, "maximum": 3.5}, "f")["const"] == constant


def random_schema(rng: random.Random) -> tuple[dict[str, Any], list[float]]:
    """Return a schema with one or two bounds, and these bounds."""
    low = rng.choice([*WHOLE, 0.5, 3.75, -3.25, 2.999, 99.9])
    high = round(low + rng.choice(SPANS), 4)
    schema: dict[str, Any] = {"type": rng.choice(["number", "number", "integer"])}
    which = rng.randrange(4)
    if which != 0:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if which != 1:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = high
    if rng.random() < 0.15:
        schema["multipleOf"] = rng.choice([1, 2, 3, 0.5, 0.25])
    return schema, [low, high]


def check_bounds(seed: int, num_schemas: int) -> None:
    rng, num_taken, num_missed = random.Random(seed), 0, 0
    for _ in range(num_schemas):
        schema, bounds = random_schema(rng)
        grammar, validator = grammar_of(schema), Draft202012Validator(schema)
        if LLMatcher(byte_tokenizer(), grammar, log_level=0).is_error():
            continue  # nothing is within the bounds
        values = {round(b + sign * edge, 6) for b in bounds for edge in EDGES for sign in (1, -1)}
        for value in values:
            texts = [json.dumps(value)]
            texts += [str(int(value))] if value.is_integer() else []
            for text in texts:
                is_taken, is_valid = takes(grammar, text), validator.is_valid(json.loads(text))
                assert is_valid or not is_taken, (schema, text)
                num_taken += is_taken
                # Integers are written without a fraction here.
                may_miss = schema["type"] == "integer" and "." in text
                num_missed += is_valid and not is_taken and not may_miss
    assert num_taken > num_schemas
    assert num_missed < 0.05 * num_taken  # llguidance refuses some fractions next to a bound


def test_random_bounds_are_enforced() -> None:
    check_bounds(1, 50)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_random_bounds_are_enforced(seed: int) -> None:
    check_bounds(seed, 1000)
