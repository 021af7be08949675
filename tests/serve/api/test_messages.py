"""/v1/messages and /v1/messages/count_tokens over HTTP, compared with the engine and with chat
completions. `make test-clients` checks them with Anthropic's own client."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from quire.base.requests.hooks import EndRequest, HookCall, HookPiece, HookRequest
from quire.base.settings.config import ServerConfig
from quire.render.templates.chat_template import ChatOptions
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.serve.hooks.hooks import Hooks
from tests.serve.api.conftest import MakeContext
from tests.support.serve.direct_engine import direct
from tests.support.serve.fake_client import FakeClient

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: list[Any] = [{"role": "user", "content": "Hello, how are you?"}]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOLS: list[Any] = [
    {"name": "get_weather", "description": "Weather of a city", "input_schema": SCHEMA}
]
CHAT_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA,
        },
    }
]  # fmt: skip
MOOD = {
    "type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(make_context: MakeContext) -> Iterator[TestClient]:
    """An app shared by the tests that do not change it."""
    with TestClient(create_app(make_context()), raise_server_exceptions=False) as client:
        yield client


def ask(api: TestClient, path: str = PATH, **fields: Any) -> Response:
    body = {"model": "demo", "max_tokens": 60, "temperature": 0} if path == PATH else {}
    return api.post(path, json=body | fields)


def text_blocks(text: str) -> list[Any]:
    """Return the content blocks of a response that is one text."""
    return [{"type": "text", "text": text, "citations": None}]


def answered(api: TestClient, **fields: Any) -> dict[str, Any]:
    response = ask(api, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(response: Response) -> list[dict[str, Any]]:
    """Return the events of a stream; check that each event is named after its type."""
    found = []
    for block in response.text.strip().split("\n\n"):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Assemble the message as a client does; check the order of the events."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    open_block: dict[str, Any] | None = None
    for event in events[1:-1]:
        if event["type"] == "ping":
            continue
        if event["type"] == "message_delta":
            assert open_block is None
            message |= event["delta"] | {"usage": event["usage"]}
            continue
        assert message["stop_reason"] is None
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == len(message["content"])
            open_block = event["content_block"] | {"json": ""}
            message["content"].append(open_block)
            continue
        assert open_block is not None and event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            text = open_block.pop("json")
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads(text)
            open_block = None
            continue
        delta = event["delta"]
        match delta["type"]:
            case "text_delta":
                open_block["text"] += delta["text"]
            case "thinking_delta":
                open_block["thinking"] += delta["thinking"]
            case "signature_delta":
                open_block["signature"] = delta["signature"]
            case "input_json_delta":
                open_block["json"] += delta["partial_json"]
    return message


def without_ids_and_cached(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without its ids and without the usage that depends on the cache."""
    rest = {name: value for name, value in message.items() if name not in ("id", "usage")}
    blocks = [{n: v for n, v in block.items() if n != "id"} for block in message["content"]]
    return rest | {"content": blocks, "output": message["usage"]["output_tokens"]}


def test_text_response_has_engine_output_and_usage(shared: TestClient) -> None:
    expected = direct(HELLO, max_tokens=60)
    response = ask(shared, messages=HELLO)
    message = response.json()
    assert message["content"] == text_blocks(expected.outputs[0].text)
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "demo")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["id"].startswith("msg")
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert prompt == len(expected.prompt_token_ids or ())
    assert usage["output_tokens"] == len(expected.outputs[0].token_ids)
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_system_and_text_blocks_become_chat_messages(shared: TestClient) -> None:
    chat = [
        {"role": "system", "content": "You are a fox.\nBe brief."},
        {"role": "user", "content": "Who are you?\nTell me."},
    ]
    expected = direct(chat, max_tokens=20)
    cache_mark = {"cache_control": {"type": "ephemeral"}}
    message = answered(
        shared,
        max_tokens=20,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=5e0;"},
            {"type": "text", "text": "You are a fox."},
            {"type": "text", "text": "Be brief."} | cache_mark,
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Who are you?"} | cache_mark]},
            {"role": "user", "content": "Tell me."},
        ],
        metadata={"user_id": "u"},
        cache_control={"type": "ephemeral"},
    )
    assert message["content"][0]["text"] == expected.outputs[0].text
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    prompt += usage["cache_creation_input_tokens"]
    assert shared.delete(f"/v1/requests/{message['id']}").status_code == 200  # retained
    assert prompt == len(expected.prompt_token_ids or ())


