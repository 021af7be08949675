"""Answers that the grammar of a request accepts or rejects.

Covers `render/answers/table.py` and `render/answers/schema_types.py`.
"""

import pytest

from quire.base.errors import RequestError
from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.render.answers.format import AnswerFormat, NamedTool, RequestedAnswer
from quire.render.answers.grammar import answer_grammar
from quire.render.answers.syntax import CallFormat, Tool, openers
from quire.render.answers.table import CALLS, HERMES, MISTRAL, QWEN3_CODER, THINK
from tests.support.render.byte_vocabulary import Vocabulary, accepts

F = Tool("f", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, True)
G = Tool("g")
QWEN = AnswerFormat(HERMES, THINK)
VOCABULARY = Vocabulary(["<think>", "</think>", "<tool_call>", "</tool_call>"])
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CALL_G = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'


def fault(requested: RequestedAnswer, text: str) -> str:
    grammar = answer_grammar(requested, VOCABULARY.added)
    return accepts(VOCABULARY, grammar, VOCABULARY.split(text))


def test_required_choice_needs_at_least_one_call() -> None:
    requested = RequestedAnswer(QWEN, (F, G), "required")
    for text in (CALL_F, CALL_G, CALL_F + CALL_G, f"<think>hm</think>\n\n{CALL_G}\n{CALL_F}"):
        assert fault(requested, text) == ""
    for text in ("", "hello", CALL_F + "x", "<think>a</think>", CALL_F.replace("1", '"1"'), "{}"):
        assert fault(requested, text)
    assert fault(RequestedAnswer(QWEN, (F, G), "required", parallel=False), CALL_F) == ""
    assert fault(RequestedAnswer(QWEN, (F, G), "required", parallel=False), CALL_F + CALL_G)


def test_named_choice_allows_one_call_of_that_tool() -> None:
    requested = RequestedAnswer(QWEN, (F, G), NamedTool("g"))
    assert fault(requested, CALL_G) == ""
    assert fault(requested, CALL_F)
    assert fault(requested, CALL_G + CALL_G)
    with pytest.raises(RequestError, match="'h', which is not in tools"):
        answer_grammar(RequestedAnswer(QWEN, (F, G), NamedTool("h")), {})
    with pytest.raises(RequestError, match="start the server with --tool-call-parser") as caught:
        answer_grammar(RequestedAnswer(AnswerFormat(), (F, G), "required"), {})
    assert caught.value.field == "tool_choice"


def test_auto_choice_constrains_only_the_calls() -> None:
    requested = RequestedAnswer(QWEN, (F, G))
    for text in ("", "hello {", f"Look:\n{CALL_F}", CALL_F + CALL_G, f"<think>a</think>b{CALL_F}"):
        assert fault(requested, text) == ""
    for text in ("a<tool_call>b", CALL_F.replace('"x"', '"y"'), "a</tool_call>"):
        assert fault(requested, text)
    assert answer_grammar(RequestedAnswer(QWEN, (G,)), VOCABULARY.added) == ""


def test_none_choice_allows_text_without_calls() -> None:
    requested = RequestedAnswer(QWEN, (F, G), "none")
    for text in ("", "hello {", '{"name": "f"}', "<think>a</think>\n\nb"):
        assert fault(requested, text) == ""
    for text in (CALL_F, f"Look:\n{CALL_G}", "a<tool_call>", f"<think>a</think>{CALL_F}"):
        assert fault(requested, text)
    for free in (RequestedAnswer(QWEN, (), "none"), RequestedAnswer(AnswerFormat(), (F,), "none")):
        assert answer_grammar(free, VOCABULARY.added) == ""


@pytest.mark.parametrize("form", CALLS, ids=lambda form: form.names[0])
def test_none_choice_forbids_the_opening_marks_of_every_format(form: CallFormat) -> None:
    """A format without marks stays free, since its calls are JSON objects."""
    requested = RequestedAnswer(AnswerFormat(form), (F, G), "none")
    marks = list(openers(form))
    vocabulary = Vocabulary(marks)
    grammar = answer_grammar(requested, vocabulary.added)
    assert bool(grammar) == bool(marks)
    for mark in marks:
        assert accepts(vocabulary, grammar, vocabulary.split("hello {")) == ""
        assert accepts(vocabulary, grammar, vocabulary.split(f"hello {mark}"))
        assert accepts(vocabulary, grammar, list(mark.encode()))  # nor byte by byte


def test_constrained_content_is_allowed_as_well_as_calls() -> None:
    content = StructuredOutputsParams(json={"type": "object", "properties": {"a": {}}})
    requested = RequestedAnswer(QWEN, (F, G), content=content)
    for text in ('{"a": 1}', CALL_F, '<think>x</think>\n\n{"a": 1}', "<think></think>" + CALL_G):
        assert fault(requested, text) == ""
    for text in ("hello", "<think>x", CALL_F + '{"a": 1}'):
        assert fault(requested, text)
    assert fault(RequestedAnswer(QWEN, (F,), "none", content=content), CALL_F)


def test_reasoning_after_reasoning_is_rejected() -> None:
    content = StructuredOutputsParams(json={"type": "object", "properties": {"a": {}}})
    for requested, rest in (
        (RequestedAnswer(QWEN, (F,), "required", has_reasoned=True), CALL_F),
        (RequestedAnswer(QWEN, content=content, has_reasoned=True), '{"a": 1}'),
        (RequestedAnswer(QWEN, thinking_token_budget=3, has_reasoned=True), "anything"),
    ):
        assert fault(requested, rest) == ""
        assert fault(requested, "<think>x</think>\n\n" + rest)


def test_grammar_enforces_the_thinking_token_budget() -> None:
    for tools, rest in (((), "anything <tool_call>"), ((F,), CALL_F)):
        choice = "required" if tools else "auto"
        requested = RequestedAnswer(
            QWEN, tools, choice, begins_in_reasoning=True, thinking_token_budget=3
        )
        for text in ("abc</think>", "</think>"):
            assert fault(requested, text + rest) == ""
        assert "'d' is refused" in fault(requested, "cbd" + "d</think>" + rest)
        assert fault(requested, f"a</think>{rest}<think>b</think>")
    requested = RequestedAnswer(QWEN, thinking_token_budget=0)
    assert fault(requested, "<think></think>hi") == ""
    assert fault(requested, "<think>a</think>hi")


@pytest.mark.parametrize("name", ["get weather", 'q"', "a{b}", " lead", "tab\tname", "x" * 300])
def test_tool_names_that_the_parser_cannot_read_are_rejected(name: str) -> None:
    """Formats that write the name as plain text reject it; JSON allows any name."""
    tool = Tool(name, strict=True)
    for form in (MISTRAL, QWEN3_CODER):
        for choice in ("required", "auto"):
            with pytest.raises(RequestError, match="rename it") as raised:
                answer_grammar(
                    RequestedAnswer(AnswerFormat(form), (tool,), choice), VOCABULARY.added
                )
            assert raised.value.field == "tools"
    assert answer_grammar(RequestedAnswer(QWEN, (tool,), "required"), VOCABULARY.added)


@pytest.mark.parametrize("kind", ["string", ["object", "null"]])
def test_arguments_must_be_an_object_whatever_the_schema_allows(kind: object) -> None:
    requested = RequestedAnswer(QWEN, (Tool("g", {"type": kind}),), "required")
    assert fault(requested, CALL_G) == ""
    for value in ('"a"', "null"):
        assert fault(requested, CALL_G.replace("{}", value))
