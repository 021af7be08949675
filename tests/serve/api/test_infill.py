"""`suffix` of /v1/completions."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.render import infill
from quire.render.infill import InfillTokens
from quire.serve.context import ApiContext
from tests.support.serve.fake_client import FakeClient

BODY = {"prompt": "def f(x):", "suffix": "print(f(2))", "max_tokens": 3, "temperature": 0}


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch, api_context: ApiContext) -> ApiContext:
    """The demo model, whose tokens for other things now stand for these."""
    names = InfillTokens("<|im_start|>", "<tool_call>", "</tool_call>", ("<|im_end|>", "<|pad|>"))
    monkeypatch.setattr(infill, "FAMILIES", (names,))
    return api_context


def test_the_model_is_asked_for_what_stands_between(able: ApiContext, api: TestClient) -> None:
    tok, client = able.renderer.tokenizer, able.client
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
def test_what_does_not_go(
    able: ApiContext, api: TestClient, fields: dict[str, Any], param: str
) -> None:
    answer = api.post("/v1/completions", json=BODY | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_model_without_such_tokens(api: TestClient) -> None:
    answer = api.post("/v1/completions", json=BODY)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_value"
    assert api.post("/v1/completions", json=BODY | {"suffix": ""}).status_code == 200
