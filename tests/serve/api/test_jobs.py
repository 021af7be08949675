"""Responses when a step fails on a request: a 500 with a code and the request id.

The engine is a real one, whose runner raises for prompts with the token POISON.
"""

import dataclasses
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.base.settings.config import ServerConfig
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from tests.serve.api.conftest import MODEL, small_engine
from tests.support.engine.failing_core import POISON, Troubled
from tests.support.serve.fake_client import FakeClient

HEADERS = {"X-Request-Id": "mine-42"}
POISONED = [5, 6, POISON, 8]
KINDS: list[dict[str, Any]] = [
    {},
    {"n": 2, "temperature": 0.9},
    {"n": 2, "best_of": 3, "temperature": 0.9},
    {"n": 2, "use_beam_search": True},
    {"prompt": [[5, 6, 7], POISONED]},
    {"prompt_logprobs": 1, "logprobs": 1},
]


@pytest.fixture(scope="module")
def troubled() -> Iterator[TestClient]:
    engine = small_engine(weight_cache="off")  # use torch, whose runner can be replaced
    executor = engine.client.core.executor
    executor._built = dataclasses.replace(executor._built, runner=Troubled(executor._built.runner))
    context = ApiContext(
        FakeClient(engine),
        engine.renderer,
        engine.requests,
        (MODEL,),
        ServerConfig(),
        1_700_000_000,
    )
    with TestClient(create_app(context), raise_server_exceptions=False) as client:
        yield client
    engine.client.close()


def assert_step_failed(error: dict[str, Any], name: str = "mine-42") -> None:
    assert error["code"] == "step_failed" and error["type"] == "server_error"
    assert name in error["message"], "the client cannot find its request in the log"
    assert "made to fail" not in error["message"], "a library's message belongs in the log"


@pytest.mark.parametrize("kind", KINDS)
def test_failed_step_gives_500_and_the_engine_keeps_running(
    troubled: TestClient, kind: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": POISONED, "max_tokens": 4} | kind
    with caplog.at_level(logging.ERROR, "quire"):
        answer = troubled.post("/v1/completions", json=body, headers=HEADERS)
    assert answer.status_code == 500 and answer.headers["X-Request-Id"] == "mine-42"
    assert_step_failed(answer.json()["error"])
    assert any("mine-42" in line and "made to fail" in line for line in caplog.messages)
    again = troubled.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 2})
    assert again.status_code == 200, "the engine must keep running"


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[4]])
def test_failed_step_in_a_stream_gives_an_error_event_or_500(
    troubled: TestClient, kind: dict[str, Any]
) -> None:
    """The error is an event if the stream has started, and otherwise the response."""
    body = {"prompt": POISONED, "max_tokens": 40, "stream": True} | kind
    answer = troubled.post("/v1/completions", json=body, headers=HEADERS)
    if answer.status_code == 200:
        lines = [line for line in answer.text.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        assert_step_failed(json.loads(lines[-2].removeprefix("data: "))["error"])
    else:
        assert answer.status_code == 500
        assert_step_failed(answer.json()["error"])


def test_failed_step_of_a_pinned_prefix_gives_500(troubled: TestClient) -> None:
    answer = troubled.post("/v1/prefixes", json={"prompt": POISONED}, headers=HEADERS)
    assert answer.status_code == 500
    assert_step_failed(answer.json()["error"])


def test_failed_step_of_an_open_prompt_keeps_the_connection(troubled: TestClient) -> None:
    """Only the request fails; the next one succeeds on the same connection."""
    with troubled.websocket_connect("/v1/stream") as line:
        for prompt in (POISONED, [5, 6, 7]):
            line.send_json({"type": "start", "prompt": prompt, "last": True, "max_tokens": 2})
            started = line.receive_json()
            assert started["type"] == "started"
            message = line.receive_json()
            if prompt is POISONED:
                assert message["type"] == "error"
                assert_step_failed(message["error"], started["id"])
                continue
            while message["type"] != "done":
                message = line.receive_json()


def test_request_that_allows_no_token_gives_400(troubled: TestClient) -> None:
    """The request is wrong; no step has failed."""
    wrong = {"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 2}
    answer = troubled.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 4} | wrong)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "request_failed")
    assert "leave no token" in error["message"]
