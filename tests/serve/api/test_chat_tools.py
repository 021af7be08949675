"""Tool calls in whole and streamed responses of the demo model, which was trained on them."""

import json
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from quire.render.answers import table
from quire.render.answers.format import AnswerFormat
from quire.render.templates.chat_template import ChatOptions
from quire.serve.bodies.protocol import ChatCompletionRequest
from quire.serve.pipeline.plan import ChatPlan
from quire.serve.pipeline.requests import answer_form
from tests.support.serve.direct_engine import direct

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
SMALLTALK = [{"role": "user", "content": "Hello, how are you?"}]
ARGUMENTS: dict[str, Any] = {"model": "demo", "messages": QUESTION, "temperature": 0}


def arguments_of(calls: list[Any]) -> str:
    """Return the arguments of one call, which arrive in pieces."""
    return "".join(call.function.arguments or "" for call in calls)


def test_tool_call_is_parsed_out_of_the_text(openai_client: openai.OpenAI) -> None:
    raw = direct(QUESTION, ChatOptions(tools=TOOLS), max_tokens=60).outputs[0].text
    assert raw.startswith("<tool_call>")
    choice = openai_client.chat.completions.create(**ARGUMENTS, tools=TOOLS).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert call.id.startswith("call_")


def test_tool_call_is_streamed_in_deltas(openai_client: openai.OpenAI) -> None:
    chunks = list(openai_client.chat.completions.create(**ARGUMENTS, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function.name] == ["get_weather"]
    assert json.loads(arguments_of(calls)) == {"city": "Paris"}
    assert (calls[0].index, calls[0].type) == (0, "function")
    assert {call.index for call in calls} == {0}
    assert sum(bool(call.function.arguments) for call in calls) > 2  # as they are generated
    assert not any(delta.content for delta in deltas)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_openai_stream_helper_assembles_the_tool_call(openai_client: openai.OpenAI) -> None:
    with openai_client.chat.completions.stream(**ARGUMENTS, tools=TOOLS) as stream:
        stream.until_done()
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.name == "get_weather"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("messages", [QUESTION, SMALLTALK])
def test_tool_choice_none_gives_text(
    openai_client: openai.OpenAI, stream: bool, messages: list[Any]
) -> None:
    """The prompt still lists the tools, as in vLLM, but the answer calls none of them."""
    found = direct(messages, ChatOptions(tools=TOOLS), max_tokens=40)
    expected = found.outputs[0]
    answer = openai_client.chat.completions.create(
        **(ARGUMENTS | {"messages": messages}), tools=TOOLS, tool_choice="none", stream=stream,
        max_tokens=40, extra_body={"return_token_ids": True},
    )  # fmt: skip
    parts = list(answer) if stream else [answer]
    choices = [part.choices[0] for part in parts]
    deltas = [choice.delta if stream else choice.message for choice in choices]
    text = "".join(delta.content or "" for delta in deltas)
    assert parts[0].model_extra["prompt_token_ids"] == found.prompt_token_ids
    assert not any(delta.tool_calls for delta in deltas)
    if messages is SMALLTALK:
        assert text == expected.text
        assert choices[-1].finish_reason == expected.finish_reason
    else:
        assert text and "<tool_call>" not in text
        assert expected.text.startswith("<tool_call>")  # what the model does without the constraint


def test_continued_message_is_unconstrained_with_tool_choice_none() -> None:
    """The prompt ends within the content, so the answer must not open the content again."""
    api: Any = SimpleNamespace(
        renderer=SimpleNamespace(answer_format=lambda *_: AnswerFormat(table.HARMONY))
    )
    body = ChatCompletionRequest(model="m", messages=QUESTION, tools=TOOLS, tool_choice="none")
    for continues in (False, True):
        options = ChatOptions(tools=TOOLS, continue_final_message=continues)
        plan = ChatPlan(body, "", "m", "", options=options)
        assert answer_form(api, plan, "").is_constrained != continues


def test_model_reads_the_result_of_a_tool_call(openai_client: openai.OpenAI) -> None:
    call = openai_client.chat.completions.create(**ARGUMENTS, tools=TOOLS).choices[0].message
    messages = [
        *QUESTION,
        call.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": '{"sky": "sunny"}'},
    ]
    answer = openai_client.chat.completions.create(
        **(ARGUMENTS | {"messages": messages}), tools=TOOLS, max_tokens=60
    )
    expected = direct(messages, ChatOptions(tools=TOOLS), max_tokens=60).outputs[0].text
    assert answer.choices[0].message.content == expected
    assert "sunny" in expected


def test_truncated_tool_call_finishes_with_length(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(**ARGUMENTS, tools=TOOLS, max_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content.startswith("<tool_call>")


def test_stream_has_all_token_ids_of_a_withheld_tool_call(openai_client: openai.OpenAI) -> None:
    expected = direct(QUESTION, ChatOptions(tools=TOOLS), max_tokens=60).outputs[0].token_ids
    chunks = list(
        openai_client.chat.completions.create(
            **ARGUMENTS, tools=TOOLS, stream=True, logprobs=True, max_tokens=60,
            extra_body={"return_token_ids": True},
        )
    )  # fmt: skip
    choices = [chunk.choices[0] for chunk in chunks[1:]]
    assert [i for choice in choices for i in choice.model_extra["token_ids"]] == expected
    assert sum(len(choice.logprobs.content) for choice in choices) == len(expected)


TWO_TOOLS: list[dict[str, Any]] = [
    *TOOLS,
    {"type": "function", "function": {"name": "get_time", "strict": True, "parameters": {
        "type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"],
        "additionalProperties": False}}},
]  # fmt: skip
FORCED: dict[str, Any] = ARGUMENTS | {"messages": SMALLTALK, "max_tokens": 90}
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_tool_choice_yields_a_call(
    openai_client: openai.OpenAI, stream: bool, choice: Any
) -> None:
    """The model would not call a tool here. OpenAI's finish_reason for a named tool is stop."""
    free = direct(SMALLTALK, ChatOptions(tools=TWO_TOOLS), max_tokens=40).outputs[0].text
    assert "<tool_call>" not in free
    answer = openai_client.chat.completions.create(
        **FORCED, tools=TWO_TOOLS, tool_choice=choice, stream=stream
    )
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        names = [call.function.name for call in calls if call.function.name]
        arguments, reason = arguments_of(calls), chunks[-1].finish_reason
        assert not any(chunk.delta.content for chunk in chunks)
    else:
        [shown] = answer.choices
        names = [call.function.name for call in shown.message.tool_calls]
        arguments = shown.message.tool_calls[0].function.arguments
        reason = shown.finish_reason
        assert shown.message.content is None
    assert names == ["get_time"] or (choice == "required" and names[0] == "get_weather")
    key = "zone" if names == ["get_time"] else "city"
    assert isinstance(json.loads(arguments)[key], str)
    assert reason == ("tool_calls" if choice == "required" else "stop")


def test_allowed_tools_restrict_the_call(openai_client: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [NAMED]}
    answer = openai_client.chat.completions.create(
        **FORCED, tools=TWO_TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "get_time"
    assert json.loads(call.function.arguments)["zone"] in ("UTC", "CET")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": NAMED, "tools": TOOLS}, "tool_choice", '"get_time", which is not among'),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice", "must be one of auto"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice", "must be one of"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[1]", "another tool is also called"),
        (
            {"tools": [{"type": "retrieval", "function": {"name": "f"}}]},
            "tools[0]",
            "of type 'retrieval'",
        ),
    ],
)
def test_invalid_tools_and_tool_choices_are_refused(
    openai_client: openai.OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        openai_client.chat.completions.create(model="demo", messages=QUESTION, **fields)
    assert caught.value.param == param


def test_tool_with_an_invalid_schema_is_refused(openai_client: openai.OpenAI) -> None:
    bad = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"type": "objekt"}}}},
    }
    with pytest.raises(openai.BadRequestError, match="objekt") as caught:
        openai_client.chat.completions.create(**FORCED, tools=[bad], tool_choice="required")
    assert caught.value.param == "tools"


