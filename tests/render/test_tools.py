"""Tool calls in text; what cannot be read stays text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.render.tools import ToolCall, parse_tool_calls

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
F = ToolCall("f", '{"x": 1}')


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("no call", "no call", []),
        (CALL, "", [F]),
        (f"Let me see.\n{CALL}\n{CALL}", "Let me see.", [F, F]),
        (CALL.removesuffix("\n</tool_call>"), "", [F]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [F]),
        ('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', "", [F]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [ToolCall("f", "{}")]),
        (f"<tool_call>oops {CALL}", "<tool_call>oops", [F]),
        (f"{CALL}<tool_call>{{bad}}</tool_call>", "<tool_call>{bad}</tool_call>", [F]),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "f"} and more', '<tool_call>{"name": "f"} and more', []),
        ('<tool_call>["f"]</tool_call>', '<tool_call>["f"]</tool_call>', []),
        (
            '<tool_call>{"name": "f", "arguments": "x"}',
            '<tool_call>{"name": "f", "arguments": "x"}',
            [],
        ),
        ("  <tool_call>{", "  <tool_call>{", []),
    ],
)
def test_calls(text: str, rest: str, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(text) == (rest, calls)


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.none()))
def test_any_arguments_come_back(arguments: dict[str, object]) -> None:
    """Also texts that hold tags."""
    body = json.dumps({"name": "f", "arguments": arguments | {"tag": "</tool_call><tool_call>"}})
    rest, calls = parse_tool_calls(f"a<tool_call>{body}</tool_call>b")
    assert rest == "ab"
    assert json.loads(calls[0].arguments) == arguments | {"tag": "</tool_call><tool_call>"}


def test_deep_nesting_is_text() -> None:
    text = "<tool_call>" + "[" * 100_000
    assert parse_tool_calls(text) == (text, [])
