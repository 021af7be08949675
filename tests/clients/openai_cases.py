"""OpenAI's own client: texts, schemas, tools, streams, and vLLM's fields in extra_body."""

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients import given
from tests.clients.given import ASK, FORMS, KEY, MESSAGES, SEED, TOOLS, Fox, Served, named

FOX = {"type": "json_schema", "json_schema": {"name": "fox", "schema": Fox.model_json_schema()}}
STRICT_TOOLS = [
    openai.pydantic_function_tool(kind, name=name) for name, kind in given.ARGUMENTS.items()
]


class Client:
    """OpenAI's client with the fields that all cases send."""

    def __init__(self, server: Served) -> None:
        self.openai = openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=60)
        self.given: dict[str, Any] = {"model": server.model, "seed": SEED}

    def chat(self, **fields: Any) -> Any:
        fields = {"messages": MESSAGES, "max_tokens": 400} | self.given | fields
        return self.openai.chat.completions.create(**fields)

    def parse(self, **fields: Any) -> Any:
        fields = {"messages": MESSAGES, "max_tokens": 600} | self.given | fields
        return self.openai.chat.completions.parse(**fields)

    def complete(self, **fields: Any) -> Any:
        fields = {"prompt": "A fox", "max_tokens": 100} | self.given | fields
        return self.openai.completions.create(**fields)


@pytest.fixture
def client(server: Served) -> Client:
    return Client(server)


def joined(stream: Any) -> tuple[str, str, Any]:
    """Return the text of a stream, its finish reason, and its usage."""
    text, reason, usage = "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason, usage


def joined_calls(stream: Any) -> tuple[list[tuple[str, str]], int, str]:
    """Return (name, arguments) of the calls in a stream, the number of deltas with arguments, and
    the finish reason."""
    calls: dict[int, list[str]] = {}
    ids, num_deltas, reason = set(), 0, ""
    for chunk in stream:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            assert not choice.delta.content
            for delta in choice.delta.tool_calls or ():
                if delta.index not in calls:
                    assert delta.id and delta.type == "function" and delta.function.name
                    ids.add(delta.id)
                    calls[delta.index] = [delta.function.name, ""]
                calls[delta.index][1] += delta.function.arguments or ""
                num_deltas += bool(delta.function.arguments)
    assert sorted(calls) == list(range(len(calls))) and len(ids) == len(calls)
    return [(name, arguments) for name, arguments in calls.values()], num_deltas, reason


def is_valid(content: str, kind: type[BaseModel] = Fox) -> bool:
    return bool(kind.model_validate_json(content))


# --- texts


def test_models(client: Client) -> None:
    assert [model.id for model in client.openai.models.list()] == [client.given["model"]]


def test_chat(client: Client) -> None:
    answer = client.chat(max_tokens=8, temperature=0)
    [choice] = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream(client: Client) -> None:
    options = {"stream_options": {"include_usage": True}, "max_tokens": 8}
    text, reason, usage = joined(client.chat(stream=True, **options))
    whole = client.chat(max_tokens=8)
    assert (text, reason) == (whole.choices[0].message.content, whole.choices[0].finish_reason)
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_chat_async(server: Served, run: Any) -> None:
    async def send_requests() -> Any:
        async with openai.AsyncOpenAI(base_url=server.url, api_key=KEY, timeout=60) as client:
            more = {"model": server.model, "messages": MESSAGES, "max_tokens": 8}
            chat = client.chat.completions
            return await asyncio.gather(*(chat.create(seed=seed, **more) for seed in range(4)))

    assert len(run(send_requests())) == 4


def test_completions(client: Client) -> None:
    answer = client.complete(n=2, logprobs=1, max_tokens=5, extra_body={"ignore_eos": True})
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(len(choice.logprobs.tokens) == 5 for choice in answer.choices)


def test_completions_stream(client: Client) -> None:
    text = "".join(chunk.choices[0].text for chunk in client.complete(stream=True, max_tokens=8))
    assert text == client.complete(max_tokens=8).choices[0].text


