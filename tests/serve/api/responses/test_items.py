"""Items of an input: how they are read, converted to messages, and refused.

Covers `serve/responses/conversation.py`.
"""

import itertools
from typing import Any

import pytest

from quire.serve.errors import ApiError
from quire.serve.responses.conversation import messages_of
from quire.serve.responses.items import read_items
from tests.support.serve.official_types import Json, checked_list

USER: Json = {"role": "user", "content": "x"}


def read(given: Any) -> list[Json]:
    numbers = itertools.count()
    return read_items(given, lambda kind: f"{kind}_{next(numbers)}")


def assistant(text: str, **more: Any) -> Json:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], **more}


def call(number: int, **more: Any) -> Json:
    head = {"type": "function_call", "call_id": f"call_{number}", "name": "f"}
    return head | {"arguments": '{"x": 1}', **more}


def reasoning(*texts: str, **more: Any) -> Json:
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "id": "rs_0", "summary": [], "content": content, **more}


def result(number: int, output: Any) -> Json:
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": output}


def test_assistant_turn_becomes_one_message() -> None:
    given = [
        USER, reasoning("a", "b"), assistant("I call."), call(1), call(2), result(1, "y"),
        result(2, [{"type": "input_text", "text": "z"}]), reasoning("c"), assistant("Done."),
        assistant("!"),
    ]  # fmt: skip
    function = {"name": "f", "arguments": '{"x": 1}'}
    calls = [{"id": f"call_{n}", "type": "function", "function": function} for n in (1, 2)]
    assert messages_of(None, read(given)) == [
        USER,
        {"role": "assistant", "content": "I call.", "reasoning_content": "a\nb",
         "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "y"},
        {"role": "tool", "tool_call_id": "call_2", "content": "z"},
        {"role": "assistant", "content": "Done.", "reasoning_content": "c"},
        {"role": "assistant", "content": "!"},
    ]  # fmt: skip


def test_instructions_merge_with_a_leading_system_message() -> None:
    system = {"role": "system", "content": "b"}
    assert messages_of("a", read([system, USER])) == [{"role": "system", "content": "a\n\nb"}, USER]
    assert messages_of(None, read([system, USER])) == [system, USER]
    assert messages_of("a", read([USER, system])) == [
        {"role": "system", "content": "a"}, USER, system,
    ]  # fmt: skip


def test_several_parts_stay_separate() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    [message] = messages_of(None, read([{"role": "user", "content": parts}]))
    assert [part["text"] for part in message["content"]] == ["a", "b"]


def test_listed_items_match_the_official_types() -> None:
    """Whatever other fields the items came with."""
    given = [
        "x", USER, assistant("y", phase="final_answer", status="incomplete"),
        call(1, namespace="n"),
        result(1, "z"), reasoning("a", encrypted_content="e", status=None),
    ]  # fmt: skip
    items = read(given)
    page = {"object": "list", "data": items, "first_id": "", "last_id": "", "has_more": False}
    checked_list(page)
    assert [item["id"] for item in items] == ["msg_0", "msg_1", "msg_2", "fc_3", "fco_4", "rs_0"]


def test_refusals_and_summaries_become_text() -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    assert messages_of(None, read([summary, refusal])) == [
        {"role": "assistant", "content": "no", "reasoning_content": "s"}
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"x": ', '{"x": '), ("no JSON", "no JSON"), ("", ""), (None, "{}")],
)
def test_malformed_arguments_are_passed_on(arguments: Any, expected: str) -> None:
    """max_tokens may have cut them off, or the model may have written invalid JSON."""
    [_, message] = messages_of(None, read([USER, call(1, arguments=arguments)]))
    assert message["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    ("item", "where", "words"),
    [
        (5, "", "must be an object"),
        ({"type": "web_search_call", "id": "ws_1"}, ".type", "must be one of message"),
        ({"type": ["message"]}, ".type", "must be one of"),
        ({"role": "user"}, ".content", "a text or a list of parts, got null"),
        ({"role": "user", "content": [{"type": "input_x"}]},
         ".content[0].type", "must be input_text or input_image, got"),
        ({"role": "assistant", "content": [{"type": "input_image", "image_url": "u"}]},
         ".content[0].type", "must be input_text or output_text, got"),
        ({"role": "user", "content": [{"type": "input_text"}]}, ".content[0].text", "is required"),
        ({"role": "user", "content": ["x"]}, ".content[0]", "must be an object"),
        (USER | {"id": 5}, ".id", "must be a text"),
        (USER | {"id": "x" * 300}, ".id", "at most 256"),
        (call(1, arguments=5), ".arguments", "is required"),
        (call(1, name=None), ".name", "is required"),
        ({"type": "function_call_output", "output": "x"}, ".call_id", "is required"),
        (result(1, None), ".output", "a text or a list"),
        (reasoning(encrypted_content="e"), ".encrypted_content", "remove the item"),
        ({}, ".id", "is required"),
    ],
)  # fmt: skip
def test_malformed_items_are_refused(item: Any, where: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        read([USER, item])
    assert caught.value.param == f"input[1]{where}"
    assert words in caught.value.message
