"""The field `suffix` of /v1/completions: fill in the middle."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.render import infill
from quire.render.infill import InfillTokens
from quire.serve.context import ApiContext
from tests.support.serve.fake_client import FakeClient

BODY = {"prompt": "def f(x):", "suffix": "print(f(2))", "max_tokens": 3, "temperature": 0}


@pytest.fixture
def with_infill(monkeypatch: pytest.MonkeyPatch, api_context: ApiContext) -> ApiContext:
    """The demo model, with some of its other special tokens as infill tokens."""
    names = InfillTokens("<|im_start|>", "<tool_call>", "</tool_call>", ("<|im_end|>", "<|pad|>"))
    monkeypatch.setattr(infill, "FAMILIES", (names,))
    return api_context


def test_suffix_builds_an_infill_prompt(with_infill: ApiContext, api: TestClient) -> None:
    tok, client = with_infill.renderer.tokenizer, with_infill.client
    assert tok is not None and isinstance(client, FakeClient)
    first, between, last, end = (
        tok.token_id(name) for name in ("<|im_start|>", "<tool_call>", "</tool_call>", "<|im_end|>")
    )
    answer = api.post("/v1/completions", json=BODY | {"stop_token_ids": [7]}).json()
    before, after = (tok.encode(BODY[name]) for name in ("prompt", "suffix"))  # type: ignore[arg-type]
    request = client.requests[-1]
    assert request.prompt_token_ids == [first, *before, between, *after, last]
    assert {7, end} <= set(request.stop_token_ids)
    assert answer["usage"]["prompt_tokens"] == len(before) + len(after) + 3
    many = {"prompt": ["a", "b"], "ignore_eos": True}
    assert len(api.post("/v1/completions", json=BODY | many).json()["choices"]) == 2
    assert end not in client.requests[-1].stop_token_ids
    ids = api.post("/v1/completions", json=BODY | {"prompt": before})
    assert ids.status_code == 200
    assert client.requests[-1].prompt_token_ids == request.prompt_token_ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"suffix": 5}, "suffix"),
        ({"suffix": "x y " * 5000}, "suffix"),
        ({"prompt": []}, "prompt"),
    ],
)
def test_invalid_infill_requests_are_refused(
    with_infill: ApiContext, api: TestClient, fields: dict[str, Any], param: str
) -> None:
    answer = api.post("/v1/completions", json=BODY | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_suffix_needs_a_model_with_infill_tokens(api: TestClient) -> None:
    answer = api.post("/v1/completions", json=BODY)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_value"
    assert api.post("/v1/completions", json=BODY | {"suffix": ""}).status_code == 200