def test_logprobs(client: Client) -> None:
    [choice] = client.chat(logprobs=True, top_logprobs=2, max_tokens=3).choices
    assert all(len(item.top_logprobs) >= 2 for item in choice.logprobs.content)


def test_bad_request(client: Client) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat(temperature=-1)
    assert error.value.param == "temperature"


# --- schemas


def test_text_format(client: Client) -> None:
    assert client.chat(response_format={"type": "text"}, max_tokens=5).choices[0].message.content


def test_json_object(client: Client, server: Served) -> None:
    format_fields = {"response_format": {"type": "json_object"}, "logit_bias": given.brief(server)}
    [choice] = client.chat(**format_fields).choices
    assert choice.finish_reason == "stop"
    assert isinstance(json.loads(choice.message.content), dict)


def test_json_schema(client: Client) -> None:
    [choice] = client.chat(response_format=FOX).choices
    assert choice.finish_reason == "stop" and is_valid(choice.message.content)


def test_json_schema_stream(client: Client) -> None:
    text, reason, _ = joined(client.chat(response_format=FOX, stream=True))
    assert reason == "stop" and is_valid(text)
    assert text == client.chat(response_format=FOX).choices[0].message.content


def test_json_schema_n(client: Client) -> None:
    choices = client.chat(response_format=FOX, n=3, temperature=1.5).choices
    assert len(choices) == 3 and all(is_valid(each.message.content) for each in choices)


def test_json_schema_logprobs(client: Client) -> None:
    [choice] = client.chat(response_format=FOX, logprobs=True, top_logprobs=3).choices
    assert is_valid(choice.message.content)
    assert choice.message.content.startswith(choice.logprobs.content[0].token)


def test_json_schema_truncated(client: Client) -> None:
    [choice] = client.chat(response_format=FOX, max_tokens=2).choices
    assert choice.finish_reason == "length"


def test_strict_unsupported(client: Client) -> None:
    """With strict, a keyword that no grammar supports is refused by its name."""
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    strict = {"name": "odd", "schema": schema, "strict": True}
    with pytest.raises(openai.BadRequestError) as error:
        client.chat(response_format={"type": "json_schema", "json_schema": strict})
    assert '"not"' in error.value.message or "'not'" in error.value.message


def test_json_schema_without_schema(client: Client) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat(response_format={"type": "json_schema"})
    assert error.value.param.startswith("response_format")


@pytest.mark.parametrize("form", FORMS)
def test_parse(client: Client, form: str) -> None:
    answer = client.parse(response_format=FORMS[form])
    assert isinstance(answer.choices[0].message.parsed, FORMS[form])


def test_parse_async(server: Served, run: Any) -> None:
    async def send_requests() -> Any:
        async with openai.AsyncOpenAI(base_url=server.url, api_key=KEY, timeout=60) as client:
            more = {"model": server.model, "messages": MESSAGES, "seed": SEED, "max_tokens": 400}
            return await client.chat.completions.parse(response_format=Fox, **more)

    assert isinstance(run(send_requests()).choices[0].message.parsed, Fox)


def test_parse_truncated(client: Client) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.parse(response_format=Fox, max_tokens=2)


def test_stream_helper(client: Client) -> None:
    more = client.given | {"messages": MESSAGES, "max_tokens": 400}
    with client.openai.chat.completions.stream(response_format=Fox, **more) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Fox)


# --- tools


def test_tools_auto(client: Client) -> None:
    """The model may call or answer; its calls are valid."""
    [choice] = client.chat(tools=TOOLS, max_tokens=40).choices
    calls = choice.message.tool_calls or []
    assert choice.message.content is not None or calls
    if choice.finish_reason != "length":
        assert choice.finish_reason == ("tool_calls" if calls else "stop")


def test_tools_none(client: Client) -> None:
    [choice] = client.chat(tools=TOOLS, tool_choice="none", max_tokens=20).choices
    assert not choice.message.tool_calls and choice.message.content


