"""Calls in streams: cut anywhere, the pieces give what the whole text gives."""

import json
import random
import time

import pytest

from quire.render.tools import ToolCall, parse_tool_calls
from quire.serve.api.tool_stream import Piece, ToolCallStream, parse_answer

CALL = (
    '<tool_call>\n{"name": "f", "arguments": {"city": "Paris", "n": [1, {"a": "}"}]}}\n</tool_call>'
)
SHORT = '<tool_call>{"name":"g","arguments":{}}</tool_call>'

SAMPLES = [
    "",
    "plain text, no call at all",
    "  leading and trailing space \n ",
    "a < b, a <tool b, <tool_call without its end",
    "<<tool_call>>",
    CALL,
    f"Let me look. \n\n{CALL}",
    f"one {SHORT} two\n{CALL}\n\n three ",
    SHORT + SHORT,
    f"{SHORT} <tool_",
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}',
    '<tool_call>{"name": "f", "arguments": {}} ',
    '<tool_call>{"name": "f", "arguments": {}}</tool_',
    '<tool_call>{"name": "f", "arguments": {}} and more',
    '<tool_call>{"name": "f", "argum',
    "<tool_call>not JSON</tool_call> text",
    "<tool_call>[1, 2]</tool_call>",
    '<tool_call>{"name": 3}</tool_call> x',
    f"<tool_call>{SHORT}",
    f"<tool_call>{{ {SHORT} tail",
    '<tool_call>{"name": "f", "arguments": {"t": "</tool_call><tool_call> \\" \\\\"}}</tool_call>',
    f" \n{SHORT} text",
    '<tool_call>{"name": "f", "arguments": {"x": "unfinished <tool_call>{',
    "text <tool_call> \n ",
    'é <tool_call>{"name": "ü", "arguments": {"k": "日本"}}</tool_call> ñ',
]


def streamed(pieces: list[str]) -> list[Piece]:
    stream = ToolCallStream()
    out = [item for piece in pieces for item in stream.push(piece)]
    return out + stream.flush()


def halves(text: str) -> list[list[str]]:
    """Every cut into two and every cut into three around it, and all characters alone."""
    cuts = [[text[:i], text[i:]] for i in range(len(text) + 1)]
    cuts += [[text[:i], text[i : i + 1], text[i + 1 :]] for i in range(len(text))]
    return [*cuts, list(text)]


@pytest.mark.parametrize("text", SAMPLES)
def test_every_cut_gives_the_calls_and_the_text_of_the_whole(text: str) -> None:
    content, calls = parse_tool_calls(text)
    for pieces in halves(text):
        out = streamed(pieces)
        assert [item for item in out if isinstance(item, ToolCall)] == calls, pieces
        assert "".join(item for item in out if isinstance(item, str)) == content, pieces


def test_random_texts_cut_at_random() -> None:
    chance = random.Random(7)
    parts = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}', '"', "{", "}",
             "\\", " ", "\n", "<", "x", "[", "]", SHORT, '{"name":', "null"]  # fmt: skip
    for _ in range(2000):
        text = "x" + "".join(chance.choices(parts, k=chance.randint(1, 12)))
        cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randint(0, 6)))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        content, calls = parse_tool_calls(text)
        out = streamed(pieces)
        assert [item for item in out if isinstance(item, ToolCall)] == calls, pieces
        assert "".join(item for item in out if isinstance(item, str)) == content, pieces


def test_text_is_not_held_back() -> None:
    stream = ToolCallStream()
    assert stream.push("Hello") == ["Hello"]
    assert stream.push(" wor") == [" wor"]
    assert stream.push("ld <b>") == ["ld <b>"]
    assert stream.push(" a <tool") == [" a"]
    assert stream.push("box>") == [" <toolbox>"]


def test_a_call_comes_as_soon_as_it_is_complete() -> None:
    stream = ToolCallStream()
    assert stream.push(SHORT[:-1]) == []
    assert stream.push(">") == [ToolCall("g", "{}")]
    assert stream.push("after") == ["after"]


def test_a_broken_call_is_text_before_the_end() -> None:
    stream = ToolCallStream()
    assert stream.push("<tool_call> {") == []
    assert "".join(map(str, stream.push("<b>"))) == "<tool_call> {<b>"


@pytest.mark.parametrize("streams", [False, True])
def test_calls_can_always_be_sent_as_utf8(streams: bool) -> None:
    r"""A model may write \ud800, half of a pair, in JSON."""
    text = r'<tool_call>{"name": "\ud800f", "arguments": {"a": "\udfff"}}</tool_call>'
    call = streamed([text])[0] if streams else parse_answer(text)[1][0]
    assert isinstance(call, ToolCall)
    (call.name + call.arguments).encode()
    assert json.loads(call.arguments) == {"a": "\udfff"}


def test_deep_arguments_do_not_raise() -> None:
    for depth in (100, 900, 990, 5000, 100_000):
        deep = "[" * depth + "]" * depth
        text = f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}}}}}</tool_call>'
        parse_answer(text)
        streamed([text])


@pytest.mark.parametrize(
    "unit",
    ["<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>{"a":"', '"<tool_call>{"a\\"',
     " ", "<", "</tool_call>", '<tool_call>{"a":"</tool_call>', "<tool_call>{}</tool_call>"],
)  # fmt: skip
def test_the_time_is_linear(unit: str) -> None:
    """Twenty thousand pieces that a quadratic reader would take minutes for."""
    start = time.perf_counter()
    streamed([unit] * 20_000)
    assert time.perf_counter() - start < 5
