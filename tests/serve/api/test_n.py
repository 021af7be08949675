"""n and best_of over HTTP with the official client, compared with the engine."""

import json
import re
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from quire.render.templates.chat_template import ChatOptions
from quire.serve.context import ApiContext
from tests.serve.api.test_chat_tools import QUESTION, TOOLS, arguments_of
from tests.support.serve.direct_engine import direct

PROMPTS = ["Once upon a time", "The cat", "Why"]
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
WARM: dict[str, Any] = {"temperature": 0.3, "top_p": 1.0, "seed": 11, "max_tokens": 60}
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_p": 1.0, "seed": 11, "max_tokens": 24}


def texts(prompt: object) -> list[str]:
    """Return the texts of the engine without a server."""
    found = [completion.text for completion in direct(prompt, n=3, **SAMPLED).outputs]
    assert len(set(found)) > 1, "the comparison needs different texts"
    return found


def by_index(chunks: list[Any]) -> dict[int, list[Any]]:
    """Group the choices of a stream's chunks by index."""
    found: dict[int, list[Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        found.setdefault(choice.index, []).append(choice)
    return found


def test_choices_are_numbered_prompt_by_prompt(openai_client: openai.OpenAI) -> None:
    """The usage counts each prompt once, and the tokens of all choices."""
    wanted = [text for prompt in PROMPTS for text in texts(prompt)]
    alone = [direct(prompt, n=3, **SAMPLED) for prompt in PROMPTS]
    answer = openai_client.completions.create(model="demo", prompt=PROMPTS, n=3, **SAMPLED)
    assert [choice.index for choice in answer.choices] == list(range(9))
    assert [choice.text for choice in answer.choices] == wanted
    assert answer.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in alone)
    num_tokens = sum(len(c.token_ids) for o in alone for c in o.outputs)
    assert answer.usage.completion_tokens == num_tokens


def test_streamed_choices_of_several_prompts_match_the_whole(openai_client: openai.OpenAI) -> None:
    wanted = [text for prompt in PROMPTS for text in texts(prompt)]
    arguments: dict[str, Any] = {"model": "demo", "prompt": PROMPTS, "n": 3, **SAMPLED}
    whole = openai_client.completions.create(**arguments)
    options = {"include_usage": True}
    with openai_client.completions.create(
        **arguments, stream=True, stream_options=options
    ) as stream:
        chunks = list(stream)
    found = by_index(chunks)
    assert sorted(found) == list(range(9))
    for choice in whole.choices:
        mine = found[choice.index]
        assert "".join(part.text for part in mine) == choice.text == wanted[choice.index]
        ends = [part.finish_reason for part in mine]
        assert ends == [None] * (len(mine) - 1) + [choice.finish_reason]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_chat_returns_n_choices(openai_client: openai.OpenAI) -> None:
    wanted = texts(MESSAGES)
    arguments: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "n": 3, **SAMPLED}
    answer = openai_client.chat.completions.create(**arguments)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == wanted
    alone = direct(MESSAGES, n=3, **SAMPLED)
    assert answer.usage.prompt_tokens == len(alone.prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in alone.outputs)


def test_streamed_chat_choices_match_the_whole(openai_client: openai.OpenAI) -> None:
    """Each choice has a chunk with the role, chunks of text, and a chunk with the finish reason."""
    wanted = texts(MESSAGES)
    arguments: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "n": 3, **SAMPLED}
    whole = openai_client.chat.completions.create(**arguments, logprobs=True, top_logprobs=1)
    with openai_client.chat.completions.create(
        **arguments, stream=True, logprobs=True, top_logprobs=1
    ) as stream:
        found = by_index(list(stream))
    assert sorted(found) == [0, 1, 2]
    for choice in whole.choices:
        first, *rest = found[choice.index]
        assert (first.delta.role, first.delta.content) == ("assistant", "")
        assert all(part.delta.role is None for part in rest)
        assert "".join(part.delta.content or "" for part in rest) == wanted[choice.index]
        ends = [part.finish_reason for part in rest]
        assert ends == [None] * (len(rest) - 1) + [choice.finish_reason]
        logprobs = [entry for part in rest for entry in part.logprobs.content]
        assert logprobs == choice.logprobs.content


def test_prompt_tokens_are_in_one_chunk_only(openai_client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "n": 2, **SAMPLED}
    extra = {"return_token_ids": True, "prompt_logprobs": 1}
    whole = openai_client.chat.completions.create(**arguments, extra_body=extra)
    assert whole.model_extra is not None and whole.model_extra["prompt_token_ids"]
    with openai_client.chat.completions.create(
        **arguments, stream=True, extra_body=extra
    ) as stream:
        with_prompt = [chunk for chunk in stream if "prompt_token_ids" in (chunk.model_extra or {})]
    [chunk] = with_prompt
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert chunk.model_extra[name] == whole.model_extra[name]


