"""Anthropic's own client: texts, schemas, tools, reasoning, streams; counts and errors."""

import asyncio
import json
from typing import Any

import anthropic
import pytest

from tests.clients import given
from tests.clients.given import FORMS, KEY, MESSAGES, SEED, Coat, Fox, Served

TOOLS: list[Any] = [
    {"name": name, "description": kind.__doc__, "input_schema": kind.model_json_schema()}
    for name, kind in given.ARGUMENTS.items()
]


def fields(server: Served, **more: Any) -> dict[str, Any]:
    extra = {"seed": SEED} | more.pop("extra_body", {})
    return {
        "model": server.model,
        "messages": MESSAGES,
        "max_tokens": 400,
        "extra_body": extra,
    } | more


def where(server: Served) -> dict[str, Any]:
    return {
        "base_url": server.url.removesuffix("/v1"), "api_key": KEY, "max_retries": 0,
        "timeout": 60,
    }  # fmt: skip


class Client:
    """The client with the fields that all cases send."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.anthropic = anthropic.Anthropic(**where(server))

    def create(self, **more: Any) -> Any:
        return self.anthropic.messages.create(**fields(self.server, **more))

    def stream(self, **more: Any) -> Any:
        return self.anthropic.messages.stream(**fields(self.server, **more))

    def final(self, **more: Any) -> Any:
        """Return the message that the client assembles from a stream."""
        with self.stream(**more) as stream:
            return stream.get_final_message()


@pytest.fixture
def client(server: Served) -> Client:
    return Client(server)


def contents(message: Any) -> list[dict[str, Any]]:
    """Return a message's blocks without their ids."""
    return [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]


def test_text(client: Client) -> None:
    message = client.create(max_tokens=8)
    assert message.role == "assistant" and message.type == "message"
    assert message.content[0].type == "text" and message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens") and message.usage.output_tokens <= 8
    assert message._request_id


def test_stream(client: Client) -> None:
    """All events have the client's own types."""
    kinds, text = [], ""
    for event in client.create(max_tokens=8, stream=True):
        kinds.append(event.type)
        assert type(event).__name__.startswith("Raw")
        if event.type == "content_block_delta":
            text += event.delta.text
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert text == client.create(max_tokens=8).content[0].text


def test_stream_helper(client: Client) -> None:
    with client.stream(max_tokens=8) as stream:
        text = "".join(stream.text_stream)
    whole, final = client.create(max_tokens=8), client.final(max_tokens=8)
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (
        whole.stop_reason, whole.usage.output_tokens,
    )  # fmt: skip


def test_async(server: Served, run: Any) -> None:
    async def together() -> list[Any]:
        async with anthropic.AsyncAnthropic(**where(server)) as client:
            request = [fields(server, max_tokens=4, system=f"You are {name}.") for name in "abc"]
            return await asyncio.gather(*(client.messages.create(**each) for each in request))

    assert len(run(together())) == 3


def test_system_and_cache(client: Client) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "You are a fox in a story. " * 8, **mark}]
    client.create(max_tokens=1, system=system)
    usage = client.create(max_tokens=1, system=system).usage
    assert usage.cache_read_input_tokens > usage.cache_creation_input_tokens > 0
    assert usage.input_tokens == 0  # with a mark, computed tokens count as written to the cache


@pytest.mark.parametrize("tools", [False, True])
def test_count_tokens(client: Client, tools: bool) -> None:
    request: dict[str, Any] = {"messages": MESSAGES, "system": f"You are a fox. {tools}"}
    request |= {"tools": TOOLS} if tools else {}
    counted = client.anthropic.messages.count_tokens(model=client.server.model, **request)
    usage = client.create(max_tokens=1, **request).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_stop_sequence(client: Client) -> None:
    text = client.create(max_tokens=12).content[0].text
    stop = text.split()[-1]
    message = client.create(max_tokens=12, stop_sequences=["no such text", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_prefill(client: Client) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "The fox is"}]
    assert client.create(messages=begun, max_tokens=6).usage.output_tokens


def schema_of(kind: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "schema": kind.model_json_schema()}}


@pytest.mark.parametrize("name", FORMS)
def test_schema(client: Client, name: str) -> None:
    message = client.create(output_config=schema_of(FORMS[name]), max_tokens=600)
    assert FORMS[name].model_validate_json(message.content[0].text)


