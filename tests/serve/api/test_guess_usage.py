"""Draft tokens in usage (`completion_tokens_details`), compared with the core's steps."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.base.events import Stepped
from quire.base.settings.config import ServerConfig, config_from_flat
from quire.engine.drafting.draft_pace import StepTimes
from quire.engine.start.build import build_engine
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from tests.support.serve.fake_client import FakeClient

TEXT = "one two three. one two three. one two three. one two"
MESSAGES = [{"role": "user", "content": TEXT}]
STEPS: list[Stepped] = []


@pytest.fixture(scope="module")
def api() -> Iterator[TestClient]:
    """A server that drafts whenever it can, however long steps take."""
    drafter = {"method": "ngram", "prompt_lookup_max": 1, "num_speculative_tokens": 3}
    config = config_from_flat(
        model="demo", max_num_seqs=8, max_model_len=256, kv_cache_memory_bytes=16 << 20,
        disable_log_stats=True, speculative_config=drafter,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTimes, "observe", lambda *_: None)
        engine = build_engine(config)
        engine.client.core.subscribe(lambda e: STEPS.append(e) if isinstance(e, Stepped) else None)
        client = FakeClient(engine)
        context = ApiContext(
            client, engine.renderer, engine.requests, ("demo",), ServerConfig(), 1_700_000_000
        )
        with TestClient(create_app(context)) as made:
            yield made
        engine.client.close()


def usage_of(api: TestClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    STEPS.clear()
    if not body.get("stream"):
        answer = api.post(path, json=body).json()
        assert "usage" in answer, answer
        usage: dict[str, Any] = answer["usage"]
        return usage
    lines = api.post(path, json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    usage = chunks[-1]["usage"]
    return usage


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_counts_accepted_and_rejected_draft_tokens(
    api: TestClient, path: str, stream: bool, n: int
) -> None:
    """A bias favours few tokens, so the text repeats itself. Sequences may end within drafts."""
    prompt = {"prompt": TEXT} if path == "/v1/completions" else {"messages": MESSAGES}
    body = prompt | {
        "model": "demo", "n": n, "max_tokens": 40, "seed": 5, "temperature": 2.0, "stream": stream,
        "logit_bias": {"40": 90, "41": 90, "42": 90, "13": 86}, "stop_token_ids": [13],
        "stream_options": {"include_usage": True} if stream else None,
    }  # fmt: skip
    usage = usage_of(api, path, body)
    details = usage["completion_tokens_details"]
    accepted, drafted = sum(s.num_accepted for s in STEPS), sum(s.num_draft_tokens for s in STEPS)
    found = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert found == (accepted, drafted - accepted) and drafted > 0
    assert usage["completion_tokens"] == sum(len(step.rows) for step in STEPS) + accepted


def test_nearly_all_drafts_of_a_certain_answer_are_accepted(api: TestClient) -> None:
    """A logit bias makes each token certain."""
    body = {"model": "demo", "prompt": TEXT, "max_tokens": 41, "temperature": 0.0}
    bias = {"logit_bias": {"40": 100}, "ignore_eos": True}
    details = usage_of(api, "/v1/completions", body | bias)["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 20
    assert details["rejected_prediction_tokens"] <= 3


def test_usage_excludes_only_drafts_after_a_stop_string(api: TestClient) -> None:
    body = {"model": "demo", "prompt": TEXT, "max_tokens": 60, "temperature": 0.0, "stop": ["two"]}
    usage = usage_of(api, "/v1/completions", body)
    details = usage.get("completion_tokens_details", {})
    accepted, drafted = sum(s.num_accepted for s in STEPS), sum(s.num_draft_tokens for s in STEPS)
    assert 0 <= accepted - details.get("accepted_prediction_tokens", 0) <= 3
    assert sum(details.values()) <= drafted


def test_usage_omits_draft_details_without_drafts(api: TestClient) -> None:
    body = {"model": "demo", "prompt": "Why", "max_tokens": 1}
    assert "completion_tokens_details" not in usage_of(api, "/v1/completions", body)