CASES: list[dict[str, Any]] = [
    {"messages": HELLO},
    {"messages": QUESTION, "tools": TOOLS},
    {"messages": QUESTION, "tools": TOOLS, "tool_choice": {"type": "none"}},
    {"messages": HELLO, "tools": TOOLS, "tool_choice": {"type": "any"}},
    {"messages": HELLO, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "get_weather"}},
    {"messages": HELLO, "output_config": {"format": {"type": "json_schema", "schema": MOOD}}},
    {"messages": HELLO, "stop_sequences": ["thank", " you"]},
    {"messages": HELLO, "max_tokens": 3},
    {"messages": HELLO, "max_tokens": 0},
    {"messages": [*HELLO, {"role": "assistant", "content": "I am"}], "max_tokens": 4},
]
REASONS = [
    "end_turn", "tool_use", "end_turn", "tool_use", "tool_use", "end_turn", "stop_sequence",
    "max_tokens", "max_tokens", "max_tokens",
]  # fmt: skip


@pytest.mark.parametrize(("fields", "reason"), list(zip(CASES, REASONS, strict=True)))
def test_streamed_events_assemble_to_the_whole_message(
    shared: TestClient, fields: dict[str, Any], reason: str
) -> None:
    whole = answered(shared, **fields)
    events = events_of(ask(shared, **fields, stream=True))
    assert without_ids_and_cached(assembled(events)) == without_ids_and_cached(whole)
    assert whole["stop_reason"] == reason
    assert [event["type"] for event in events].count("ping") == 1
    counted = ask(shared, COUNT, **{n: v for n, v in fields.items() if n not in ("max_tokens",)})
    usage = whole["usage"]
    both = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json() == {"input_tokens": both}


def test_tool_call_and_result_round_trip(shared: TestClient) -> None:
    message = answered(shared, messages=QUESTION, tools=TOOLS)
    [call] = message["content"]
    assert (call["type"], call["name"], call["input"]) == (
        "tool_use", "get_weather", {"city": "Paris"},
    )  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": '{"sky": "sunny"}'}
    follow_up = [
        *QUESTION,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    chat = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": call["id"], "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "sunny"}'},
    ]  # fmt: skip
    expected = direct(chat, ChatOptions(tools=CHAT_TOOLS), max_tokens=60).outputs[0].text
    assert "sunny" in expected
    answer = answered(shared, messages=follow_up, tools=TOOLS)
    assert answer["content"] == text_blocks(expected)


def test_disable_parallel_tool_use_gives_one_call(shared: TestClient) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = answered(shared, messages=HELLO, tools=TOOLS, tool_choice=choice, max_tokens=90)
    [call] = message["content"]
    assert isinstance(call["input"]["city"], str)


def test_json_schema_constrains_the_response(shared: TestClient) -> None:
    output_settings = {"format": {"type": "json_schema", "schema": MOOD}, "effort": "max"}
    message = answered(shared, messages=HELLO, output_config=output_settings)
    assert json.loads(message["content"][0]["text"])["mood"] in ("good", "bad")


