"""/v1/responses over HTTP: text, tools, structured output and limits, whole and streamed.

Covers `serve/responses/start.py`, `serve/responses/turn.py`, `serve/responses/as_chat.py` and
`serve/responses/body.py`.
"""

import json
import re
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from quire.render.templates.chat_template import ChatOptions
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from tests.serve.api.conftest import MakeContext
from tests.support.serve.direct_engine import direct, text_of
from tests.support.serve.official_types import (
    GREEDY,
    PATH,
    QUESTION,
    TOOLS,
    asked,
    checked,
    checked_list,
    error_of,
    streamed,
    text_in,
    without_chance,
)

STORY = [{"role": "user", "content": "Tell me a story."}]
CHAT_TOOLS = [
    {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
    for tool in TOOLS
]
LOGPROBS = "message.output_text.logprobs"


def test_text_input_is_a_user_message(api: TestClient) -> None:
    found = asked(api, input="Tell me a story.", metadata={"a": "b"}, user="me")
    expected = direct(STORY, max_tokens=24)
    assert text_in(found) == expected.outputs[0].text
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["status"] == "incomplete"
    usage = found["usage"]
    assert usage["input_tokens"] == len(expected.prompt_token_ids)
    assert usage["output_tokens"] == 24
    assert usage["total_tokens"] == usage["input_tokens"] + 24
    assert (found["metadata"], found["user"], found["temperature"]) == ({"a": "b"}, "me", 0.0)


def test_repeated_prompt_reports_cached_tokens(api: TestClient) -> None:
    asked(api, input=f"{'word ' * 40}once")
    usage = asked(api, input=f"{'word ' * 40}once")["usage"]
    assert 0 < usage["input_tokens_details"]["cached_tokens"] < usage["input_tokens"]


def test_finished_response_is_completed(api: TestClient) -> None:
    found = asked(api, input="Tell me a story.", stop=" ", max_output_tokens=None)
    assert (found["status"], found["incomplete_details"]) == ("completed", None)
    assert found["completed_at"] >= found["created_at"]
    assert found["output"][0]["status"] == "completed"


def test_instructions_and_developer_message_form_the_system_prompt(api: TestClient) -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"type": "message", "role": "user", "content": "Tell me a story."},
    ]
    found = asked(api, instructions="Be short.", input=items)
    messages = [{"role": "system", "content": "Be short.\n\nBe kind."}, *STORY]
    assert text_in(found) == text_of(messages, max_tokens=24)
    assert found["instructions"] == "Be short."


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "input": QUESTION}])
def test_stream_matches_the_whole_response(api: TestClient, fields: Any) -> None:
    given = {"input": "Tell me a story.", "max_output_tokens": 60} | fields
    events = streamed(api, **given)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == [
        "response.created", "response.in_progress", "response.output_item.added",
    ]  # fmt: skip
    last = checked(events[-1]["response"])
    assert kinds[-1] == f"response.{last['status']}"
    whole = without_chance(asked(api, **given))
    cached = whole["usage"].pop("input_tokens_details"), last["usage"].pop("input_tokens_details")
    assert cached[0].keys() == cached[1].keys()
    assert without_chance(last) == whole
    deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
    assert deltas  # a slow reader gets several tokens in one delta
    item = last["output"][0]
    assert "".join(deltas) == item.get("arguments", text_in(last))
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}


def test_function_call_and_result_round_trip(api: TestClient) -> None:
    first = asked(api, input=QUESTION, tools=TOOLS, max_output_tokens=60)
    [call] = first["output"]
    assert (call["type"], call["name"], call["status"]) == (
        "function_call", "get_weather", "completed",
    )  # fmt: skip
    assert json.loads(call["arguments"]) == {"city": "Paris"}
    described = [TOOLS[0] | {"strict": None}]
    assert (first["status"], first["tools"]) == ("completed", described)
    output = {"type": "function_call_output", "call_id": call["call_id"]}
    output["output"] = '{"sky": "sunny"}'
    expected = text_of_results(call)
    user = {"role": "user", "content": QUESTION}
    fields = {"tools": TOOLS, "max_output_tokens": 60}
    assert text_in(asked(api, input=[user, call, output], **fields)) == expected
    continued = asked(api, input=[output], previous_response_id=first["id"], **fields)
    assert text_in(continued) == expected
    assert continued["previous_response_id"] == first["id"]
    named = [user, {"type": "item_reference", "id": call["id"]}, output]
    assert text_in(asked(api, input=named, **fields)) == expected