def test_tools_required(client: Client) -> None:
    [choice] = client.chat(tools=TOOLS, tool_choice="required").choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    assert not choice.message.content
    for call in choice.message.tool_calls:
        assert call.id and call.type == "function"
        given.check_call(call.function.name, call.function.arguments)


def test_tools_required_stream(client: Client) -> None:
    calls, num_deltas, reason = joined_calls(
        client.chat(tools=TOOLS, tool_choice="required", stream=True)
    )
    assert calls and reason == "tool_calls"
    for name, arguments in calls:
        given.check_call(name, arguments)
    assert num_deltas > len(calls)  # arguments are streamed
    whole = client.chat(tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
    assert calls == [(call.function.name, call.function.arguments) for call in whole]


@pytest.mark.parametrize("name", given.ARGUMENTS)
def test_tools_named(client: Client, name: str) -> None:
    [choice] = client.chat(tools=TOOLS, tool_choice=named(name)).choices
    [call] = choice.message.tool_calls
    assert call.function.name == name and choice.finish_reason == "stop"
    given.check_call(name, call.function.arguments)


def test_tools_named_stream(client: Client) -> None:
    stream = client.chat(tools=TOOLS, tool_choice=named("add"), stream=True)
    [(name, arguments)], _, reason = joined_calls(stream)
    assert (name, reason) == ("add", "stop")
    given.check_call(name, arguments)


def test_tools_named_unknown(client: Client) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat(tools=TOOLS, tool_choice=named("fly"))
    assert error.value.param.startswith("tool_choice")


def test_tools_required_without_tools(client: Client) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat(tool_choice="required")
    assert error.value.param.startswith("tool")


def test_tools_one_at_a_time(client: Client) -> None:
    for seed in range(4):
        more = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        [choice] = client.chat(tools=TOOLS, **more).choices
        assert len(choice.message.tool_calls) == 1


def test_tools_allowed(client: Client) -> None:
    """OpenAI's `allowed_tools` limits the tools that may be called."""
    allowed = {"mode": "required", "tools": [named("add")]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    for call in client.chat(tools=TOOLS, tool_choice=choice).choices[0].message.tool_calls:
        assert call.function.name == "add"
        given.check_call("add", call.function.arguments)


def test_tools_strict_parsed(client: Client) -> None:
    """parse() reads the arguments of strict tools."""
    answer = client.parse(tools=STRICT_TOOLS, tool_choice="required")
    for call in answer.choices[0].message.tool_calls:
        kind = given.ARGUMENTS[call.function.name]
        assert isinstance(call.function.parsed_arguments, kind)


def test_tools_strict_auto(client: Client) -> None:
    [choice] = client.chat(tools=STRICT_TOOLS, max_tokens=40).choices
    if choice.finish_reason == "tool_calls":
        for call in choice.message.tool_calls:
            given.check_call(call.function.name, call.function.arguments)


def test_tools_stream_helper(client: Client) -> None:
    more = client.given | {"messages": MESSAGES, "max_tokens": 400, "tool_choice": "required"}
    with client.openai.chat.completions.stream(tools=STRICT_TOOLS, **more) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert done and all(isinstance(each.parsed_arguments, BaseModel) for each in done)


def test_tools_answered(client: Client) -> None:
    """The result of a call is sent back, and the model answers with a text."""
    first = client.chat(tools=TOOLS, tool_choice=named("add")).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "42"}
    messages = [*MESSAGES, first.model_dump(exclude_none=True), result]
    answer = client.chat(messages=messages, tools=TOOLS, tool_choice="none", max_tokens=10)
    assert answer.choices[0].message.content


def test_tools_or_schema(client: Client) -> None:
    """With a response format, the answer is either calls or that format."""
    [choice] = client.chat(tools=TOOLS, response_format=FOX).choices
    if choice.message.tool_calls:
        for call in choice.message.tool_calls:
            given.check_call(call.function.name, call.function.arguments)
    else:
        assert is_valid(choice.message.content)


# --- vLLM's fields

LARK = 'start: "fox" " " /[0-9]{2}/'
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<fox>", "schema": Fox.model_json_schema(), "end": "</fox>"}],
    "triggers": ["<fox>"],
}
EXTRA: dict[str, tuple[dict[str, Any], str]] = {
    "structured_json": ({"structured_outputs": {"json": Fox.model_json_schema()}}, r"(?s)\{.*\}"),
    "structured_regex": ({"structured_outputs": {"regex": "[a-f]{3}-9"}}, "[a-f]{3}-9"),
    "structured_choice": ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
    "structured_grammar": ({"structured_outputs": {"grammar": LARK}}, "fox [0-9]{2}"),
    "guided_json": ({"guided_json": Fox.model_json_schema()}, r"(?s)\{.*\}"),
    "guided_regex": ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, "yes|no"),
    "guided_grammar": ({"guided_grammar": LARK}, "fox [0-9]{2}"),
}  # fmt: skip