def test_response_names_the_matched_stop_sequence(shared: TestClient) -> None:
    text = direct(HELLO, max_tokens=60).outputs[0].text
    before, stop, _ = text.partition("thank")
    assert stop
    message = answered(shared, messages=HELLO, stop_sequences=["nowhere", "thank"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "thank")
    assert message["content"] == text_blocks(before)


def test_max_tokens_is_clamped_to_the_context(make_context: MakeContext) -> None:
    """Clients send the maximum of the models that they were written for."""
    long = [{"role": "user", "content": "one two three four five six seven eight nine ten " * 9}]
    context = make_context()
    with TestClient(create_app(context)) as api:
        fields = {"messages": long, "max_tokens": 64_000, "temperature": 0}
        num_prompt = api.post(COUNT, json={"messages": long}).json()["input_tokens"]
        message = api.post(PATH, json=fields | {"stop_sequences": []}).json()
        assert context.client.requests[-1].params.max_tokens == 512 - num_prompt
    assert message["stop_reason"] in ("end_turn", "model_context_window_exceeded")
    reached = message["usage"]["output_tokens"] == 512 - num_prompt
    assert (message["stop_reason"] == "model_context_window_exceeded") == reached


def test_usage_counts_cached_tokens_separately(shared: TestClient) -> None:
    fields: dict[str, Any] = {"system": "Count the cached tokens of this one. " * 3}
    first = answered(shared, messages=HELLO, max_tokens=0, **fields)["usage"]
    assert first["output_tokens"] == 0
    again = answered(shared, messages=HELLO, max_tokens=2, **fields)["usage"]
    total = ask(shared, COUNT, messages=HELLO, **fields).json()["input_tokens"]
    assert first["input_tokens"] + first["cache_read_input_tokens"] == total
    assert again["cache_read_input_tokens"] == (total - 1) // 16 * 16
    assert again["input_tokens"] == total - again["cache_read_input_tokens"]


def test_count_tokens_accepts_prompts_that_are_too_long(shared: TestClient) -> None:
    long = [{"role": "user", "content": "fox " * 600}]
    assert ask(shared, COUNT, messages=long).json()["input_tokens"] > 512
    error = error_of(ask(shared, messages=long), 400, "invalid_request_error")
    assert error.startswith("prompt is too long: ") and "truncate" not in error


# ---- reasoning -------------------------------------------------------------------------------

THINKING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}\n{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinker() -> Iterator[TestClient]:
    """An app whose model reasons by default."""
    from quire import LLM

    with LLM(
        "demo", chat_template=THINKING, max_model_len=512, kv_cache_memory_bytes=16 << 20,
        max_num_seqs=8, disable_log_stats=True,
    ) as llm:  # fmt: skip
        engine = llm.engine
        context = ApiContext(
            FakeClient(engine), engine.renderer, engine.requests, ("demo",), ServerConfig(), 0
        )
        with TestClient(create_app(context), raise_server_exceptions=False) as client:
            yield client


THINK_BRIEFLY = {"type": "enabled", "budget_tokens": 12}
STORY: list[Any] = [{"role": "user", "content": "Once upon a time"}]


def test_reasoning_is_a_separate_block(thinker: TestClient) -> None:
    fields = {"messages": HELLO, "thinking": THINK_BRIEFLY, "max_tokens": 40}
    whole = answered(thinker, **fields)
    thought, text = whole["content"]
    assert thought["type"] == "thinking" and thought["thinking"] and thought["signature"]
    assert text["type"] == "text" and text["text"]
    usage = whole["usage"]
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] <= 13 < usage["output_tokens"]
    streamed = assembled(events_of(ask(thinker, **fields, stream=True)))
    assert without_ids_and_cached(streamed) == without_ids_and_cached(whole)
    hidden = answered(thinker, **fields | {"thinking": THINK_BRIEFLY | {"display": "omitted"}})
    assert hidden["content"] == [thought | {"thinking": ""}, text]


def test_thinking_type_disabled_turns_reasoning_off(thinker: TestClient) -> None:
    fields = {"messages": STORY, "max_tokens": 20}
    off = answered(thinker, **fields, thinking={"type": "disabled"})
    assert [block["type"] for block in off["content"]] == ["text"]
    on = answered(thinker, **fields, thinking={"type": "adaptive"})
    assert on["content"][0]["type"] == "thinking"


