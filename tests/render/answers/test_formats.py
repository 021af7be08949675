"""Each format of the table: read from any pieces, and written by its grammar."""

import dataclasses
import json
import random

import jsonschema
import pytest

from quire.render.answers import table
from quire.render.answers.format import AskedAnswer, NamedTool
from quire.render.answers.parts import CallArguments, CallBegun, Content, Part, joined
from quire.render.answers.syntax import content_marks
from tests.render.answers.goldens import GOLDENS, NOW, TOOLS, WEATHER, Golden
from tests.render.answers.test_parser import cuts, without_ids
from tests.render.answers.vocabulary import Vocabulary, accepts, closings, marks_of


def parsed(asked: AskedAnswer, pieces: list[str]) -> list[Part]:
    parser = asked.parser()
    out = [part for piece in pieces for part in parser.push(piece)]
    return without_ids(joined(out + parser.flush()))


goldens = pytest.mark.parametrize("golden", GOLDENS, ids=[golden.name for golden in GOLDENS])


def test_every_row_has_a_golden_answer() -> None:
    assert {golden.calls.names for golden in GOLDENS if golden.calls} == {
        row.names for row in table.CALLS
    }
    assert {golden.reasoning.names for golden in GOLDENS if golden.reasoning} == {
        row.names for row in table.REASONING
    }


@goldens
def test_every_cut_gives_the_parts_of_the_whole(golden: Golden) -> None:
    asked = AskedAnswer(golden.format, TOOLS)
    for pieces in cuts(golden.text):
        assert parsed(asked, pieces) == golden.parts, pieces


@goldens
@pytest.mark.parametrize("has_tokens", [True, False])
def test_the_grammar_takes_the_golden_answer(golden: Golden, has_tokens: bool) -> None:
    """By the longest tokens and by any others; with and without tokens for the marks."""
    if not golden.is_written:
        return
    vocabulary = Vocabulary(marks_of(golden.format) if has_tokens else ())
    strict = tuple(dataclasses.replace(tool, strict=True) for tool in TOOLS)
    for asked in (
        AskedAnswer(golden.format, TOOLS, "required"),
        AskedAnswer(golden.format, strict),
    ):
        grammar = asked.grammar(vocabulary.added)
        assert accepts(vocabulary, grammar, vocabulary.split(golden.text)) == ""
        unforced = grammar.replace("%llguidance {}", '%llguidance {"no_forcing": true}')
        for seed in range(5):
            token_ids = vocabulary.split(golden.text, random.Random(seed))
            assert accepts(vocabulary, unforced, token_ids) == ""


def walk(vocabulary: Vocabulary, grammar: str, chance: random.Random) -> list[int]:
    """Tokens that the grammar allows, by chance; what may end something is taken more often."""
    matcher = vocabulary.matcher(grammar)
    found: list[int] = []
    while not matcher.is_stopped():
        allowed = vocabulary.allowed(matcher)
        if vocabulary.end in allowed and chance.random() < 0.3:
            break
        ending = [i for i in allowed if i != vocabulary.end and vocabulary.ends(i)]
        others = [i for i in allowed if i != vocabulary.end]
        if not others:
            break
        [token] = chance.choices(ending if ending and chance.random() < 0.5 else others)
        assert matcher.consume_token(token), matcher.get_error()
        found.append(token)
        assert len(found) < 5000
    assert matcher.is_accepting()
    return found


def check_calls(parts: list[Part]) -> None:
    """Every call is one of a tool, with arguments that its schema allows."""
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    texts = [part.text for part in parts if isinstance(part, CallArguments)]
    assert len(names) == len(texts)
    for name, text in zip(names, texts, strict=True):
        [tool] = [tool for tool in TOOLS if tool.name == name]
        arguments = json.loads(text)
        schema = tool.parameters or {"properties": {}}
        jsonschema.validate(arguments, schema | {"type": "object"})
        assert arguments.keys() <= schema["properties"].keys()


@goldens
@pytest.mark.parametrize("has_tokens", [True, False])
def test_what_a_grammar_allows_is_read_as_calls(golden: Golden, has_tokens: bool) -> None:
    """Whatever a model makes of it."""
    if not golden.is_written:
        return
    chance = random.Random(golden.name)
    vocabulary = Vocabulary(marks_of(golden.format) if has_tokens else (), closings(golden.format))
    forced = AskedAnswer(golden.format, TOOLS, "required")
    free = AskedAnswer(golden.format, (WEATHER, NOW))
    named = AskedAnswer(golden.format, TOOLS, NamedTool("get_weather"), parallel=False)
    for asked in (forced, free, named):
        grammar = asked.grammar(vocabulary.added)
        for _ in range(8):
            text = vocabulary.text(walk(vocabulary, grammar, chance))
            parts = parsed(asked, [text])
            check_calls(parts)
            names = [part.name for part in parts if isinstance(part, CallBegun)]
            content = "".join(part.text for part in parts if isinstance(part, Content))
            if asked is not free:
                assert not content, text
                assert names, text
            if asked is named:
                assert names == ["get_weather"]
            marks = content_marks(golden.calls, golden.reasoning)
            assert not any(mark in content for mark in marks), text