@pytest.mark.parametrize("field", EXTRA)
def test_extra(client: Client, field: str) -> None:
    extra, pattern = EXTRA[field]
    [choice] = client.chat(extra_body=extra).choices
    assert re.fullmatch(pattern, choice.message.content) and choice.finish_reason == "stop"


@pytest.mark.parametrize("field", ["structured_regex", "structured_choice", "guided_regex"])
def test_extra_completions(client: Client, field: str) -> None:
    extra, pattern = EXTRA[field]
    [choice] = client.complete(extra_body=extra).choices
    assert re.fullmatch(pattern, choice.text)


def test_extra_json_object(client: Client, server: Served) -> None:
    extra = {"structured_outputs": {"json_object": True}}
    [choice] = client.chat(extra_body=extra, logit_bias=given.brief(server)).choices
    assert isinstance(json.loads(choice.message.content), dict)


def test_extra_compact(client: Client) -> None:
    extra = {"structured_outputs": {"json": given.Cash.model_json_schema()}}
    extra["structured_outputs"] |= {"disable_any_whitespace": True}
    text = client.chat(extra_body=extra).choices[0].message.content
    assert text == json.dumps(json.loads(text), separators=(",", ":"))


def test_extra_structural_tag(client: Client) -> None:
    [choice] = client.chat(response_format=TAG, max_tokens=60).choices
    for found in re.findall(r"<fox>(.*?)</fox>", choice.message.content, re.DOTALL):
        assert is_valid(found)


def test_extra_two_constraints(client: Client) -> None:
    extra = {"structured_outputs": {"regex": "a", "choice": ["a"]}}
    with pytest.raises(openai.BadRequestError) as error:
        client.chat(extra_body=extra)
    assert error.value.param.startswith("structured_outputs")


def test_extra_template_kwargs(client: Client) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    [choice] = client.chat(extra_body=extra, response_format=FOX).choices
    assert is_valid(choice.message.content)


# --- reasoning

THINK = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 12}


def thought(message: Any) -> str:
    """Return the reasoning of a message, which has two equal fields."""
    assert message.reasoning == message.reasoning_content
    return message.reasoning


def test_reasoning(thinker: Served) -> None:
    answer = Client(thinker).chat(extra_body=THINK, max_tokens=40)
    message = answer.choices[0].message
    assert thought(message) and "think>" not in (message.content or "")
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens <= 14


def test_reasoning_stream(thinker: Served) -> None:
    whole = Client(thinker).chat(extra_body=THINK, max_tokens=40).choices[0].message
    thoughts, text = "", ""
    for chunk in Client(thinker).chat(extra_body=THINK, max_tokens=40, stream=True):
        for choice in chunk.choices:
            if getattr(choice.delta, "reasoning", None):
                thoughts += thought(choice.delta)
            text += choice.delta.content or ""
    assert thoughts == thought(whole) and text == (whole.content or "")


def test_reasoning_off(thinker: Served) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    message = Client(thinker).chat(extra_body=extra, max_tokens=10).choices[0].message
    assert message.content and not getattr(message, "reasoning", None)


def test_reasoning_then_schema(thinker: Served) -> None:
    message = Client(thinker).parse(extra_body=THINK, response_format=Fox).choices[0].message
    assert thought(message) and isinstance(message.parsed, Fox)


