"""Chat chunks become message events and whole messages (`serve/anthropic/events.py`); errors have
the shape of the Messages API."""

from typing import Any

import pytest

from quire.base.errors import CONTEXT_LENGTH_EXCEEDED, EngineBusy, EngineDead
from quire.serve.anthropic.errors import is_messages, message_error_body
from quire.serve.anthropic.events import MessageEvents, message_of
from quire.serve.errors import ApiError, as_api_error, bad_request, timed_out
from quire.serve.pipeline.answer import UsageCounter


def chunk(reason: str | None = None, stop: Any = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"choices": [choice | ({"stop_reason": stop} if reason else {})]}


def call(index: int, arguments: str, **head: Any) -> dict[str, Any]:
    name = {"name": head.pop("name")} if head else {}
    return {"index": index, **head, "function": {**name, "arguments": arguments}}


def message(*chunks: dict[str, Any], **settings: Any) -> dict[str, Any]:
    events = MessageEvents({"id": "m", "model": "d"}, UsageCounter(9, 5, 4), **settings)
    return message_of([event for each in chunks for event in events.of_chunk(each)])


def test_blocks_keep_the_order_of_the_response() -> None:
    found = message(
        chunk(role="assistant", content=""),
        chunk(reasoning="Hm", reasoning_content="Hm"),
        chunk(reasoning="m.", reasoning_content="m.", content="One"),
        chunk(content=".", tool_calls=[call(0, "", id="a", name="f"), call(0, '{"x": ')]),
        chunk(tool_calls=[call(0, "1}"), call(1, "{}", id="b", name="g")]),
        chunk(content="Two."),
        chunk(reasoning="Hmm.", reasoning_content="Hmm."),
        chunk("tool_calls"),
    )
    kinds = [block["type"] for block in found["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use", "text", "thinking"]
    first, text, one, two, rest, last = found["content"]
    assert (first["thinking"], text["text"], rest["text"]) == ("Hmm.", "One.", "Two.")
    called = {"type": "tool_use", "caller": {"type": "direct"}}
    assert one == called | {"id": "a", "name": "f", "input": {"x": 1}}
    assert two == called | {"id": "b", "name": "g", "input": {}}
    assert first["signature"] == last["signature"] != ""
    assert found["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("reason", "stop", "settings", "expected"),
    [
        ("stop", None, {}, ("end_turn", None)),
        ("stop", 7, {"stops": ["7"]}, ("end_turn", None)),
        ("stop", "x", {"stops": ["y", "x"]}, ("stop_sequence", "x")),
        ("stop", "x", {}, ("end_turn", None)),  # a stop string of the model's defaults
        ("length", None, {}, ("max_tokens", None)),
        ("length", None, {"is_cut": True}, ("model_context_window_exceeded", None)),
        ("tool_calls", None, {}, ("tool_use", None)),
        ("stop", None, {"is_dropped": True}, ("max_tokens", None)),
        ("content_filter", "rude", {"stops": ["rude"]}, ("refusal", None)),
        ("abort", None, {}, ("end_turn", None)),
    ],
)
def test_stop_reason_follows_the_finish_reason(
    reason: str, stop: Any, settings: Any, expected: Any
) -> None:
    found = message(chunk(content="a"), chunk(reason, stop), **settings)
    assert (found["stop_reason"], found["stop_sequence"]) == expected
    details = found["stop_details"]
    assert (details["explanation"] if details else None) == (
        "rude" if reason == "content_filter" else None
    )


def test_dropped_response_has_no_content() -> None:
    found = message(chunk(content="a"), chunk("stop"), is_dropped=True)
    assert found["content"] == [] and found["usage"]["output_tokens"] == 0
    assert found["usage"]["input_tokens"] == 5 and found["usage"]["cache_read_input_tokens"] == 4


def test_empty_response_has_no_blocks() -> None:
    assert message(chunk(role="assistant", content=""), chunk("stop"))["content"] == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (bad_request("no"), "invalid_request_error"),
        (ApiError(401, "no"), "authentication_error"),
        (ApiError(403, "no"), "permission_error"),
        (ApiError(404, "no"), "not_found_error"),
        (ApiError(405, "no"), "invalid_request_error"),
        (timed_out("no"), "timeout_error"),
        (ApiError(413, "no"), "request_too_large"),
        (ApiError(415, "no"), "invalid_request_error"),
        (ApiError(429, "no"), "rate_limit_error"),
        (EngineBusy("no"), "overloaded_error"),
        (EngineDead("no"), "overloaded_error"),
        (ApiError(500, "no"), "api_error"),
    ],
)
def test_error_type_follows_the_error(error: Exception, kind: str) -> None:
    body = message_error_body(as_api_error(error), "r")
    shown = {"type": kind, "message": "no"}
    assert body == {"type": "error", "error": shown, "request_id": "r"}


def test_error_messages_have_the_words_that_clients_match() -> None:
    body = message_error_body(bad_request("no", "messages", CONTEXT_LENGTH_EXCEEDED), "")
    assert body["error"]["message"] == "prompt is too long: no" and body["request_id"] is None
    body = message_error_body(bad_request("response_format: no.", "response_format"), "")
    assert body["error"]["message"] == "output_config.format: no."


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/v1/messages", "", True),
        ("/v1/messages/count_tokens", "", True),
        ("/v1/messages/", "", True),
        ("/v1/messagesx", "", False),
        ("/x/v1/messages", "", False),
        ("/x/v1/messages", "/x", True),
    ],
)
def test_only_messages_paths_get_the_messages_error_shape(
    path: str, root: str, expected: bool
) -> None:
    assert is_messages({"path": path, "root_path": root}) is expected
