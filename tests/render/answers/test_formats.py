"""Each format of the table: parsed from any chunks, and produced by its grammar."""

import dataclasses
import json
import random
import time
from collections import Counter

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.render.answers import table
from quire.render.answers.format import AnswerFormat, NamedTool, RequestedAnswer
from quire.render.answers.grammar import answer_grammar
from quire.render.answers.parts import CallArguments, CallBegun, CallEnded, Content, Part, joined
from quire.render.answers.syntax import CallFormat, content_marks
from tests.render.answers.test_parser import cuts, without_ids
from tests.support.render.answers import GOLDENS, NOW, TOOLS, WEATHER, Golden
from tests.support.render.byte_vocabulary import Vocabulary, accepts, closings, marks_of


def parsed(requested: RequestedAnswer, pieces: list[str]) -> list[Part]:
    parser = requested.parser()
    out = [part for piece in pieces for part in parser.push(piece)]
    return without_ids(joined(out + parser.flush()))


goldens = pytest.mark.parametrize("golden", GOLDENS, ids=[golden.name for golden in GOLDENS])
goldens_in_turn = pytest.mark.parametrize(
    ("golden", "has_tokens"),
    [
        pytest.param(
            golden,
            has_tokens,
            id=f"{has_tokens}-{golden.name}",
            marks=[] if has_tokens == (number % 2 == 0) else pytest.mark.slow,
        )
        for number, golden in enumerate(GOLDENS)
        for has_tokens in (True, False)
    ],
)


def test_every_format_has_a_golden_answer() -> None:
    assert {golden.calls.names for golden in GOLDENS if golden.calls} == {
        row.names for row in table.CALLS
    }
    assert {golden.reasoning.names for golden in GOLDENS if golden.reasoning} == {
        row.names for row in table.REASONING
    }


@goldens
def test_parser_gives_the_same_parts_for_every_split(golden: Golden) -> None:
    requested = RequestedAnswer(golden.format, TOOLS)
    for pieces in cuts(golden.text):
        assert parsed(requested, pieces) == golden.parts, pieces


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (table.MISTRAL, "[TOOL_CALLS]now[ARGS]null"),
        (table.DEEPSEEK_V31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>null"
                             "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        (table.LLAMA3, '{"name": "now", "parameters": null}'),
    ],
)  # fmt: skip
def test_null_arguments_become_an_empty_object(calls: CallFormat, text: str) -> None:
    requested = RequestedAnswer(AnswerFormat(calls), TOOLS)
    for pieces in cuts(text):
        assert parsed(requested, pieces) == [
            CallBegun(0, "now", ""), CallArguments(0, "{}"), CallEnded(0),
        ]  # fmt: skip


@goldens_in_turn
def test_grammar_accepts_the_golden_answer(golden: Golden, has_tokens: bool) -> None:
    """The answer comes in its longest tokens or in random ones, with or without mark tokens."""
    if not golden.is_written:
        return
    vocabulary = Vocabulary(marks_of(golden.format) if has_tokens else ())
    strict = tuple(dataclasses.replace(tool, strict=True) for tool in TOOLS)
    for requested in (
        RequestedAnswer(golden.format, TOOLS, "required"),
        RequestedAnswer(golden.format, strict),
    ):
        grammar = answer_grammar(requested, vocabulary.added)
        assert accepts(vocabulary, grammar, vocabulary.split(golden.text)) == ""
        unforced = grammar.replace("%llguidance {}", '%llguidance {"no_forcing": true}')
        for seed in range(2):
            token_ids = vocabulary.split(golden.text, random.Random(seed))
            assert accepts(vocabulary, unforced, token_ids) == ""


def walk(vocabulary: Vocabulary, grammar: str, chance: random.Random) -> list[int]:
    """Return random tokens that the grammar allows, preferring tokens that may end a part."""
    matcher = vocabulary.matcher(grammar)
    found: list[int] = []
    while not matcher.is_stopped():
        allowed = vocabulary.allowed(matcher)
        if vocabulary.end in allowed and chance.random() < 0.3:
            break
        others = [i for i in allowed if i != vocabulary.end]
        if not others:
            break
        ending = [i for i in others if i in vocabulary.endings]
        token = chance.choice(ending if ending and chance.random() < 0.5 else others)
        assert matcher.consume_token(token), matcher.get_error()
        found.append(token)
        assert len(found) < 5000
    assert matcher.is_accepting()
    return found


def check_calls(parts: list[Part]) -> None:
    """Check that every call names a tool and has arguments that its schema allows."""
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    texts = [part.text for part in parts if isinstance(part, CallArguments)]
    assert len(names) == len(texts)
    for name, text in zip(names, texts, strict=True):
        [tool] = [tool for tool in TOOLS if tool.name == name]
        arguments = json.loads(text)
        schema = tool.parameters or {"properties": {}}
        jsonschema.validate(arguments, schema | {"type": "object"})
        assert arguments.keys() <= schema["properties"].keys()