def test_every_choice_has_echo_and_logprobs(openai_client: openai.OpenAI) -> None:
    wanted = texts(PROMPTS[0])
    arguments: dict[str, Any] = {"model": "demo", "prompt": PROMPTS[0], "n": 3, **SAMPLED}
    answer = openai_client.completions.create(**arguments, echo=True, logprobs=1)
    with openai_client.completions.create(
        **arguments, echo=True, logprobs=1, stream=True
    ) as stream:
        found = by_index(list(stream))
    for choice, text in zip(answer.choices, wanted, strict=True):
        assert choice.text == PROMPTS[0] + text
        parts = found[choice.index]
        assert "".join(part.text for part in parts) == choice.text
        offsets = [offset for part in parts for offset in part.logprobs.text_offset]
        assert offsets == choice.logprobs.text_offset
        logprobs = [value for part in parts for value in part.logprobs.token_logprobs]
        assert logprobs == choice.logprobs.token_logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_has_its_own_tool_calls(openai_client: openai.OpenAI, stream: bool) -> None:
    """Calls are numbered from zero in each choice."""
    raw = [c.text for c in direct(QUESTION, ChatOptions(tools=TOOLS), n=3, **WARM).outputs]
    assert all(text.startswith("<tool_call>") for text in raw)
    answer = openai_client.chat.completions.create(
        model="demo", messages=QUESTION, tools=TOOLS, n=3, stream=stream, **WARM
    )
    calls: dict[int, list[Any]] = {}
    if stream:
        for index, parts in by_index(list(answer)).items():
            pieces = [call for part in parts for call in part.delta.tool_calls or ()]
            assert parts[-1].finish_reason == "tool_calls"
            assert {call.index for call in pieces} == {0}
            pieces[0].function.arguments = arguments_of(pieces)
            calls[index] = pieces[:1]
    else:
        calls = {choice.index: choice.message.tool_calls for choice in answer.choices}
        assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    assert sorted(calls) == [0, 1, 2]
    for [call] in calls.values():
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert len({call.id for [call] in calls.values()}) == 3


def test_best_of_returns_the_best_and_counts_all(openai_client: openai.OpenAI) -> None:
    alone = direct(PROMPTS[0], n=2, best_of=5, **SAMPLED)
    every = direct(PROMPTS[0], n=5, **SAMPLED)
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPTS[0], n=2, best_of=5, **SAMPLED
    )
    assert [c.index for c in answer.choices] == [0, 1]
    assert [c.text for c in answer.choices] == [c.text for c in alone.outputs]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in every.outputs)


def test_max_tokens_zero_echoes_the_prompt_n_times(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPTS[1], n=2, best_of=3, echo=True, **(SAMPLED | {"max_tokens": 0})
    )
    assert [choice.text for choice in answer.choices] == [PROMPTS[1]] * 2
    assert answer.usage.completion_tokens == 0


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 129}, "n", "n must be at most 128, got 129"),
    ({"n": 0}, "n", "n must be at least 1, got 0"),
    ({"n": "many"}, "n", 'n must be an integer, got "many"'),
    ({"n": 9}, "n", "n=9 is more than max_num_seqs=8; request fewer or raise max_num_seqs"),
    ({"n": 2, "temperature": 0}, "n", "n=2 needs sampling.*Raise temperature, or set n to 1"),
]
REFUSED_TEXT: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 3, "best_of": 2}, "best_of", "best_of must be None or an integer from n=3"),
    ({"best_of": 2, "temperature": 0}, "best_of", "best_of=2 needs sampling"),
    ({"best_of": 2, "stream": True}, "best_of", "best_of=2 needs an answer in one piece"),
    ({"n": 2, "best_of": 9}, "best_of", "best_of=9 is more than max_num_seqs=8"),
]


@pytest.mark.parametrize(
    ("url", "fields", "param", "message"),
    [("/v1/completions", *case) for case in REFUSED + REFUSED_TEXT]
    + [("/v1/chat/completions", *case) for case in REFUSED],
)
def test_bad_n_and_best_of_are_refused(
    api: TestClient, api_context: ApiContext, url: str, fields: Any, param: str, message: str
) -> None:
    body = {"prompt": "Hi"} if url == "/v1/completions" else {"messages": MESSAGES}
    answer = api.post(url, json={"temperature": 1, **body, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert re.match(message, error["message"]), error
    assert api_context.client.num_generated == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [1, None])
def test_n_of_one_or_null_gives_one_choice(api: TestClient, value: int | None) -> None:
    """Also with temperature 0, where a larger n is refused."""
    body = {"prompt": "Hi", "n": value, "best_of": value, "temperature": 0, "max_tokens": 3}
    assert len(api.post("/v1/completions", json=body).json()["choices"]) == 1