def text_of_results(call: dict[str, Any]) -> str:
    function = {"name": call["name"], "arguments": call["arguments"]}
    messages: list[Any] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": call["call_id"], "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": '{"sky": "sunny"}'},
    ]  # fmt: skip
    found = direct(messages, ChatOptions(tools=CHAT_TOOLS), max_tokens=60).outputs[0].text
    assert "sunny" in found
    return found


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [
            {"type": "function", "name": "get_weather"}]},
    ],
)  # fmt: skip
def test_tool_choice_forces_a_call(api: TestClient, choice: Any) -> None:
    given = {"input": "Hello, how are you?", "tools": TOOLS, "max_output_tokens": 90}
    assert asked(api, **given)["output"][0]["type"] == "message"
    found = asked(api, **given, tool_choice=choice, parallel_tool_calls=False)
    assert [item["type"] for item in found["output"]] == ["function_call"]
    assert isinstance(json.loads(found["output"][0]["arguments"])["city"], str)
    assert (found["tool_choice"], found["parallel_tool_calls"]) == (choice, False)


def test_truncated_call_can_be_sent_back(api: TestClient) -> None:
    given = {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 16}
    first = asked(api, input=QUESTION, **given)
    [call] = first["output"]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")
    with pytest.raises(ValueError, match="Expecting|Unterminated"):
        json.loads(call["arguments"])
    user = {"role": "user", "content": QUESTION}
    whole = asked(api, input=[user, call, user], tools=TOOLS)
    assert text_in(asked(api, input=[user], previous_response_id=first["id"], tools=TOOLS)) == (
        text_in(whole)
    )


def test_tool_choice_none_prevents_calls(api: TestClient) -> None:
    """The prompt still has the tools."""
    found = asked(api, input=QUESTION, tools=TOOLS, tool_choice="none")
    assert [item["type"] for item in found["output"]] == ["message"]
    assert text_in(found) and "<tool_call>" not in text_in(found)
    auto = asked(api, input=QUESTION, tools=TOOLS)
    assert [item["type"] for item in auto["output"]] == ["function_call"]
    assert found["usage"]["input_tokens"] == auto["usage"]["input_tokens"]


