"""--enable-per-request-metrics: response times from the client's and the engine's clocks."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.serve.app import create_app
from tests.serve.api.conftest import MakeContext

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True}
TEXT = {"prompt": "Once", "max_tokens": 4, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
def test_metrics_are_in_the_response_only_if_enabled(
    make_context: MakeContext, path: str, body: dict[str, Any], api: TestClient
) -> None:
    assert "metrics" not in api.post(path, json=body).json()
    with TestClient(create_app(make_context(enable_per_request_metrics=True))) as client:
        metrics = client.post(path, json=body).json()["metrics"]
        assert min(metrics[f"{name}_ms"] for name in ("time_to_first_token", "generation_time")) > 0
        assert 0 <= metrics["queue_time_ms"] <= metrics["time_to_first_token_ms"]
        assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 3, abs=1e-3)
        assert metrics["tokens_per_second"] == pytest.approx(
            1000 / metrics["mean_itl_ms"], rel=0.05
        )
        streamed = client.post(
            path, json=body | {"stream": True, "stream_options": {"include_usage": True}}
        ).text
        events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line[6:7] == "{"]
        assert [event for event in events if "metrics" in event] == [events[-1]]
        assert events[-1]["metrics"].keys() == metrics.keys()


def test_mean_latency_needs_two_tokens_and_one_prompt(make_context: MakeContext) -> None:
    with TestClient(create_app(make_context(enable_per_request_metrics=True))) as client:
        metrics = client.post("/v1/completions", json=TEXT | {"max_tokens": 1}).json()["metrics"]
        assert (metrics["mean_itl_ms"], metrics["tokens_per_second"]) == (None, None)
        two = client.post("/v1/completions", json=TEXT | {"n": 2, "temperature": 1}).json()[
            "metrics"
        ]
        assert two["mean_itl_ms"] == pytest.approx(two["generation_time_ms"] / 3, abs=1e-3)
        many = client.post("/v1/completions", json=TEXT | {"prompt": ["a", "b"]}).json()
        assert "metrics" not in many
