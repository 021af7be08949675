"""Answers give the same parts however they are split, and no text of the model is lost.

Covers `render/answers/calls.py`, `render/answers/feed.py` and `render/answers/json_reader.py`.
"""

import json
import random
import time

import pytest

from quire.render.answers.parser import AnswerParser
from quire.render.answers.parts import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Part,
    Reasoning,
    joined,
)
from quire.render.answers.table import HERMES, THINK

CALL = (
    '<tool_call>\n{"name": "f", "arguments": {"city": "Paris", "n": [1, {"a": "}"}]}}\n</tool_call>'
)
ARGUMENTS = '{"city": "Paris", "n": [1, {"a": "}"}]}'
SHORT = '<tool_call>{"name":"g","arguments":{}}</tool_call>'


def parsed(pieces: list[str], begins_in_reasoning: bool = False) -> list[Part]:
    parser = AnswerParser(HERMES, THINK, (), begins_in_reasoning)
    out = [part for piece in pieces for part in parser.push(piece)]
    return without_ids(joined(out + parser.flush()))


def without_ids(parts: list[Part]) -> list[Part]:
    return [CallBegun(p.index, p.name, "") if isinstance(p, CallBegun) else p for p in parts]


def cuts(text: str) -> list[list[str]]:
    """Return every split into two, every split around one character, and all characters."""
    found = [[text[:i], text[i:]] for i in range(len(text) + 1)]
    found += [[text[:i], text[i : i + 1], text[i + 1 :]] for i in range(len(text))]
    return [*found, list(text)]


def call(name: str, arguments: str, index: int = 0) -> list[Part]:
    return [CallBegun(index, name, ""), CallArguments(index, arguments), CallEnded(index)]


F, G = call("f", ARGUMENTS), call("g", "{}")
SAMPLES: list[tuple[str, list[Part]]] = [
    ("", []),
    ("plain text, no call at all", [Content("plain text, no call at all")]),
    ("  space around \n ", [Content("  space around \n ")]),
    ("a < b, a <tool b, <tool_call", [Content("a < b, a <tool b, <tool_call")]),
    ("<<tool_call>>", [Content("<<tool_call>>")]),
    (CALL, F),
    (CALL.removesuffix("\n</tool_call>"), F),
    (f"Let me look. \n\n{CALL}", [Content("Let me look."), *F]),
    (f"one {SHORT} two\n{CALL}\n\n three ",
     [Content("one"), *G, Content("  two"), *call("f", ARGUMENTS, 1), Content("\n\n\n three")]),
    (SHORT + SHORT, [*G, *call("g", "{}", 1)]),
    (f" \n{SHORT} text", [*G, Content("text")]),
    (f"<tool_call>oops {SHORT}", [Content("<tool_call>oops"), *G]),
    (f"<tool_call>{{ {SHORT} tail", [Content("<tool_call>{"), *G, Content("  tail")]),
    (f"{SHORT}<tool_call>{{bad}}</tool_call>", [*G, Content("<tool_call>{bad}</tool_call>")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', call("f", '{"x": 1}')),
    ('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', call("f", '{"x": 1}')),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', call("f", "{}")),
    ('<tool_call>{"name": "f", "parameters": null}</tool_call> x',
     [*call("f", "{}"), Content("x")]),
    ('<tool_call>{"arguments": null, "name": "f"}</tool_call>', call("f", "{}")),
    ('<tool_call>{"name": "f", "arguments": "null"}</tool_call>', call("f", "{}")),
    ('<tool_call>{"name": "f", "arguments": nul}</tool_call>',
     [Content('<tool_call>{"name": "f", "arguments": nul}</tool_call>')]),
    ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', call("f", '{"x": 1}')),
    ('<tool_call>{"id": [1], "name": "f", "arguments": {}, "y": 2}</tool_call>', call("f", "{}")),
    ('<tool_call>{"name": "f", "args": {"x": 1}}</tool_call>',
     [Content('<tool_call>{"name": "f", "args": {"x": 1}}</tool_call>')]),
    ('<tool_call>{"name": "f"}</tool_call>', call("f", "{}")),
    ('<tool_call>{"name": "f", "argum', [Content('<tool_call>{"name": "f", "argum')]),
    ('<tool_call>{"name": 3}</tool_call> x', [Content('<tool_call>{"name": 3}</tool_call> x')]),
    ('<tool_call>["f"]</tool_call>', [Content('<tool_call>["f"]</tool_call>')]),
    ('<tool_call>{"name": "f", "arguments": "x"}',
     [Content('<tool_call>{"name": "f", "arguments": "x"}')]),
    ('<tool_call>{"name": "f", "arguments": {}} and more', [*call("f", "{}"), Content("and more")]),
    ('<tool_call>{"name": "f", "arguments": {}, oops', [*call("f", "{}"), Content(", oops")]),
    ('<tool_call>{"name": "f", "arguments": {"x": oops}}</tool_call> y',
     [*call("f", '{"x": oops}}'), Content("y")]),
    ('<tool_call>{"name": "f", "arguments": {"x": "unfinished <tool_call>{',
     call("f", '{"x": "unfinished <tool_call>{')),
    ('é <tool_call>{"name": "ü", "arguments": {"k": "日本"}}</tool_call> ñ',
     [Content("é"), *call("ü", '{"k": "日本"}'), Content("  ñ")]),
    ("<think>\nab\n</think>\n\nhi", [Reasoning("ab"), Content("hi")]),
    ("<think>\n\n</think>\n\nhi <th", [Content("hi <th")]),
    ("<think>abc", [Reasoning("abc")]),
    ("a</think>b", [Content("ab")]),
    (f"<think>a {SHORT}</think>{SHORT}", [Reasoning(f"a {SHORT}"), *G]),
    ("<think>a</think>b<think>c</think>d",
     [Reasoning("a"), Content("b"), Reasoning("\n\nc"), Content("d")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "parts"), SAMPLES)
def test_parser_gives_the_same_parts_for_every_split(text: str, parts: list[Part]) -> None:
    for pieces in cuts(text):
        assert parsed(pieces) == parts, pieces


def test_prompt_may_open_the_reasoning() -> None:
    text = "abc </th </think>\n\nhello"
    for pieces in cuts(text):
        assert parsed(pieces, True) == [Reasoning("abc </th"), Content("hello")]
    assert parsed(["<think>abc</think>"], True) == [Reasoning("abc")]
    assert parsed(["</think>abc"], True) == [Content("abc")]


def test_random_splits_of_random_texts_give_the_same_parts() -> None:
    chance = random.Random(7)
    words = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}', '"', "{", "}",
             "\\", " ", "\n", "<", "x", "[", "]", SHORT, '{"name":', "null", "<think>", "</think>",
             '{"name": "f", "arguments": ', "\\u00", "1.5e", "true", ",", ":"]  # fmt: skip
    for _ in range(2000):
        text = "".join(chance.choices(words, k=chance.randint(1, 12)))
        ends = sorted(chance.choices(range(len(text) + 1), k=chance.randint(0, 6)))
        pieces = [text[i:j] for i, j in zip([0, *ends], [*ends, len(text)], strict=True)]
        assert parsed(pieces) == parsed([text]), pieces


def test_text_is_held_back_only_while_it_may_begin_a_mark() -> None:
    parser = AnswerParser(HERMES, THINK)
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" wor") == [Content(" wor")]
    assert parser.push("ld <b>") == [Content("ld <b>")]
    assert parser.push(" a <tool") == [Content(" a")]
    assert parser.push("box>") == [Content(" <toolbox>")]
    assert parser.push("<think>x") == [Reasoning("x")]
    assert parser.push(" y") == [Reasoning(" y")]


