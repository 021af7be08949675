"""litellm: as `openai/MODEL` and as `hosted_vllm/MODEL`; texts, schemas, tools and reasoning."""

import asyncio
import json
from typing import Any

import litellm
import pytest
from pydantic import BaseModel

from tests.clients import given
from tests.clients.given import FORMS, KEY, MESSAGES, SEED, TOOLS, Fox, Served, named

PROVIDERS = ("openai", "hosted_vllm")


def fields(server: Served, provider: str, **more: Any) -> dict[str, Any]:
    where = {"model": f"{provider}/{server.model}", "api_base": server.url, "api_key": KEY}
    settings = {
        "messages": MESSAGES,
        "seed": SEED,
        "max_tokens": 400,
        "timeout": 60,
        "num_retries": 0,
    }
    return where | settings | more


@pytest.fixture(params=PROVIDERS)
def complete(request: pytest.FixtureRequest, server: Served) -> Any:
    """litellm.completion with the fields that all cases send."""
    return lambda **more: litellm.completion(**fields(server, request.param, **more))


def test_completion(complete: Any) -> None:
    answer = complete(max_tokens=8)
    assert answer.choices[0].message.content and answer.usage.completion_tokens <= 8


def test_stream(complete: Any) -> None:
    chunks = list(complete(max_tokens=8, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == complete(max_tokens=8).choices[0].message.content
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.choices[0].message.content == text


def test_text_completion(server: Served) -> None:
    where = {"model": f"text-completion-openai/{server.model}", "api_base": server.url}
    answer = litellm.text_completion(prompt="A fox", max_tokens=5, api_key=KEY, **where)
    assert answer.choices[0].text


def test_acompletion(server: Served, run: Any) -> None:
    async def together() -> Any:
        requests = [fields(server, "openai", max_tokens=4, seed=seed) for seed in range(3)]
        return await asyncio.gather(*(litellm.acompletion(**each) for each in requests))

    assert len(run(together())) == 3


def test_acompletion_stream(server: Served, run: Any) -> None:
    async def read() -> str:
        stream = await litellm.acompletion(**fields(server, "openai", max_tokens=8, stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert run(read())


@pytest.mark.parametrize("form", FORMS)
def test_pydantic(complete: Any, form: str) -> None:
    content = complete(response_format=FORMS[form], max_tokens=600).choices[0].message.content
    assert FORMS[form].model_validate_json(content)


def test_pydantic_stream(complete: Any) -> None:
    chunks = complete(response_format=Fox, stream=True)
    assert Fox.model_validate_json("".join(c.choices[0].delta.content or "" for c in chunks))


def test_pydantic_async(server: Served, run: Any) -> None:
    answer = run(litellm.acompletion(**fields(server, "openai", response_format=Fox)))
    assert Fox.model_validate_json(answer.choices[0].message.content)


def test_json_schema(complete: Any) -> None:
    schema = {"name": "fox", "schema": Fox.model_json_schema(), "strict": True}
    answer = complete(response_format={"type": "json_schema", "json_schema": schema})
    assert Fox.model_validate_json(answer.choices[0].message.content)


def test_json_object(complete: Any, server: Served) -> None:
    answer = complete(response_format={"type": "json_object"}, logit_bias=given.brief(server))
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_extra_body(complete: Any) -> None:
    answer = complete(extra_body={"structured_outputs": {"choice": ["red", "blue"]}})
    assert answer.choices[0].message.content in ("red", "blue")


def test_tools_auto(complete: Any) -> None:
    [choice] = complete(tools=TOOLS, max_tokens=30).choices
    assert choice.message.content is not None or choice.message.tool_calls


@pytest.mark.parametrize("choice", ["required", "get_weather", "add"])
def test_tools(complete: Any, choice: str) -> None:
    forced = choice if choice == "required" else named(choice)
    calls = complete(tools=TOOLS, tool_choice=forced).choices[0].message.tool_calls
    assert calls and (choice == "required" or calls[0].function.name == choice)
    for call in calls:
        given.check_call(call.function.name, call.function.arguments)


def test_tools_stream(complete: Any) -> None:
    chunks = list(complete(tools=TOOLS, tool_choice="required", stream=True))
    message = litellm.stream_chunk_builder(chunks, messages=MESSAGES).choices[0].message
    assert message.tool_calls
    for call in message.tool_calls:
        given.check_call(call.function.name, call.function.arguments)


def test_tools_answered(complete: Any) -> None:
    message = complete(tools=TOOLS, tool_choice=named("add")).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    messages = [*MESSAGES, message.model_dump(), result]
    answer = complete(messages=messages, tools=TOOLS, tool_choice="none", max_tokens=8)
    assert answer.choices[0].message.content


@pytest.mark.parametrize("provider", PROVIDERS)
def test_reasoning(thinker: Served, provider: str) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 12}
    requests = fields(thinker, provider, extra_body=extra, response_format=Fox)
    answer = litellm.completion(**requests)
    message = answer.choices[0].message
    assert message.reasoning_content and Fox.model_validate_json(message.content)
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


def test_reasoning_stream(thinker: Served) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 12}
    requests = fields(thinker, "hosted_vllm", extra_body=extra, response_format=Fox, stream=True)
    chunks = list(litellm.completion(**requests))
    thoughts = [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert any(thoughts) and isinstance(Fox.model_validate_json("".join(texts)), BaseModel)
