"""Custom tools, whose input is free text. The model calls a function with one parameter; the client
sees the call of a custom tool."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.render.templates.chat_template import ChatOptions
from quire.serve.errors import ApiError
from quire.serve.responses.as_chat import chat_tools
from quire.serve.responses.conversation import messages_of
from quire.serve.responses.custom_tools import InputText, described_tools
from tests.serve.api.responses.test_items import read
from tests.serve.api.responses.test_writer import chunk, writer, written
from tests.support.serve.direct_engine import direct
from tests.support.serve.official_types import QUESTION, TOOLS, Json, asked, error_of, streamed

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" /.+/'}
PATCH: Json = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
INPUT = 'a "b"\n\\c/ \U0001f642 ü\t'
SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The input text for the tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def called(text: str = INPUT, **more: Any) -> Json:
    return {
        "type": "custom_tool_call", "call_id": "call_1", "name": "apply_patch", "input": text,
    } | more  # fmt: skip


def test_custom_tool_becomes_a_function_with_one_parameter() -> None:
    function = {"name": "apply_patch", "description": "Edit files.", "parameters": SCHEMA}
    assert chat_tools([PATCH]) == [{"type": "function", "function": function}]
    assert chat_tools([PATCH | {"format": {"type": "text"}}]) == chat_tools([PATCH])
    [tool] = chat_tools([PATCH | {"format": GRAMMAR}]) or ()
    assert tool["function"]["description"] == (
        f"Edit files.\n\nThe input must follow this lark grammar:\n{GRAMMAR['definition']}"
    )
    [tool] = chat_tools([{"type": "custom", "name": "f"}]) or ()
    assert "description" not in tool["function"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].name"),
        (PATCH | {"description": 5}, "tools[0].description"),
        (PATCH | {"format": "text"}, "tools[0].format"),
        (PATCH | {"format": {"type": "yaml"}}, "tools[0].format"),
        (PATCH | {"format": {"type": "grammar", "syntax": "lark"}}, "tools[0].format"),
    ],
)
def test_malformed_custom_tools_are_refused(tool: Json, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_tools([tool])
    assert caught.value.param == param


@pytest.mark.parametrize("escapes", [True, False])
def test_input_is_read_from_arguments_in_any_pieces(escapes: bool) -> None:
    text = json.dumps({"input": INPUT}, ensure_ascii=escapes)
    for size in range(1, len(text) + 1):
        made = InputText()
        pieces = [made.add(text[at : at + size]) for at in range(0, len(text), size)]
        for piece in pieces:
            piece.encode()
        assert "".join(pieces) + made.end() == INPUT
    made = InputText()
    assert (made.add('{"input": "ab'), made.add("c"), made.end()) == ("ab", "c", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ""),
        ("{}", ""),
        ('{"input": "', ""),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "\\ud83d', ""),
        ('{"input": "\\ud83dx"}', "?x"),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"x": 1, "input": "a"}', "a"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("a text", "a text"),
        ('{"input": "a\\qb"}', 'a\\qb"}'),
        ('{"input": "a\\q and much more \\n"}', 'a\\q and much more \\n"}'),
    ],
)
def test_malformed_arguments_are_tolerated(arguments: str, expected: str) -> None:
    for size in (1, 3, 1000):
        made = InputText()
        text = "".join(made.add(arguments[at : at + size]) for at in range(0, len(arguments), size))
        assert text + made.end() == expected


def test_call_becomes_a_custom_tool_call_item() -> None:
    text = json.dumps({"input": INPUT})
    head: Json = {"index": 0, "id": "call_1", "function": {"name": "apply_patch", "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": each}} for each in (text[:20], text[20:])]
    chunks = [chunk(tool_calls=[head]), *(chunk(tool_calls=[each]) for each in rest),
              chunk("tool_calls")]  # fmt: skip
    events = written(chunks, writer(custom={"apply_patch"}))
    deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == INPUT and len(deltas) == 2
    [done] = [e for e in events if e["type"] == "response.custom_tool_call_input.done"]
    [added] = [e for e in events if e["type"] == "response.output_item.added"]
    assert done["input"] == INPUT and added["item"]["input"] == ""
    item = called(id="ctc_0", status="completed")
    assert events[-1]["response"]["output"] == [item]
    assert not any("function_call" in e["type"] for e in events)


def test_calls_and_outputs_become_messages() -> None:
    parts = [{"type": "input_text", "text": "do"}, {"type": "input_text", "text": "ne"}]
    output = {"type": "custom_tool_call_output", "call_id": "call_1", "output": parts}
    items = read([{"role": "user", "content": "x"}, called(), output])
    function = {
        "name": "apply_patch",
        "arguments": json.dumps({"input": INPUT}, ensure_ascii=False),
    }
    call = {"id": "call_1", "type": "function", "function": function}
    assert messages_of(None, items) == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "do\nne"},
    ]
    assert [item["id"] for item in items[1:]] == ["ctc_1", "ctco_2"]


@pytest.mark.parametrize("wrong", [{"input": None}, {"name": 5}, {"call_id": None}])
def test_malformed_calls_are_refused(wrong: Json) -> None:
    with pytest.raises(ApiError) as caught:
        read([called(**wrong)])
    assert caught.value.param == f"input[0].{next(iter(wrong))}"


def test_custom_tool_call_and_output_round_trip(api: TestClient) -> None:
    given: Json = {
        "tools": [PATCH | {"format": GRAMMAR}, *TOOLS],
        "tool_choice": {"type": "custom", "name": "apply_patch"},
        "max_output_tokens": 60, "input": QUESTION,
    }  # fmt: skip
    first = asked(api, **given)
    [item] = first["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "apply_patch")
    assert isinstance(item["input"], str) and first["tools"] == described_tools(given["tools"])
    events = streamed(api, **given)
    assert events[-1]["response"]["output"][0]["input"] == item["input"]
    deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == item["input"]
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    fields: Json = {"tools": TOOLS, "max_output_tokens": 24}
    again = asked(api, input=[{"role": "user", "content": QUESTION}, item, output], **fields)
    continued = asked(api, input=[output], previous_response_id=first["id"], **fields)
    assert again["output"][0]["content"] == continued["output"][0]["content"]
    messages = messages_of(None, read([{"role": "user", "content": QUESTION}, item, output]))
    tools = ChatOptions(tools=chat_tools(TOOLS))
    assert again["output"][0]["content"][0]["text"] == (
        direct(messages, tools, max_tokens=24).outputs[0].text
    )


def test_server_side_tools_are_refused(api: TestClient) -> None:
    error = error_of(api, input="x", tools=[PATCH, {"type": "web_search"}])
    assert error["param"] == "tools[1].type" and "function or custom" in error["message"]
