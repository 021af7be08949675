"""Messages with blocks become chat messages (`serve/anthropic/conversation.py`)."""

from typing import Any

import pytest

from quire.serve.anthropic.as_chat import chat_of
from quire.serve.anthropic.conversation import chat_messages, continues_last
from quire.serve.anthropic.protocol import CountTokensRequest
from quire.serve.errors import ApiError

TEXT = {"type": "text", "text": "a"}
CALL = {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": [1, "ü"]}}
CHAT_CALL = {
    "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "ü"]}'},
}  # fmt: skip


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def result(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id} | fields


def tool(call_id: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content} | fields


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "a"}], [{"role": "user", "content": "a"}]),
        ([user(TEXT, text("b"))], [{"role": "user", "content": [TEXT, text("b")]}]),
        ([user(TEXT), user(text("b"))], [{"role": "user", "content": [TEXT, text("b")]}]),
        (
            [user(TEXT), assistant(text("b"), CALL, text("c"))],
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [text("b"), text("c")],
                 "tool_calls": [CHAT_CALL]},
            ],
        ),
        (
            [
                assistant({"type": "thinking", "thinking": "t", "signature": "s"}, CALL),
                user(result("c1", content="1"), text("b"), result("c2", content=[TEXT])),
            ],
            [
                {"role": "assistant", "content": None, "reasoning_content": "t",
                 "tool_calls": [CHAT_CALL]},
                tool("c1", "1", name="f"),
                {"role": "user", "content": "b"},
                tool("c2", "a"),
            ],
        ),
        (
            [user(result("c1"), result("c2", content=[]), result("c3", content="x", is_error=1))],
            [tool("c1", ""), tool("c2", ""), tool("c3", "Error: x")],
        ),
        (
            [assistant(TEXT, CALL), assistant(CALL | {"id": "c2"})],
            [{"role": "assistant", "content": "a", "tool_calls": [
                CHAT_CALL, CHAT_CALL | {"id": "c2"}]}],
        ),
        (
            [{"role": "system", "content": "s"}, user(TEXT)],
            [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
        ),
    ],
)  # fmt: skip
def test_blocks_become_chat_messages(messages: list[Any], expected: list[Any]) -> None:
    assert chat_messages(None, messages) == expected


def test_the_system_prompt_comes_first() -> None:
    header = text("x-anthropic-billing-header: cch=1")
    found = chat_messages([header, TEXT], [user(text("b"))])
    assert found == [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert chat_messages("a", [user(text("b"))]) == found
    assert chat_messages([header], [user(text("b"))]) == found[1:]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "tool", "content": "a"}, "messages[1].role must be one of user, assistant"),
        ({"content": "a"}, "messages[1].role must be"),
        (user(), "messages[1].content must be a text or a list of blocks, got an empty list"),
        ({"role": "user"}, "messages[1].content must be a text or a list of blocks, got null"),
        (user("a"), '.content[0].type must be one of text, image, tool_result, got "a"'),
        (user(TEXT, CALL), '.content[1].type must be one of text, image, tool_result, got'),
        (assistant(result("c")), 'got "tool_result"'),
        (user({"type": "document"}), 'got "document"'),
        (user({"type": "text"}), "messages[1].content[0].text must be a text, got null"),
        (user(result("c", content=[CALL])), "[0].content[0].type must be one of text, image,"),
        (user({"type": "tool_result"}), "messages[1].content[0].tool_use_id must be a text"),
        (assistant(CALL | {"input": "{}"}), 'content[0].input must be an object, got "{}"'),
        (assistant(CALL | {"name": ""}), "content[0].name must be a text that is not empty"),
        (assistant(CALL | {"id": None}), "content[0].id must be a text that is not empty"),
    ],
)  # fmt: skip
def test_errors_name_the_wrong_block(message: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_messages(None, [user(TEXT), message])
    assert words in caught.value.message


def test_only_text_can_be_continued() -> None:
    assert not continues_last(chat_messages(None, [user(TEXT)]))
    assert continues_last(chat_messages(None, [user(TEXT), assistant(text("b"))]))
    for blocks, words in (([CALL], "tool_use"), ([{"type": "redacted_thinking"}], "without text")):
        with pytest.raises(ApiError, match=words):
            continues_last(chat_messages(None, [user(TEXT), assistant(*blocks)]))


def chat(**fields: Any) -> dict[str, Any]:
    body = CountTokensRequest(messages=[user(TEXT)], **fields)
    found = chat_of(body).model_dump(exclude_unset=True)
    return {name: value for name, value in found.items() if name not in ("messages", "model")}


SCHEMA = {"type": "object", "properties": {}}
TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True, "type": "custom"}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tools": [TOOL | {"cache_control": {}}]}, {"tools": [CHAT_TOOL]}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
            {"tools": [CHAT_TOOL],
             "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"x": 1}},
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False, "x": 1}},
        ),
        (
            {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": False}},
        ),
    ],
)  # fmt: skip
def test_fields_become_chat_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert chat(**fields) == expected
