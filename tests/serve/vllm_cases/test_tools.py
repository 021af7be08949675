"""Tools"""

import json
from typing import Any

import jsonschema
import pytest

from tests.support.serve.vllm_cases import ASK, OTHER_TOOL, TOOL, TOOLS, Asked, refused

NAMED = {"type": "function", "function": {"name": "add"}}
MORE: dict[str, Any] = {"tools": TOOLS, "max_completion_tokens": 200}
PARAMETERS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}


def check(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), PARAMETERS[name])


def test_auto(asked: Asked) -> None:
    """what is called of one's own accord can be called"""
    [choice] = asked.chat(tool_choice="auto", **MORE).choices
    calls = choice.message.tool_calls or []
    assert choice.message.content or calls
    for call in calls:
        assert call.function.name in PARAMETERS


def test_default(asked: Asked) -> None:
    """tools without a tool_choice are as with auto"""
    auto = asked.chat(tool_choice="auto", **MORE).choices[0].message
    assert asked.chat(**MORE).choices[0].message.content == auto.content


def test_named(asked: Asked) -> None:
    """a named tool is called, with arguments of its schema, and the end is a stop"""
    [choice] = asked.chat(tool_choice=NAMED, **MORE).choices
    [call] = choice.message.tool_calls
    assert call.function.name == "add" and call.id and choice.finish_reason == "stop"
    check("add", call.function.arguments)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_streamed(asked: Asked, choice: Any) -> None:
    """a stream's calls join to those of an answer in one piece; a name comes once"""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for chunk in asked.chat(stream=True, tool_choice=choice, **MORE):
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.function.name:
                assert call.index not in names
                names[call.index] = call.function.name
            part = call.function.arguments or ""
            arguments[call.index] = arguments.get(call.index, "") + part
    whole = asked.chat(tool_choice=choice, **MORE).choices[0].message.tool_calls
    assert [(names[i], arguments[i]) for i in sorted(names)] == [
        (call.function.name, call.function.arguments) for call in whole
    ]


def test_required(asked: Asked) -> None:
    """required calls one at least"""
    [choice] = asked.chat(tool_choice="required", **MORE).choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    for call in choice.message.tool_calls:
        check(call.function.name, call.function.arguments)


def test_none(asked: Asked) -> None:
    """none calls none, and the prompt still shows the tools"""
    found = asked.chat(tool_choice="none", return_token_ids=True, **MORE)
    assert not found.choices[0].message.tool_calls and found.choices[0].message.content
    auto = asked.chat(tool_choice="auto", return_token_ids=True, **MORE)
    assert found.prompt_token_ids == auto.prompt_token_ids


def test_null(asked: Asked) -> None:
    """null is as if it were not there"""
    assert asked.chat(tool_choice=None).choices[0].message.content


def test_none_given(asked: Asked) -> None:
    """an empty list of tools is none"""
    assert asked.chat(tools=[]).choices[0].message.content


def test_unknown(asked: Asked) -> None:
    """a named tool must be one of them"""
    wrong = {"type": "function", "function": {"name": "fly"}}
    assert refused(asked.chat, tool_choice=wrong, **MORE)["param"].startswith("tool_choice")


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_choice_without_tools(asked: Asked, choice: Any) -> None:
    """a choice needs tools"""
    assert refused(asked.chat, tool_choice=choice)["param"].startswith("tool")


@pytest.mark.parametrize("choice", ["sometimes", {"type": "function"}, {"function": {}}])
def test_wrong_choice(asked: Asked, choice: Any) -> None:
    """a choice that there is not is refused"""
    assert refused(asked.chat, tool_choice=choice, **MORE)["param"].startswith("tool_choice")


WRONG_TOOLS: list[Any] = [
    {"type": "function"}, {"function": {"name": ""}, "type": "function"}, {"type": "other"}, 5,
]  # fmt: skip


@pytest.mark.parametrize("tool", WRONG_TOOLS)
def test_wrong_tool(asked: Asked, tool: Any) -> None:
    """so is a tool without a name"""
    assert refused(asked.chat, tools=[tool])["param"].startswith("tools")


def test_one_at_a_time(asked: Asked) -> None:
    """parallel_tool_calls false gives one"""
    for seed in range(3):
        more = MORE | {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        assert len(asked.chat(**more).choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("content", ["sunny", [{"type": "text", "text": "sunny"}]])
def test_answered(asked: Asked, content: Any) -> None:
    """calls and their results go back as messages, as a text or in parts"""
    call = asked.chat(tool_choice=NAMED, **MORE).choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": content}
    talk = [*ASK, call.model_dump(exclude_none=True), result]
    assert asked.chat(talk, tools=TOOLS, tool_choice="none").choices[0].message.content


def test_token_ids(asked: Asked) -> None:
    """return_token_ids goes with them"""
    found = asked.chat(tool_choice=NAMED, return_token_ids=True, logprobs=True, **MORE)
    assert found.prompt_token_ids and found.choices[0].token_ids


def test_strict(asked: Asked) -> None:
    """a strict tool is called by its schema"""
    strict = TOOL | {"function": TOOL["function"] | {"strict": True}}
    more = {"tools": [strict], "tool_choice": "required", "max_completion_tokens": 200}
    for call in asked.chat(**more).choices[0].message.tool_calls:
        check("get_weather", call.function.arguments)


def test_without_parameters(asked: Asked) -> None:
    """a tool without parameters is called with an empty object"""
    bare = {"type": "function", "function": {"name": "now"}}
    empty = OTHER_TOOL | {"function": {"name": "now", "parameters": {}}}
    for tool in (bare, empty):
        more: dict[str, Any] = {"tools": [tool], "tool_choice": "required"}
        bias = {str(asked.tokens("}")[-1]): 90}
        found = asked.chat(logit_bias=bias, max_completion_tokens=60, **more).choices[0]
        for call in found.message.tool_calls:
            assert isinstance(json.loads(call.function.arguments), dict)