@goldens_in_turn
def test_parser_reads_valid_calls_from_random_texts_of_the_grammar(
    golden: Golden, has_tokens: bool
) -> None:
    if not golden.is_written:
        return
    chance = random.Random(golden.name)
    vocabulary = Vocabulary(marks_of(golden.format) if has_tokens else (), closings(golden.format))
    forced = RequestedAnswer(golden.format, TOOLS, "required")
    free = RequestedAnswer(golden.format, (WEATHER, NOW))
    named = RequestedAnswer(golden.format, TOOLS, NamedTool("get_weather"), parallel=False)
    for requested in (forced, free, named):
        grammar = answer_grammar(requested, vocabulary.added)
        for _ in range(2):
            text = vocabulary.text(walk(vocabulary, grammar, chance))
            parts = parsed(requested, [text])
            check_calls(parts)
            names = [part.name for part in parts if isinstance(part, CallBegun)]
            content = "".join(part.text for part in parts if isinstance(part, Content))
            if requested is not free:
                assert not content, text
                assert names, text
            if requested is named:
                assert names == ["get_weather"]
            marks = content_marks(golden.calls, golden.reasoning)
            assert not any(mark in content for mark in marks), text


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_parser_loses_no_text_but_the_marks(data: st.DataObject) -> None:
    golden = data.draw(st.sampled_from(GOLDENS))
    words = [word for mark in golden.format.marks() for word in mark.split()]
    pieces = st.sampled_from([*words, "get_weather", "now", "city", " ", "\n",
                              "{", "}", "[", "]", ",", ":", '"', "\\", "1", "null", "e", "é",
                              golden.text, golden.text[: len(golden.text) // 2],
                              golden.text[len(golden.text) // 2 :], '"name": "now"', '"arguments":',
                              '"name": "f"', '"parameters":'])  # fmt: skip
    plain = st.characters(exclude_categories=["C"])  # arguments escape control characters
    text = "".join(data.draw(st.lists(pieces | st.text(plain, max_size=3), max_size=12)))
    requested = RequestedAnswer(golden.format, data.draw(st.sampled_from([TOOLS, ()])))
    parts = parsed(requested, [text])
    assert parsed(requested, list(text)) == parts
    cut = data.draw(st.integers(0, len(text)))
    assert parsed(requested, [text[:cut], text[cut:]]) == parts
    check_order(parts)
    found = "".join(shown(part) for part in parts)
    for word in sorted(words, key=len, reverse=True):
        text = text.replace(word, " ")
    structure = set('{}[],:"\\; ()')
    left = Counter(char for char in text if char not in structure and not char.isspace())
    assert not left - Counter(found), parts


def shown(part: Part) -> str:
    """Return the text of a part, with the keys of a call."""
    if isinstance(part, CallBegun):
        return f"name {part.name} arguments parameters"
    return "" if isinstance(part, CallEnded) else part.text


def check_order(parts: list[Part]) -> None:
    """Check that calls are numbered in order and that each ends before the next part."""
    number, is_open = 0, False
    for part in parts:
        if isinstance(part, CallBegun):
            assert not is_open
            assert part.index == number
            is_open = True
        elif isinstance(part, CallArguments):
            assert is_open
            assert part.index == number
        elif isinstance(part, CallEnded):
            assert is_open
            is_open, number = False, number + 1
        else:
            assert not is_open
    assert not is_open


TIMED = list({golden.format: golden for golden in reversed(GOLDENS[::3])}.values())


@pytest.mark.parametrize("golden", TIMED, ids=[golden.name for golden in TIMED])
def test_parsing_time_is_linear_in_each_format(golden: Golden) -> None:
    requested = RequestedAnswer(golden.format, TOOLS)
    start = time.process_time()
    for opener in content_marks(golden.calls, golden.reasoning):
        for unit in (opener, f'{opener}{{"name"', f"{opener}now", golden.text[: 2 * len(opener)]):
            parsed(requested, [unit * 400])
            parsed(requested, [unit] * 400)
    assert time.process_time() - start < 1.6


def test_reasoning_ends_within_its_token_budget() -> None:
    """The budget also holds if the closing mark is text and not a token."""
    chance = random.Random(5)
    for form in (table.THINK, *table.REASONING):
        calls = table.HARMONY if form.content_open else table.HERMES
        formats = AnswerFormat(calls, form)
        vocabulary = Vocabulary(marks_of(formats), (*form.close.split(), "ab"))
        for choice in ("auto", "required"):
            requested = RequestedAnswer(
                formats, TOOLS, choice, begins_in_reasoning=True, thinking_token_budget=9
            )
            grammar = answer_grammar(requested, vocabulary.added)
            for _ in range(5):
                token_ids = walk(vocabulary, grammar, chance)
                text = vocabulary.text(token_ids)
                close = vocabulary.added.get(form.close)
                place = text.index(form.close) if close is None else token_ids.index(close)
                assert place <= 9
                check_calls(parsed(requested, [text]))
