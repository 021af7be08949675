"""Calls of tools in answers, whole and streamed, with the demo model, which was trained on them."""

import json
from typing import Any

import openai
import pytest

from quire.render.chat_template import ChatOptions
from tests.serve.api.direct import direct

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
ARGUMENTS: dict[str, Any] = {"model": "demo", "messages": QUESTION, "temperature": 0}


def test_a_call_is_taken_out_of_the_answer(openai_client: openai.OpenAI) -> None:
    raw = direct(QUESTION, ChatOptions(tools=TOOLS), max_tokens=60).outputs[0].text
    assert raw.startswith("<tool_call>")
    choice = openai_client.chat.completions.create(**ARGUMENTS, tools=TOOLS).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert call.id.startswith("call_")


def test_a_call_in_a_stream(openai_client: openai.OpenAI) -> None:
    chunks = list(openai_client.chat.completions.create(**ARGUMENTS, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.function.name for call in calls] == ["get_weather"]
    assert json.loads(calls[0].function.arguments) == {"city": "Paris"}
    assert (calls[0].index, calls[0].type) == (0, "function")
    assert not any(delta.content for delta in deltas)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_openai_stream_helper_puts_the_call_together(openai_client: openai.OpenAI) -> None:
    with openai_client.chat.completions.stream(**ARGUMENTS, tools=TOOLS) as stream:
        stream.until_done()
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.name == "get_weather"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_choice_none_gives_text(openai_client: openai.OpenAI, stream: bool) -> None:
    """The tools are not shown to the model, so the answer is that to the question alone."""
    answer = openai_client.chat.completions.create(
        **ARGUMENTS, tools=TOOLS, tool_choice="none", stream=stream, max_tokens=40
    )
    expected = direct(QUESTION, max_tokens=40).outputs[0]
    if stream:
        chunks = list(answer)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected.text
        assert chunks[-1].choices[0].finish_reason == expected.finish_reason
    else:
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].message.tool_calls is None


def test_the_result_of_a_call_goes_back(openai_client: openai.OpenAI) -> None:
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


def test_an_answer_cut_short_says_so(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(**ARGUMENTS, tools=TOOLS, max_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content.startswith("<tool_call>")


def test_token_ids_are_all_there_while_text_is_held_back(openai_client: openai.OpenAI) -> None:
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