def test_reasoning_then_call(thinker: Served) -> None:
    [choice] = Client(thinker).chat(extra_body=THINK, tools=TOOLS, tool_choice="required").choices
    assert thought(choice.message) and choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        given.check_call(call.function.name, call.function.arguments)


def test_reasoning_off_then_call(thinker: Served) -> None:
    """If the prompt has closed the reasoning, a forced call is the first output."""
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    for seed in range(4):
        more = {"tools": TOOLS, "tool_choice": named("add"), "seed": seed}
        message = Client(thinker).chat(extra_body=extra, **more).choices[0].message
        assert len(message.tool_calls) == 1 and not getattr(message, "reasoning", None)


def test_image_in_a_chat(seeing: Served) -> None:
    url = {"url": f"data:image/png;base64,{given.IMAGE}", "detail": "low"}
    parts: list[Any] = [{"type": "image_url", "image_url": url}, {"type": "text", "text": ASK}]
    client = Client(seeing)
    text = client.chat(max_tokens=4)
    answer = client.chat(messages=[{"role": "user", "content": parts}], max_tokens=4)
    # The image's tokens, with one before and one after them.
    num_more = answer.usage.prompt_tokens - text.usage.prompt_tokens
    assert num_more == given.IMAGE_TOKENS + 2
    stream = client.chat(messages=[{"role": "user", "content": parts}], max_tokens=4, stream=True)
    assert joined(stream)[1] == answer.choices[0].finish_reason


def test_image_in_a_response(seeing: Served) -> None:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{given.IMAGE}"}
    content = [image | {"detail": "auto"}, {"type": "input_text", "text": ASK}]
    responses = Client(seeing).openai.responses
    fields: Any = {"model": seeing.model, "max_output_tokens": 4}
    text = responses.create(input=ASK, **fields)
    first = responses.create(input=[{"role": "user", "content": content}], **fields)
    assert first.usage.input_tokens - text.usage.input_tokens == given.IMAGE_TOKENS + 2
    second = responses.create(input="And?", previous_response_id=first.id, **fields)
    assert second.usage.input_tokens > first.usage.input_tokens


def test_invalid_images_are_refused(seeing: Served) -> None:
    for url, words in (("https://example.org/a.png", "allowed: none"), ("data:,x", "data: URL")):
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            Client(seeing).chat(messages=[{"role": "user", "content": parts}])
        assert caught.value.param == "messages[0].content[0].image_url"


# --- adapters


def test_adapter_is_a_model(adapted: Served) -> None:
    client = Client(adapted)
    cards = {card.id: card for card in client.openai.models.list()}
    assert list(cards) == ["adapted", "poems"] and cards["poems"].parent == "adapted"
    assert client.openai.models.retrieve("poems").id == "poems"
    base, poems = (client.chat(model=model, max_tokens=12, temperature=0) for model in cards)
    assert poems.model == "poems"
    assert poems.choices[0].message.content != base.choices[0].message.content
    stream = client.chat(model="poems", max_tokens=12, temperature=0, stream=True)
    assert joined(stream)[0] == poems.choices[0].message.content
    with pytest.raises(openai.NotFoundError):
        client.chat(model="prose")


def test_adapter_scales_interpolate(adapted: Served) -> None:
    client = Client(adapted)
    fields = {"max_tokens": 12, "temperature": 0, "logprobs": 1}

    def answer(**more: Any) -> Any:
        choice = client.complete(**fields, **more).choices[0]
        return choice.text, choice.logprobs.token_logprobs

    scales = (0.0, 1.0, 0.5)
    none, whole, half = (
        answer(extra_body={"lora": [{"id": 0, "scale": scale}]}) for scale in scales
    )
    assert (none, whole) == (answer(), answer(model="poems"))
    assert half not in (none, whole)
    with pytest.raises(openai.BadRequestError) as error:
        client.complete(extra_body={"lora": [{"id": 9, "scale": 1.0}]})
    assert error.value.param == "lora"