def test_response_format_with_tools_gives_json_or_a_call(openai_client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}},
              "required": ["mood"], "additionalProperties": False}  # fmt: skip
    answer = openai_client.chat.completions.create(
        **FORCED, tools=TWO_TOOLS,
        response_format={"type": "json_schema", "json_schema": {"name": "m", "schema": schema}},
    )  # fmt: skip
    [choice] = answer.choices
    if choice.message.tool_calls:
        assert choice.finish_reason == "tool_calls"
    else:
        assert json.loads(choice.message.content)["mood"] in ("good", "bad")


def test_truncated_tool_call_is_accepted_in_messages(openai_client: openai.OpenAI) -> None:
    """The client dumps the message with all its null fields."""
    given = FORCED | {"max_tokens": 16, "tools": TOOLS, "tool_choice": "required"}
    [choice] = openai_client.chat.completions.create(**given).choices
    [call] = choice.message.tool_calls or []
    assert choice.finish_reason == "length"
    with pytest.raises(ValueError, match="Expecting|Unterminated"):
        json.loads(call.function.arguments)  # type: ignore[union-attr]
    dumped = choice.message.model_dump()
    assert dumped["content"] is None and "function_call" in dumped
    messages: Any = [*QUESTION, dumped, *QUESTION]
    answer = openai_client.chat.completions.create(
        **(ARGUMENTS | {"messages": messages}), tools=TOOLS, max_tokens=16
    )
    assert answer.choices[0].message.content


def test_developer_role_is_rendered_as_system(openai_client: openai.OpenAI) -> None:
    developer: Any = {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]}
    given = ARGUMENTS | {"messages": [developer, *SMALLTALK]}
    answer = openai_client.chat.completions.create(**given, max_tokens=16)
    expected = direct([{"role": "system", "content": "Be kind."}, *SMALLTALK], max_tokens=16)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
