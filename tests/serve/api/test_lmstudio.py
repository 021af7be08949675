"""LM Studio's REST API over HTTP, compared with OpenAI's endpoints.

Covers `serve/lmstudio/routes.py`, `serve/lmstudio/stats.py`.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from quire.serve.app import create_app
from tests.serve.api.conftest import MakeContext
from tests.serve.api.test_embeddings import serving_model
from tests.support.models.pooling_checkpoints import pooling_checkpoint
from tests.support.serve.fake_client import FakeClient

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HELLO, "temperature": 0, "max_tokens": 8},
    "completions": {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8},
}
ADDED = {"stats", "model_info", "runtime"}


@pytest.fixture(scope="module")
def shared(make_context: MakeContext) -> Iterator[TestClient]:
    with TestClient(create_app(make_context()), raise_server_exceptions=False) as client:
        yield client


def answered(response: Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("path", BODIES)
def test_response_is_openais_with_stats(shared: TestClient, path: str) -> None:
    plain = answered(shared.post(f"/v1/{path}", json=BODIES[path]))
    own = {"ttl": 300, "draft_model": "small"}
    found = answered(shared.post(f"/api/v0/{path}", json=BODIES[path] | own))
    assert found.keys() - plain.keys() == ADDED and plain["choices"] == found["choices"]
    stats = found["stats"]
    assert stats["stop_reason"] == "maxPredictedTokensReached"
    assert stats["tokens_per_second"] == pytest.approx(7 / stats["generation_time"], rel=0.01)
    assert stats["time_to_first_token"] > 0
    assert found["model_info"]["context_length"] == 512 and found["model_info"]["arch"]
    assert found["runtime"]["name"] == "quire"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 2])
def test_stream_sends_stats_with_the_last_finish_reason(
    shared: TestClient, path: str, n: int
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "n": n}
    text = shared.post(f"/api/v0/{path}", json=BODIES[path] | options | {"temperature": 1}).text
    *events, end = text.strip().split("\n\n")
    assert end == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    with_stats = [chunk for chunk in chunks if chunk.keys() >= ADDED]
    assert len(with_stats) == 1
    ends = [chunk for chunk in chunks for each in chunk["choices"] if each["finish_reason"]]
    assert len(ends) == n and ends[-1] == with_stats[0]
    assert chunks[-1]["usage"]["completion_tokens"] == 8 * n


def test_stop_reason_names_the_cause(shared: TestClient) -> None:
    def reason(**fields: Any) -> str:
        body = BODIES["completions"] | fields
        stats = answered(shared.post("/api/v0/completions", json=body))["stats"]
        return str(stats["stop_reason"])

    assert reason(stop=[" a"]) == "stopStringFound"
    assert reason(regex="yes") == "eosFound"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": HELLO, "tools": tools, "tool_choice": "required", "max_tokens": 60}
    found = answered(shared.post("/api/v0/chat/completions", json=body))
    if found["choices"][0]["finish_reason"] == "tool_calls":
        assert found["stats"]["stop_reason"] == "toolCalls"


def test_max_tokens_of_minus_one_fills_the_context(api: TestClient, api_context: Any) -> None:
    body = {"messages": HELLO, "max_tokens": -1, "stop": ["a", "e", "i"]}
    answered(api.post("/api/v0/chat/completions", json=body))
    request = api_context.client.requests[-1]
    assert request.params.max_tokens == 512 - len(request.prompt_token_ids)


def test_models_report_their_state(api: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    [model] = answered(api.get("/api/v0/models"))["data"]
    assert model["id"] == "demo" and model["type"] == "llm" and model["state"] == "loaded"
    assert model["max_context_length"] == 512 and model["compatibility_type"] == "safetensors"
    assert answered(api.get("/api/v0/models/demo")) == model
    monkeypatch.setattr(FakeClient, "is_alive", False)
    assert answered(api.get("/api/v0/models/demo"))["state"] == "not-loaded"
    missing = api.get("/api/v0/models/nobody")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"  # OpenAI's format, not Ollama's


@pytest.mark.parametrize("path", BODIES)
def test_errors_have_openais_format(shared: TestClient, path: str) -> None:
    for fields, param in (({"temperature": -1}, "temperature"), ({"regex": "("}, "regex")):
        response = shared.post(f"/api/v0/{path}", json=BODIES[path] | fields)
        assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert (
        shared.post(f"/api/v0/{path}", json={"model": "nobody"} | BODIES[path]).status_code == 404
    )


def test_embeddings_equal_openais() -> None:
    with serving_model(pooling_checkpoint("embed"), max_model_len=64) as client:
        body = {"input": ["a fox", "a dog"]}
        plain = answered(client.post("/v1/embeddings", json=body))["data"]
        assert answered(client.post("/api/v0/embeddings", json=body))["data"] == plain
        [model] = answered(client.get("/api/v0/models"))["data"]
        assert model["type"] == "embeddings"