def test_thinking_budget_beyond_max_tokens_has_no_effect(thinker: TestClient) -> None:
    fields = {"messages": HELLO, "max_tokens": 8}
    large = answered(thinker, **fields, thinking={"type": "enabled", "budget_tokens": 1024})
    free = answered(thinker, **fields, thinking={"type": "adaptive"})
    assert large["content"] == free["content"]


def test_earlier_reasoning_reaches_the_template(thinker: TestClient) -> None:
    blocks = [
        {"type": "thinking", "thinking": "A greeting.", "signature": "s"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "Hi."},
    ]
    messages = [*HELLO, {"role": "assistant", "content": blocks}, *HELLO]
    counted = ask(thinker, COUNT, messages=messages).json()["input_tokens"]
    seen = [*HELLO, {"role": "assistant", "content": "Hi.(A greeting.)"}, *HELLO]
    assert counted == ask(thinker, COUNT, messages=seen).json()["input_tokens"]


def test_non_reasoning_model_ignores_the_thinking_budget(shared: TestClient) -> None:
    plain = answered(shared, messages=HELLO)
    reply = answered(shared, messages=HELLO, thinking={"type": "enabled", "budget_tokens": 10})
    assert reply["content"] == plain["content"]


# ---- hooks -----------------------------------------------------------------------------------


class Changing:
    """A hook that changes texts and calls, and ends requests at certain words."""

    def before_admission(self, request: HookRequest) -> HookRequest | None:
        self.messages = request.messages
        if any("forbidden" in text for text in request.texts):
            raise EndRequest("no such word")
        return None

    def on_output(self, piece: HookPiece) -> HookPiece:
        if "help" in piece.text:
            raise EndRequest("no help")
        return replace(piece, text=piece.text.upper())

    def on_tool_call(self, call: HookCall) -> HookCall:
        return replace(call, arguments='{"city": "Rome"}')


@pytest.mark.parametrize("stream", [False, True])
def test_hooks_see_and_change_messages(
    api: TestClient, api_context: ApiContext, stream: bool
) -> None:
    hook = Changing()
    api_context.hooks = Hooks([hook], 30.0)

    def reply(**fields: Any) -> dict[str, Any]:
        response = ask(api, stream=stream, **fields)
        return assembled(events_of(response)) if stream else response.json()

    ended = reply(messages=HELLO, system=[{"type": "text", "text": "Hm."}])
    assert [message["role"] for message in hook.messages] == ["system", "user"]
    assert ended["stop_reason"] == "refusal" and ended["stop_details"]["explanation"] == "no help"
    text = direct(HELLO, max_tokens=6).outputs[0].text
    assert "help" not in text
    changed = reply(messages=HELLO, max_tokens=6)
    assert changed["content"] == text_blocks(text.upper())
    [call] = reply(messages=QUESTION, tools=TOOLS)["content"]
    assert call["input"] == {"city": "Rome"}
    refused = ask(api, messages=[{"role": "user", "content": "forbidden"}], stream=stream)
    assert "no such word" in error_of(refused, 400, "invalid_request_error")


# ---- errors ----------------------------------------------------------------------------------


