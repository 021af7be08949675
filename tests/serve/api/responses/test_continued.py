"""Responses that continue retained tokens: the same output, without rendering or computing the
earlier turns again. If the tokens are not retained, or do not fit, all turns are rendered.

Covers `serve/responses/earlier.py`.
"""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from quire.base.messages import Request
from quire.serve.context import ApiContext

FIRST = "Tell me a story about a fox."
SECOND = "And a bear?"
GREEDY = {"model": "demo", "temperature": 0, "max_output_tokens": 24}


@pytest.fixture(autouse=True)
def release_retained(api_context: ApiContext) -> Iterator[None]:
    yield
    client: Any = api_context.client
    for held in client.engine.client.held():
        client.engine.client.keep(held.id, 0.0)


def post(api: TestClient, **body: Any) -> Any:
    answer = api.post("/v1/responses", json=GREEDY | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def last_request(api_context: ApiContext) -> Request:
    client: Any = api_context.client
    found: Request = client.requests[-1]
    return found


def two_turns(api: TestClient, **first: Any) -> tuple[Any, Any]:
    one = post(api, input=FIRST, **first)
    return one, post(api, input=SECOND, previous_response_id=one["id"])


def test_turn_continues_retained_tokens(api: TestClient, api_context: ApiContext) -> None:
    _, expected = two_turns(api)
    rendered = last_request(api_context)
    assert rendered.fork is None
    client: Any = api_context.client
    client.engine.client.reset_prefix_cache()
    one, other = two_turns(api, keep_s=60)
    request = last_request(api_context)
    assert request.fork is not None and request.fork.request_id == one["id"]
    assert request.prompt_token_ids == rendered.prompt_token_ids
    assert other["output"][0]["content"] == expected["output"][0]["content"]
    cached = other["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == request.fork.num_tokens - 1


@pytest.mark.parametrize(
    "change",
    [
        {"instructions": "You are a bear."},
        {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]},
        {"cache_salt": "other"},
        {"input": [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on"}]},
    ],
)
def test_turn_with_a_changed_beginning_is_rendered(
    api: TestClient, api_context: ApiContext, change: dict[str, Any]
) -> None:
    one = post(api, input=FIRST, keep_s=60)
    body = {"input": SECOND, "previous_response_id": one["id"]} | change
    post(api, **body)
    assert last_request(api_context).fork is None


def test_turn_without_retained_tokens_is_rendered(api: TestClient, api_context: ApiContext) -> None:
    one = post(api, input=FIRST, keep_s=60)
    assert api.delete(f"/v1/requests/{one['id']}").status_code == 200
    post(api, input=SECOND, previous_response_id=one["id"])
    assert last_request(api_context).fork is None


def test_openai_client_continues_retained_responses(openai_client: openai.OpenAI) -> None:
    more: Any = GREEDY | {"extra_body": {"keep_s": 60}}
    one = openai_client.responses.create(input=FIRST, **more)
    other = openai_client.responses.create(input=SECOND, previous_response_id=one.id, **more)
    third = openai_client.responses.create(input="Why?", previous_response_id=other.id, **more)
    assert one.output_text and other.output_text and third.output_text
    assert third.usage is not None and other.usage is not None
    cached = third.usage.input_tokens_details.cached_tokens
    assert cached >= other.usage.total_tokens - 1, "all but the last token"
    held = openai_client.get("/requests", cast_to=object)
    assert len(held["data"]) == 3  # type: ignore[index]
