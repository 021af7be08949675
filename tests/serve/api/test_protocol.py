"""Bad input to both endpoints gives a 400 that names the field; nothing reaches the engine."""

import json
import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.serve.context import ApiContext

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}

# (field, value), refused by both endpoints
BOTH: list[tuple[str, Any]] = [
    ("n", 0), ("n", 9), ("n", 129),
    ("response_format", {"type": "xml"}), ("response_format", "json"), ("response_format", {}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("structured_outputs", {"regex": "("}), ("structured_outputs", {"regex": "a", "json": {}}),
    ("structured_outputs", {"regexp": "a"}), ("structured_outputs", {"json_object": False}),
    ("guided_choice", []), ("guided_regex", 5), ("guided_json", "{"), ("guided_grammar", ""),
    ("logits_processors", ["x"]), ("n", "many"),
    ("vllm_xargs", {"a": 1}), ("stop", ["x"] * 17), ("stop", "x" * 513), ("stop", [""]),
    ("stop", 5), ("stop", ["\ud800"]), ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("logit_bias", {"x": 1}), ("logit_bias", {"1536": 1}), ("logit_bias", [1]),
    ("bad_words", ["x"] * 257), ("bad_words", [""]), ("cache_salt", ""), ("cache_salt", "x" * 1025),
    ("temperature", -1), ("temperature", 3), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.5),
    ("top_k", -2), ("min_p", 2), ("presence_penalty", 3), ("frequency_penalty", -3),
    ("repetition_penalty", 0), ("seed", 2**63), ("seed", 1.5), ("max_tokens", -1),
    ("max_tokens", 100_000), ("min_tokens", -1), ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]), ("stop_token_ids", [1536]), ("stop_token_ids", [1] * 1025),
    ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("prompt_logprobs", -2), ("logprobs", -5),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncation_side", "middle"),
    ("priority", 2**40), ("stream_options", {"include_usage": True}), ("stream", "maybe"),
    ("top_k", 10**30), ("max_tokens", 2**31), ("logprobs", 10**30),
    ("timeout_s", 0), ("timeout_s", -1), ("timeout_s", "soon"), ("timeout_s", float("inf")),
    ("timeout_s", float("nan")), ("user", 5), ("user", "x" * 1025),
    ("min_tokens", 600), ("repetition_penalty", 1e300), ("repetition_penalty", 1e-40),
]  # fmt: skip

ONLY_TEXT: list[tuple[str, Any]] = [
    ("best_of", 0), ("best_of", 9), ("best_of", 129),
    ("suffix", "end"), ("prompt_embeds", "AAAA"), ("prompt", None), ("prompt", []),
    ("prompt", ""), ("prompt", 5), ("prompt", {"a": 1}), ("prompt", [[]]), ("prompt", [1, "a"]),
    ("prompt", ["a", 1]), ("prompt", [1.5]), ("prompt", [-1]), ("prompt", [True, False]),
    ("prompt", ["x"] * 257), ("prompt", [1] * 512), ("prompt", "word " * 3000),
    ("prompt", "\ud800"), ("logprobs", 21), ("logprobs", "all"), ("max_tokens", 511),
]  # fmt: skip

ONLY_CHAT: list[tuple[str, Any]] = [
    ("max_tokens", 0), ("max_completion_tokens", 0), ("max_completion_tokens", 512),
    ("messages", []), ("messages", "Hi"), ("messages", [1]), ("messages", [{"content": "x"}]),
    ("messages", [{"role": "user"}]), ("messages", CHAT["messages"] * 4097),
    ("messages", [{"role": "user", "content": "word " * 3000}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    ("messages", [{"role": "user", "content": "\ud800"}]),
    ("top_logprobs", 21), ("top_logprobs", 2), ("top_logprobs", -1),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 129), ("tools", [{}]),
    ("tools", "f"), ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]), ("function_call", {"name": "f"}), ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]), ("chat_template", "{{ messages }}"),
    ("chat_template", "/etc/passwd"), ("web_search_options", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("url", "body", "cases", "stream"),
    [
        ("/v1/completions", TEXT, BOTH + ONLY_TEXT, False),
        ("/v1/chat/completions", CHAT, BOTH + ONLY_CHAT, True),
        pytest.param("/v1/completions", TEXT, BOTH + ONLY_TEXT, True, marks=pytest.mark.slow),
        pytest.param("/v1/chat/completions", CHAT, BOTH + ONLY_CHAT, False, marks=pytest.mark.slow),
    ],
    ids=["completions", "streamed chat", "streamed completions", "chat"],
)
def test_bad_values_are_refused_with_the_field(
    api: TestClient, api_context: ApiContext, url: str, body: Any, cases: Any, stream: bool
) -> None:
    for field, value in cases:
        if field in ("stream", "stream_options") and stream:
            continue
        sent = {**body, field: value} | ({"stream": True} if stream else {})
        answer = api.post(url, content=dumped(sent), headers={"Content-Type": "application/json"})
        case = f"{field}: {str(value)[:60]!a}"
        assert answer.status_code == 400, (case, answer.text[:300])
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error", case
        assert re.split(r"[.\[]", error["param"])[0] == field, (case, error)
        assert len(error["message"]) > 15, case
        assert api_context.client.num_generated == 0, case
        assert api_context.num_open == 0, case


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()  # lone surrogates as escapes


def test_too_long_prompt_gives_context_length_exceeded(api: TestClient) -> None:
    for url, body in (
        ("/v1/completions", {"prompt": [1] * 512}),
        ("/v1/completions", {"prompt": [1] * 500, "max_tokens": 13}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 600}),
    ):
        error = api.post(url, json=body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "max_model_len" in error["message"]


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/chat/completions"])
def test_unknown_model_is_not_found(api: TestClient, url: str) -> None:
    body = TEXT if url == "/v1/completions" else CHAT
    answer = api.post(url, json=body | {"model": "gpt-9"})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"


def test_one_bad_prompt_refuses_the_whole_batch(api: TestClient, api_context: ApiContext) -> None:
    answer = api.post("/v1/completions", json={"prompt": [[1, 2], [1, 99_999]]})
    assert answer.status_code == 400
    assert "99999" in answer.json()["error"]["message"]
    assert api_context.client.num_generated == 0


def test_long_lists_are_limited_across_prompts(api: TestClient, api_context: ApiContext) -> None:
    """2 MB of ids for 256 prompts would block all clients for 12 seconds."""
    ids, words = list(range(900)) * 582, ["x" * 512] * 200
    for field, value, num_prompts in (("allowed_token_ids", ids, 2), ("bad_words", words, 2)):
        prompts = ["Hi"] * num_prompts
        answer = api.post("/v1/completions", json={"prompt": prompts, field: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert f"{num_prompts} prompts" in error["message"]
    assert api_context.client.num_generated == 0
    for field, value, num_prompts in (("allowed_token_ids", ids, 1), ("bad_words", ["no"], 60)):
        body = {"prompt": ["Hi"] * num_prompts, field: value, "max_tokens": 1}
        assert api.post("/v1/completions", json=body).status_code == 200
