"""Messages"""

from typing import Any

import pytest

from tests.support.serve.vllm_cases import ASK, OTHER_TOOL, Asked, events_of

TOOL = {"name": "add", "description": "", "input_schema": OTHER_TOOL["function"]["parameters"]}
BODY: dict[str, Any] = {"model": "demo", "max_tokens": 8, "messages": ASK, "temperature": 0}


def num_input(found: Any) -> int:
    """Return how many tokens the input had; those that were cached are told apart."""
    usage: dict[str, int] = found["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_one(asked: Asked) -> None:
    """an answer is a message of blocks, with a reason for its end"""
    found = asked.post("/v1/messages", **BODY)
    assert found["type"] == "message" and found["role"] == "assistant"
    [block] = found["content"]
    assert block["type"] == "text" and block["text"]
    assert found["stop_reason"] == "max_tokens" and found["usage"]["output_tokens"] == 8


def test_system(asked: Asked) -> None:
    """a system's text, or blocks of it, stand before"""
    told = ("You know foxes.", [{"type": "text", "text": "You know foxes."}], "")
    as_text, as_blocks, none = (
        num_input(asked.post("/v1/messages", system=each, **BODY)) for each in told
    )
    assert as_text == as_blocks > none


def test_stream(asked: Asked) -> None:
    """a stream opens and closes message and blocks in their order"""
    answer = asked.http.post("/v1/messages", json=BODY | {"stream": True})
    events = events_of(answer.text)
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert text == asked.post("/v1/messages", **BODY)["content"][0]["text"]


def test_stop_sequence(asked: Asked) -> None:
    """a stop sequence ends it, and is told"""
    body = BODY | {"max_tokens": 30}
    word = asked.post("/v1/messages", **body)["content"][0]["text"].split()[2]
    found = asked.post("/v1/messages", stop_sequences=[word], **body)
    assert found["stop_reason"] == "stop_sequence" and found["stop_sequence"] == word


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_tool(asked: Asked, choice: Any) -> None:
    """a tool that must be used is, with input of its schema"""
    body = BODY | {"max_tokens": 100, "tools": [TOOL], "tool_choice": choice}
    found = asked.post("/v1/messages", **body)
    uses = [block for block in found["content"] if block["type"] == "tool_use"]
    assert found["stop_reason"] == "tool_use" and set(uses[0]["input"]) == {"a", "b"}


def test_tool_streamed(asked: Asked) -> None:
    """a stream tells its input as JSON that comes in parts"""
    body = BODY | {"max_tokens": 100, "tools": [TOOL], "tool_choice": {"type": "any"}}
    events = events_of(asked.http.post("/v1/messages", json=body | {"stream": True}).text)
    starts = [e for e in events if e["type"] == "content_block_start"]
    deltas = [e["delta"]["type"] for e in events if e["type"] == "content_block_delta"]
    assert starts[-1]["content_block"]["name"] == "add" and "input_json_delta" in deltas


def test_tool_answered(asked: Asked) -> None:
    """its result goes back as a block"""
    use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": 2}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "3"}
    talk = [
        *ASK,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    assert asked.post("/v1/messages", **BODY | {"messages": talk, "tools": [TOOL]})["content"]


def test_counted(asked: Asked) -> None:
    """/v1/messages/count_tokens counts what a message would have"""
    body = {"model": "demo", "messages": ASK, "system": "You know foxes.", "tools": [TOOL]}
    counted = asked.post("/v1/messages/count_tokens", **body)["input_tokens"]
    assert counted == num_input(asked.post("/v1/messages", max_tokens=1, **body))


@pytest.mark.parametrize("change", [{"messages": []}, {"max_tokens": -1}, {"temperature": -1},
                                    {"messages": [{"role": "robot", "content": "x"}]}])  # fmt: skip
def test_wrong(asked: Asked, change: dict[str, Any]) -> None:
    """what is wrong is an error in Anthropic's form"""
    answer = asked.http.post("/v1/messages", json=BODY | change)
    found = answer.json()
    assert answer.status_code == 400 and found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error" and found["error"]["message"]


def test_other_model(asked: Asked) -> None:
    """another model's name is a 404 of that form"""
    answer = asked.http.post("/v1/messages", json=BODY | {"model": "other"})
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