def test_text_format_constrains_the_response(api: TestClient) -> None:
    schema = {
        "type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"],
        "additionalProperties": False,
    }  # fmt: skip
    text_format = {"type": "json_schema", "name": "mood", "schema": schema, "strict": True}
    found = asked(api, input="How are you?", text={"format": text_format}, max_output_tokens=40)
    assert json.loads(text_in(found))["mood"] in ("good", "bad")
    assert found["text"]["format"] == text_format
    free = asked(api, input="How are you?", text={"format": {"type": "json_object"}})
    assert text_in(free).lstrip().startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_match_the_tokens_of_the_message(api: TestClient, stream: bool) -> None:
    given = {"input": "Tell me a story.", "include": [LOGPROBS], "top_logprobs": 2}
    expected = direct(STORY, max_tokens=24, logprobs=2).outputs[0]
    if stream:
        events = streamed(api, **given)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        entries = [entry for event in deltas for entry in event["logprobs"]]
    else:
        entries = asked(api, **given)["output"][0]["content"][0]["logprobs"]
    chosen = [position[i] for i, position in
              zip(expected.token_ids, expected.logprobs, strict=True)]  # fmt: skip
    assert [entry["logprob"] for entry in entries] == [each.logprob for each in chosen]
    assert "".join(entry["token"] for entry in entries) == expected.text
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_fields_without_effect_are_accepted(api: TestClient) -> None:
    """Agent kits send them by default."""
    found = asked(
        api, input=[{"role": "user", "content": "Tell me a story."}],
        include=["reasoning.encrypted_content"], reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"}, service_tier="auto", prompt_cache_key="k", store=False, tools=[],
        tool_choice="auto", truncation="disabled", conversation=None, max_tool_calls=3,
    )  # fmt: skip
    assert text_in(found) == text_of(STORY, max_tokens=24)
    assert found["reasoning"] == {"effort": "low", "summary": "auto"}
    assert api.get(f"{PATH}/{found['id']}").status_code == 404
    api.delete(f"/v1/requests/{found['id']}")  # retained, as prompt_cache_key requests


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "from 1 to 4096 items, including earlier ones, got 0"),
        ({"input": 5}, "input", "a text or a list of items, got 5"),
        ({"input": [{"role": "owl", "content": ""}]}, "input[0].role", "must be one of user"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "runs no tools"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "is required"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "x", "tools": TOOLS, "tool_choice": {"type": "web_search_preview"}},
         "tool_choice", "must be one of auto"),
        ({"input": "x", "conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt", "no stored prompts"),
        ({"input": "x", "include": ["all"]}, "include", "include may have"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs", "needs include="),
        ({"input": "x", "include": [LOGPROBS], "top_logprobs": 10**6}, "top_logprobs", "fewer"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "at least 1, got 0"),
        ({"input": "x", "max_output_tokens": 10**6}, "max_output_tokens", "^max_output_tokens=1"),
        ({"input": "word " * 2000}, "input", "at most 512 are possible here"),
        ({"input": "x", "text": {"format": {"type": "yaml"}}}, "text.format", "json_schema, got"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {}}}},
         "text.format", "^text.format.name is required"),
        ({"input": "x", "background": True, "store": False}, "store", "needs store"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "no stored"),
        ({"input": [{"id": "msg_1"}]}, "input[0].id", "no stored item"),
        ({"input": "x", "metadata": {"a": "b" * 513}}, "metadata.a", "512"),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused_with_the_field(
    api: TestClient, fields: Any, param: str, words: str
) -> None:
    error = error_of(api, **fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert re.search(words, error["message"]), error
    assert "messages" not in error["message"] and "response_format" not in error["message"]


def test_truncation_auto_truncates_a_long_prompt(api: TestClient) -> None:
    found = asked(api, input="word " * 600, truncation="auto")
    assert found["usage"]["input_tokens"] == 512 - 24
    assert found["truncation"] == "auto"


def test_response_is_stored_until_it_is_deleted(api: TestClient) -> None:
    found = asked(api, input=["Hello,", {"role": "user", "content": "how are you?"}])
    path = f"{PATH}/{found['id']}"
    assert checked(api.get(path).json()) == found
    page = checked_list(api.get(f"{path}/input_items?limit=1").json())
    assert page["data"][0]["content"] == [{"type": "input_text", "text": "how are you?"}]
    assert page["has_more"] and page["first_id"] == page["last_id"] == page["data"][0]["id"]
    rest = api.get(f"{path}/input_items?after={page['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["Hello,"]
    assert not rest["has_more"]
    first = api.get(f"{path}/input_items?order=asc").json()["data"][0]
    assert first == rest["data"][0]
    assert api.get(f"{path}/input_items?after=msg_1").json()["error"]["param"] == "after"
    assert api.post(f"{path}/cancel").json()["error"]["param"] == "response_id"
    assert api.get(f"{path}?stream=true").json()["error"]["param"] == "stream"
    assert api.delete(path).json() == {"id": found["id"], "object": "response", "deleted": True}
    for answer in (api.get(path), api.delete(path), api.get(f"{path}/input_items")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    error = error_of(api, input="x", previous_response_id=found["id"])
    assert error["code"] == "previous_response_not_found"


def test_instructions_do_not_carry_over(api: TestClient) -> None:
    first = asked(api, instructions="Be short.", input="Hello")
    second = asked(api, previous_response_id=first["id"], input="And now?")
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": text_in(first)},
        {"role": "user", "content": "And now?"},
    ]
    assert text_in(second) == text_of(messages, max_tokens=24)
    assert second["instructions"] is None
    items = api.get(f"{PATH}/{second['id']}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["And now?"]


def test_key_sees_only_its_own_responses(make_context: MakeContext) -> None:
    context = make_context(api_key=("one", "two"))
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    with TestClient(create_app(context)) as api:
        body = GREEDY | {"input": "Hello"}
        assert api.post(PATH, json=body).status_code == 401
        found = api.post(PATH, json=body, headers=mine).json()
        path = f"{PATH}/{found['id']}"
        assert api.get(path).status_code == 401
        assert api.get(path, headers=mine).json() == found
        for method, each in (
            ("GET", path), ("DELETE", path), ("POST", f"{path}/cancel"),
            ("GET", f"{path}/input_items"),
        ):  # fmt: skip
            assert api.request(method, each, headers=theirs).status_code == 404
        for fields in (
            {"previous_response_id": found["id"]},
            {"input": [{"type": "item_reference", "id": found["output"][0]["id"]}]},
        ):
            answer = api.post(PATH, json=body | fields, headers=theirs)
            assert answer.status_code == 400
        assert api.post(PATH, json=body | fields, headers=mine).status_code == 200


def test_store_of_zero_bytes_stores_nothing(make_context: MakeContext) -> None:
    with TestClient(create_app(make_context(response_store_bytes=0))) as api:
        found = asked(api, input="Hello")
        assert api.get(f"{PATH}/{found['id']}").status_code == 404


def test_failure_is_the_last_event_of_a_stream_and_is_stored(
    api: TestClient, api_context: ApiContext
) -> None:
    client: Any = api_context.client
    client.hold(after_steps=3)
    with api.stream("POST", PATH, json=GREEDY | {"input": "Hello", "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: response.created"
        client.fail("a secret of the library", code="step_failed")
        client.release()
        last = [line for line in lines if line][-1]
    failed = checked(json.loads(last.removeprefix("data: "))["response"])
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    assert "secret" not in failed["error"]["message"]
    assert api.get(f"{PATH}/{failed['id']}").json() == failed


def test_official_client_streams_retrieves_and_deletes(openai_client: openai.OpenAI) -> None:
    first = openai_client.responses.create(model="demo", input="Hello", max_output_tokens=8)
    given: dict[str, Any] = {"model": "demo", "temperature": 0, "previous_response_id": first.id}
    with openai_client.responses.stream(**given, input=QUESTION, max_output_tokens=16) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text != ""
    assert openai_client.responses.retrieve(final.id).output_text == text
    assert len(openai_client.responses.input_items.list(final.id).data) == 1
    openai_client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(final.id)