def error_of(response: Response, status: int, kind: str) -> str:
    """Check the shape of an error response, and return its message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and set(body["error"]) == {
        "type", "message",
    }  # fmt: skip
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == response.headers["request-id"]
    return body["error"]["message"]


SEARCH = {"type": "search_result", "source": "s", "title": "t", "content": []}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages must be of 1 or more items"),
        ({"max_tokens": None}, "max_tokens must be an integer, got null"),
        ({"max_tokens": -1}, "max_tokens must be at least 0, got -1"),
        ({"system": 5}, "system must be a string or a list, got 5"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
        ({"thinking": {"type": "often"}}, "thinking.type must be 'enabled', 'disabled' or"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type=any needs tools"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name must name the tool"),
        (
            {"tool_choice": {"type": "tool", "name": "f"}, "tools": TOOLS},
            'tool_choice names "f", which is not among the tools',
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type must be custom"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema must be a JSON schema, got null"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[1]: another tool is also called 'get_weather'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            'output_config.format: Unimplemented keys: ["not"]',
        ),
        ({"output_format": {"type": "json_schema"}}, "use output_config.format"),
        ({"messages": [{"role": "user", "content": [SEARCH]}]}, 'tool_result, got "search_result"'),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_errors_name_the_wrong_field(
    shared: TestClient, fields: dict[str, Any], words: str
) -> None:
    response = ask(shared, **{"messages": HELLO} | fields)
    assert words in error_of(response, 400, "invalid_request_error")


def test_http_errors_have_the_messages_shape(make_context: MakeContext) -> None:
    context = make_context(api_key=("k",), max_body_bytes=1024)
    key = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
    body = {"messages": HELLO, "max_tokens": 1}
    with TestClient(create_app(context), raise_server_exceptions=False) as api:
        for path in (PATH, COUNT):
            assert api.post(path, json=body, headers=key).status_code == 200
            bearer = {"Authorization": "Bearer k"}
            assert api.post(path, json=body, headers=bearer).status_code == 200
            for wrong in ({}, {"x-api-key": "j"}, key | {"Authorization": "Bearer j"}):
                error_of(api.post(path, json=body, headers=wrong), 401, "authentication_error")
        large = body | {"system": "x" * 1024}
        error_of(api.post(PATH, json=large, headers=key), 413, "request_too_large")
        other = api.post(PATH, json=body | {"model": "other"}, headers=key)
        assert "demo" in error_of(other, 404, "not_found_error")
        error_of(api.post(f"{PATH}/batches", json={}, headers=key), 501, "api_error")
        error_of(api.post(f"{PATH}/other", json={}, headers=key), 404, "not_found_error")
        error_of(api.get(PATH, headers=key), 405, "invalid_request_error")
        no_json = api.post(PATH, content=b"{", headers=key | {"Content-Type": "application/json"})
        error_of(no_json, 400, "invalid_request_error")
        urgent = api.post(PATH, json=body | {"priority": -1}, headers=key)
        error_of(urgent, 403, "permission_error")
        context.draining = True
        error_of(api.post(PATH, json=body, headers=key), 503, "overloaded_error")
        for path in ("/v1/messagesx", "/v1/nothing"):  # paths of other APIs
            assert set(api.get(path, headers=key).json()) == {"error"}


def test_failing_stream_ends_with_an_error_event(
    api: TestClient, api_context: ApiContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = api_context.client
    generate, outputs = client.generate, []

    async def fail_later(*arguments: Any) -> Any:
        async for output in generate(*arguments):
            outputs.append(output)
            yield output
            if len(outputs) == 2:
                raise RuntimeError("at 0x7f")

    monkeypatch.setattr(client, "generate", fail_later)
    events = events_of(ask(api, messages=HELLO, stream=True))
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    assert "0x7f" not in events[-1]["error"]["message"] and events[-1]["request_id"]


def test_unknown_fields_are_named_and_refused_only_in_strict_mode(
    api: TestClient, strict: TestClient
) -> None:
    fields = {"messages": HELLO, "max_tokens": 1, "context_management": {"edits": []}}
    for path in (PATH, COUNT):
        answer = api.post(path, json=fields)
        assert answer.status_code == 200
        assert "context_management" in answer.headers["X-Quire-Ignored-Fields"]
        refused = error_of(strict.post(path, json=fields), 400, "invalid_request_error")
        assert "no field 'context_management'" in refused


def test_openapi_document_describes_both_endpoints(api: TestClient) -> None:
    document = api.get("/openapi.json").json()
    for path in (PATH, COUNT):
        responses = document["paths"][path]["post"]["responses"]
        shape = responses["400"]["content"]["application/json"]["schema"]
        assert shape == {"$ref": "#/components/schemas/MessageError"}
    required = document["components"]["schemas"]["MessagesRequest"]["required"]
    assert set(required) == {"messages", "max_tokens"}