def test_arguments_stream_as_they_are_written() -> None:
    parser = AnswerParser(HERMES, None)
    assert parser.push('<tool_call>\n{"name": "f", "argum') == []
    [begun, first] = parser.push('ents": {"ci')
    assert isinstance(begun, CallBegun)
    assert first == CallArguments(0, '{"ci')
    assert parser.push('ty": "Os') == [CallArguments(0, 'ty": "Os')]
    assert parser.push('lo"}}') == [CallArguments(0, 'lo"}'), CallEnded(0)]
    assert parser.push("\n</tool_call>") == []
    assert parser.flush() == []


@pytest.mark.parametrize("size", [1, 1000])
def test_calls_with_lone_surrogates_can_be_sent_as_utf8(size: int) -> None:
    r"""A model may write \ud800, a lone surrogate, in JSON."""
    for arguments in (r'{"a": "\udfff"}', r'"{\"a\": \"\udfff\"}"', r'"{\"a\": \"\\udfff\"}"'):
        text = rf'<tool_call>{{"name": "\ud800f", "arguments": {arguments}}}</tool_call>'
        begun, given, _ = parsed([text[i : i + size] for i in range(0, len(text), size)])
        assert isinstance(begun, CallBegun)
        assert isinstance(given, CallArguments)
        (begun.name + given.text).encode()
        assert json.loads(given.text) == {"a": "\udfff"}


def test_deep_arguments_do_not_raise() -> None:
    for depth in (100, 900, 990, 5000, 100_000):
        deep = "[" * depth + "]" * depth
        for arguments in (f'{{"a": {deep}}}', json.dumps(f'{{"a": {deep}}}')):
            parsed([f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'])
    text = "<tool_call>" + "[" * 100_000
    assert parsed([text]) == [Content(text)]


@pytest.mark.parametrize("together", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "unit",
    ["<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>{"a":"', '"<tool_call>{"a\\"',
     " ", "<", "</tool_call>", '<tool_call>{"a":"</tool_call>', "<tool_call>{}</tool_call>", "\\",
     '<tool_call>{"name":"f","arguments":[', '<tool_call>{"name":"f","arguments":{}', "<think>",
     '["<tool_call>{",'],
)  # fmt: skip
def test_parsing_time_is_linear(unit: str, together: bool) -> None:
    """In quadratic time, eight times as many chunks would take 64 times as long."""

    def cpu_s(pieces: int) -> float:
        start = time.process_time()
        parsed([unit * pieces] if together else [unit] * pieces)
        return time.process_time() - start

    ratios = (cpu_s(3000) / max(cpu_s(375) for _ in range(3)) for _ in range(3))
    assert any(ratio < 24 for ratio in ratios)  # a busy core may spoil one measurement


@pytest.mark.parametrize(
    ("text", "begins", "end"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, len("<think>\nhm\n</think>")),
        ("hm</think>yes", True, len("hm</think>")),
        ("yes <think>no</think>", False, 0),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', False, 0),
        ("<think>hm", False, None),
        ("  ", False, 0),
        ("<think>a</think><think>b</think>c", False, len("<think>a</think><think>b</think>")),
    ],
)
def test_parser_reports_where_reasoning_ends(text: str, begins: bool, end: int | None) -> None:
    """The position does not depend on where the text is split."""
    for cut in range(len(text) + 1):
        parser = AnswerParser(HERMES, THINK, begins_in_reasoning=begins)
        parser.push(text[:cut])
        parser.push(text[cut:])
        parser.flush()
        assert parser.reasoning_end == end
