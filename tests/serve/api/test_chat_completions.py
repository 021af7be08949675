"""/v1/chat/completions through HTTP with the official client, compared with the engine alone.

Covers `serve/openai/chat_completions.py`, which all chat endpoints share.
"""

import openai
import pytest

from quire.render.templates.chat_template import ChatOptions
from tests.support.serve.direct_engine import direct

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def contents(chunks: list[openai.types.chat.ChatCompletionChunk]) -> str:
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    return "".join(deltas)


def test_text_and_usage_equal_the_engines(openai_client: openai.OpenAI) -> None:
    expected = direct(MESSAGES, max_tokens=60)
    answer = openai_client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=60
    )
    choice = answer.choices[0]
    assert choice.message.content == expected.outputs[0].text
    assert choice.message.role == "assistant"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")


def test_stream_starts_with_the_role_and_ends_with_usage(openai_client: openai.OpenAI) -> None:
    chunks = list(
        openai_client.chat.completions.create(
            model="demo", messages=MESSAGES, temperature=0, max_tokens=60, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    expected = direct(MESSAGES, max_tokens=60).outputs[0]
    first = chunks[0].choices[0]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert contents(chunks) == expected.text
    assert len(chunks) > 5
    assert [chunk.choices[0].delta.role for chunk in chunks[1:-1]] == [None] * (len(chunks) - 2)
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == (
        [],
        len(expected.token_ids),
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_answer_without_a_limit_fills_the_context(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_max_tokens_limit_the_answer(
    openai_client: openai.OpenAI, field: str
) -> None:
    answer = openai_client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, **{field: 3}
    )
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_equal_the_engines(openai_client: openai.OpenAI, stream: bool) -> None:
    expected = direct(MESSAGES, max_tokens=8, logprobs=3).outputs[0]
    answer = openai_client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=8, logprobs=True,
        top_logprobs=3, stream=stream,
    )  # fmt: skip
    choices = [chunk.choices[0] for chunk in (list(answer) if stream else [answer])]
    content = [item for choice in choices if choice.logprobs for item in choice.logprobs.content]
    assert len(content) == 8
    assert b"".join(bytes(item.bytes) for item in content).decode() == expected.text
    for item, token_id, position in zip(
        content, expected.token_ids, expected.logprobs, strict=True
    ):
        assert item.logprob == position[token_id].logprob
        assert item.token == position[token_id].decoded_token
        tops = [top.logprob for top in item.top_logprobs]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert tops[0] == item.logprob  # greedy


def test_top_logprobs_are_empty_unless_requested(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=2, logprobs=True
    )
    assert [item.top_logprobs for item in answer.choices[0].logprobs.content] == [[], []]


def test_last_message_is_continued_and_echoed_on_request(openai_client: openai.OpenAI) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The capital of"}]
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    expected = direct(messages, options, max_tokens=10).outputs[0].text
    for echo in (False, True):
        body = {"continue_final_message": True, "echo": echo}
        arguments = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 10}
        answer = openai_client.chat.completions.create(**arguments, extra_body=body)
        shown = ("The capital of" if echo else "") + expected
        assert answer.choices[0].message.content == shown
        chunks = openai_client.chat.completions.create(**arguments, extra_body=body, stream=True)
        assert contents(list(chunks)) == shown


def test_text_parts_and_harmless_fields_are_accepted(openai_client: openai.OpenAI) -> None:
    """Fields that clients send by default must not fail."""
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    plain = openai_client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=9
    )
    answer = openai_client.chat.completions.create(
        model="demo", messages=parts, temperature=0, max_tokens=9, user="u", n=1, store=False,
        metadata={"a": "b"}, service_tier="auto", parallel_tool_calls=True, seed=1,
        response_format={"type": "text"}, modalities=["text"], frequency_penalty=0,
        reasoning_effort="low", tool_choice="auto", prediction=None,
        extra_body={"request_id": "mine", "use_beam_search": False, "length_penalty": 1.0},
    )  # fmt: skip
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert "mine" not in answer.id


def test_response_has_token_ids_and_prompt_logprobs(openai_client: openai.OpenAI) -> None:
    expected = direct(MESSAGES, max_tokens=4, prompt_logprobs=1)
    answer = openai_client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=4,
        extra_body={"return_token_ids": True, "prompt_logprobs": 1},
    )  # fmt: skip
    assert answer.model_extra["prompt_token_ids"] == expected.prompt_token_ids
    assert answer.choices[0].model_extra["token_ids"] == expected.outputs[0].token_ids
    assert len(answer.model_extra["prompt_logprobs"]) == len(expected.prompt_token_ids)


def test_unknown_template_variables_leave_the_answer_unchanged(
    openai_client: openai.OpenAI,
) -> None:
    """The demo model's template uses neither of these variables."""
    answer = openai_client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=4,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}, "documents": []},
    )  # fmt: skip
    assert answer.choices[0].message.content == direct(MESSAGES, max_tokens=4).outputs[0].text