def test_schema_stream(client: Client) -> None:
    assert Fox.model_validate_json(client.final(output_config=schema_of(Fox)).content[0].text)


def test_parse(client: Client) -> None:
    message = client.anthropic.messages.parse(**fields(client.server, output_format=Coat))
    assert isinstance(message.parsed_output, Coat)


def check_calls(message: Any) -> None:
    assert message.stop_reason == "tool_use" and message.content
    for block in message.content:
        assert block.type == "tool_use" and block.id
        given.check_call(block.name, json.dumps(block.input))


CHOICES = [
    {"type": "any"}, {"type": "tool", "name": "add"}, {"type": "tool", "name": "get_weather"},
    {"type": "any", "disable_parallel_tool_use": True},
]  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES, ids=["any", "add", "get_weather", "single"])
@pytest.mark.parametrize("way", ["create", "final"])
def test_tools(client: Client, way: str, choice: dict[str, Any]) -> None:
    message = getattr(client, way)(tools=TOOLS, tool_choice=choice)
    check_calls(message)
    if choice["type"] == "tool":
        assert [block.name for block in message.content] == [choice["name"]]
    if choice.get("disable_parallel_tool_use"):
        assert len(message.content) == 1


def test_tools_auto(client: Client) -> None:
    message = client.create(tools=TOOLS, max_tokens=30)
    assert message.stop_reason in ("end_turn", "max_tokens", "tool_use")


def test_tools_none(client: Client) -> None:
    message = client.create(tools=TOOLS, tool_choice={"type": "none"}, max_tokens=20)
    assert all(block.type == "text" for block in message.content)


def test_tools_answered(client: Client) -> None:
    message = client.create(tools=TOOLS, tool_choice={"type": "tool", "name": "add"})
    [call] = message.content
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "42"},
        {"type": "text", "text": "And now?"},
    ]
    messages = [*MESSAGES, message.to_param(), {"role": "user", "content": results}]
    assert client.create(messages=messages, tools=TOOLS, max_tokens=8).usage.output_tokens


THINKING: dict[str, Any] = {"type": "enabled", "budget_tokens": 12}


@pytest.mark.parametrize("way", ["create", "final"])
def test_thinking(thinker: Served, way: str) -> None:
    client = Client(thinker)
    message = getattr(client, way)(thinking=THINKING, output_config=schema_of(Fox))
    thought, answer = message.content
    assert thought.type == "thinking" and thought.thinking and thought.signature
    assert Fox.model_validate_json(answer.text)
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    again = [*MESSAGES, message.to_param(), *MESSAGES]
    assert client.create(messages=again, thinking={"type": "disabled"}, max_tokens=4).content


def test_streamed_message_equals_the_whole_one(client: Client) -> None:
    request: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "any"}}
    assert contents(client.final(**request)) == contents(client.create(**request))


def test_errors(client: Client) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.create(model="no-such-model")
    assert missing.value.body["error"]["type"] == "not_found_error"
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image") as refused:
        client.create(messages=[{"role": "user", "content": [image]}])
    assert refused.value.request_id and refused.value.body["type"] == "error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.create(messages=[{"role": "user", "content": "fox " * 20_000}])


def test_batches_are_refused_with_advice(client: Client) -> None:
    batches = client.anthropic.messages.batches
    for call in (batches.list, lambda: batches.create(requests=[])):
        with pytest.raises(anthropic.InternalServerError, match="use /v1/files and /v1/batches"):
            call()


def test_images(seeing: Served) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": given.IMAGE}
    image = {"type": "image", "source": source}
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}

    def messages(*parts: Any) -> list[Any]:
        first = [*parts, {"type": "text", "text": "Look."}]
        last = [{"type": "tool_result", "tool_use_id": "t", "content": "None."}]
        return [
            {"role": "user", "content": first}, {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result] if parts else last},
        ]  # fmt: skip

    client = Client(seeing)
    answer = client.create(messages=messages(image), max_tokens=4)
    text = client.create(messages=messages(), max_tokens=4)
    assert answer.usage.input_tokens > text.usage.input_tokens + given.IMAGE_TOKENS
    counted = client.anthropic.messages.count_tokens(model=seeing.model, messages=messages(image))
    used = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert counted.input_tokens == used
    with pytest.raises(anthropic.BadRequestError, match="source.data: the image"):
        broken = image | {"source": source | {"data": "bm90aGluZw=="}}
        client.create(messages=messages(broken), max_tokens=4)
