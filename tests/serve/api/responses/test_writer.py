"""The order of events of responses with reasoning, text and calls, however their text is cut.

Covers `serve/responses/writer.py`.
"""

from collections.abc import Collection
from typing import Any

import pytest

from quire.serve.responses.writer import ResponseWriter
from tests.serve.api.pipeline.test_chat_choice import CALL, Answering
from tests.support.serve.official_types import Json, check_event, checked

ANSWER = f"<think>\nhm, x\n</think>\n\nI call.\n{CALL}\n{CALL}"
RESPONSE: Json = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": "demo", "tools": [],
    "tool_choice": "auto", "parallel_tool_calls": True,
}  # fmt: skip
USAGE: Json = {
    "input_tokens": 1, "output_tokens": 2, "total_tokens": 3,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 0},
}  # fmt: skip


def writer(num_reasoning: int = 0, custom: Collection[str] = ()) -> ResponseWriter:
    counts: dict[str, int] = {}

    def new_id(kind: str) -> str:
        counts[kind] = counts.get(kind, -1) + 1
        return f"{kind}_{counts[kind]}"

    return ResponseWriter(RESPONSE, new_id, lambda: num_reasoning, custom=custom)


def written(choices: list[Any], made: ResponseWriter | None = None) -> list[Json]:
    """Return the events for the choices of a chat's chunks, checked."""
    made = made or writer()
    events = made.begin()
    for choice in choices:
        events += made.take(choice)
    events += made.end(USAGE, 2)
    for number, event in enumerate(events):
        check_event(event)
        assert event["sequence_number"] == number
    checked(made.response)
    assert made.is_over
    return events


def about(item: str, parts: bool, delta: str) -> list[str]:
    part = [f"{item} content_part.added"] if parts else []
    done = [f"{item} content_part.done"] if parts else []
    return [
        f"{item} output_item.added", *part, f"{item} {delta}.delta", f"{item} {delta}.done", *done,
        f"{item} output_item.done",
    ]  # fmt: skip


def test_items_are_emitted_one_after_the_other() -> None:
    events = written(Answering(stream=True).deltas(ANSWER))
    lines = []
    for event in events[2:-1]:
        item = event.get("item_id") or event["item"]["id"]
        line = f"{item} {event['type'].removeprefix('response.')}"
        if not lines or lines[-1] != line:
            lines.append(line)
    assert lines == [
        *about("rs_0", True, "reasoning_text"),
        *about("msg_0", True, "output_text"),
        *about("fc_0", False, "function_call_arguments"),
        *about("fc_1", False, "function_call_arguments"),
    ]
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == last[
        "output"
    ]
    assert last["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm, x"}]
    assert [event["output_index"] for event in events if event["type"].endswith("item.added")] == [
        0, 1, 2, 3,
    ]  # fmt: skip


def test_added_items_are_empty_and_done_items_are_whole() -> None:
    events = written(Answering(stream=True).deltas(ANSWER))
    by_item: dict[str, str] = {}
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                item = event["item"]
                assert item["status"] == "in_progress"
                assert not item.get("content") and not item.get("arguments")
            case kind if kind.endswith(".delta"):
                by_item[event["item_id"]] = by_item.get(event["item_id"], "") + event["delta"]
            case "content_part.done":
                assert event["part"]["text"] == by_item[event["item_id"]]
            case "function_call_arguments.done":
                assert event["arguments"] == by_item[event["item_id"]] == '{"x": 1}'
            case kind if kind.endswith("_text.done"):
                assert event["text"] == by_item[event["item_id"]]


def chunk(reason: str | None = None, logprobs: list[str] | None = None, **delta: Any) -> Json:
    entries = [
        {"token": each, "logprob": -1.0, "bytes": [], "top_logprobs": []} for each in logprobs or ()
    ]
    return {"delta": delta, "finish_reason": reason, "logprobs": {"content": entries}}


@pytest.mark.parametrize(
    ("reason", "status", "why", "last"),
    [
        ("stop", "completed", None, "completed"),
        ("tool_calls", "completed", None, "completed"),
        ("length", "incomplete", {"reason": "max_output_tokens"}, "incomplete"),
        ("content_filter", "incomplete", {"reason": "content_filter"}, "incomplete"),
        ("abort", "cancelled", None, "incomplete"),
    ],
)
def test_finish_reason_sets_the_final_status(reason: str, status: str, why: Any, last: str) -> None:
    events = written([chunk(content="a"), chunk(reason, content="b")])
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last}"
    assert (response["status"], response.get("incomplete_details")) == (status, why)
    assert response["output"][0]["status"] == (
        "completed" if status == "completed" else "incomplete"
    )
    assert response["usage"] == USAGE


def test_empty_response_is_an_empty_message() -> None:
    [item] = written([chunk("stop")])[-1]["response"]["output"]
    assert item["content"] == [
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    ]


def test_text_after_a_call_is_a_new_message() -> None:
    call = {"index": 0, "id": "call_1", "function": {"name": "f", "arguments": "{}"}}
    events = written([chunk(content="a"), chunk(tool_calls=[call]), chunk("stop", content="b")])
    output = events[-1]["response"]["output"]
    assert [item["id"] for item in output] == ["msg_0", "fc_0", "msg_1"]


def test_logprobs_exclude_the_reasoning() -> None:
    """Logprobs of withheld text are sent with that text."""
    made = writer(num_reasoning=3)
    made.begin()
    made.take(chunk(logprobs=["<think>", "hm"], reasoning="hm"))
    made.take(chunk(logprobs=["</think>", "a"]))
    events = made.take(chunk(logprobs=["b"], content="ab"))
    assert [entry["token"] for entry in events[-1]["logprobs"]] == ["a", "b"]


def test_stop_marks_the_open_item_incomplete() -> None:
    made = writer()
    made.begin()
    made.take(chunk(content="a"))
    [last] = made.stop("failed", {"code": "server_error", "message": "m"})
    check_event(last)
    assert last["type"] == "response.failed"
    assert last["response"]["output"][0]["status"] == "incomplete"
