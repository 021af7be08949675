"""Full queues (503 with Retry-After), timeouts (408), and the tenant of a request."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from quire.base.messages import Request
from quire.engine.attachments.queue_limit import QueueLimit
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.serve.http.auth import tenant_of
from tests.serve.api.conftest import MakeContext
from tests.serve.api.test_sse import CHAT, LONG, REQUESTS, events, held, open_connection
from tests.support.processes.servers import wait_until
from tests.support.serve.fake_client import FakeClient

__all__ = ["held"]  # a fixture
REASON = "the request took longer than its timeout_s=2 (2.010 s, 0 output tokens); raise timeout_s."


@pytest.fixture
def busy(held: FakeClient) -> Iterator[FakeClient]:
    """An engine that takes no steps. One request may wait, in addition to those with a row."""
    held.hold()
    core = held.engine.client.core
    limit = QueueLimit(core.scheduler, 1)
    core.attach(limit)
    yield held
    core.detach(limit)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_full_queue_gives_503(server_url: str, busy: FakeClient, path: str, stream: bool) -> None:
    body = (LONG if path == "/v1/completions" else CHAT) | {"stream": stream, "max_tokens": 20}
    rows = busy.ready.max_num_seqs
    waiting = [open_connection(server_url, path, body) for _ in range(rows + 1)]
    wait_until(lambda: busy.num_unfinished == rows + 1)
    answer = open_connection(server_url, path, body).getresponse()
    assert answer.status == 503
    assert int(answer.headers["Retry-After"]) >= 1
    [error] = events(iter([answer.read().decode()]))
    assert error["error"]["code"] == "engine_busy"
    assert error["error"]["type"] == "server_error"
    assert "max_num_queued_reqs is 1" in error["error"]["message"]
    busy.release()
    assert [connection.getresponse().status for connection in waiting] == [200] * (rows + 1)
    for connection in waiting:
        connection.close()


def test_openai_client_retries_after_503(server_url: str, busy: FakeClient) -> None:
    """The client's own retry of the refused request succeeds."""
    rows = busy.ready.max_num_seqs
    short = LONG | {"max_tokens": 5}
    waiting = [open_connection(server_url, "/v1/completions", short) for _ in range(rows + 1)]
    wait_until(lambda: busy.num_unfinished == rows + 1)
    refused = 0

    def release_after_refusal(response: Any) -> None:
        nonlocal refused
        refused += response.status_code == 503
        busy.release()

    http = openai.DefaultHttpxClient(event_hooks={"response": [release_after_refusal]})
    url = f"{server_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", http_client=http, max_retries=20) as client:
        answer = client.completions.create(model="demo", prompt="Hi", max_tokens=2)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert refused >= 1
    for connection in waiting:
        connection.getresponse().read()
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_timeout_before_the_first_token_gives_408(
    server_url: str, held: FakeClient, path: str, body: dict[str, Any], stream: bool
) -> None:
    held.hold()
    prompts = body.get("prompt")
    num = len(prompts) if isinstance(prompts, list) else 1
    connection = open_connection(server_url, path, body | {"stream": stream, "timeout_s": 2})
    wait_until(lambda: held.num_unfinished == num)
    assert {request.timeout_s for request in held.requests[-num:]} == {2.0}
    held.fail(REASON, "timeout")
    answer = connection.getresponse()
    assert answer.status == 408
    assert answer.headers["x-should-retry"] == "false"
    [error] = events(iter([answer.read().decode()]))
    assert error == {
        "error": {
            "message": REASON,
            "type": "timeout_error",
            "param": "timeout_s",
            "code": "request_timeout",
        }
    }


def test_timeout_in_a_stream_sends_an_error_event(server_url: str, held: FakeClient) -> None:
    held.hold(after_steps=4)
    body = LONG | {"stream": True, "timeout_s": 2}
    answer = open_connection(server_url, "/v1/completions", body).getresponse()
    assert answer.status == 200
    assert answer.readline().startswith(b"data: ")
    held.fail(REASON, "timeout")
    *_, error, done = events(line.decode().strip() for line in answer.readlines())
    assert (error["error"]["code"], done) == ("request_timeout", "[DONE]")
    wait_until(lambda: held.num_unfinished == 0)


def test_openai_client_does_not_retry_after_408(server_url: str, held: FakeClient) -> None:
    held.hold()
    before = held.num_generated
    with (
        openai.OpenAI(base_url=f"{server_url}/v1", api_key="none") as client,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(client.completions.create, model="demo", prompt="Hi", max_tokens=9)
        wait_until(lambda: held.num_unfinished == 1)
        held.fail(REASON, "timeout")
        with pytest.raises(openai.APIStatusError) as late:
            answer.result(timeout=30)
    assert late.value.status_code == 408
    assert held.num_generated == before + 1


# ---- tenants -----------------------------------------------------------------------------------


def sent(api: TestClient, context: ApiContext, headers: dict[str, str], **fields: Any) -> Request:
    """Send a completion, and return the request that the engine gets."""
    body = {"prompt": "Hi", "max_tokens": 1, **fields}
    assert api.post("/v1/completions", json=body, headers=headers).status_code == 200
    assert isinstance(context.client, FakeClient)
    return context.client.requests[-1]


def test_without_keys_the_user_is_the_tenant(api: TestClient, api_context: ApiContext) -> None:
    assert sent(api, api_context, {}).tenant == ""
    assert sent(api, api_context, {}, user="").tenant == ""
    ann = sent(api, api_context, {}, user="ann@example.org").tenant
    assert ann.startswith("user ") and "ann" not in ann
    assert sent(api, api_context, {}, user="ann@example.org", seed=3).tenant == ann
    assert sent(api, api_context, {}, user="bob").tenant != ann
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    assert api.post("/v1/chat/completions", json=chat | {"user": "ann@example.org"}).is_success
    assert isinstance(api_context.client, FakeClient)
    assert api_context.client.requests[-1].tenant == ann


def test_with_keys_the_key_is_the_tenant_and_user_is_ignored(make_context: MakeContext) -> None:
    context = make_context(api_key=("first-key", "second-key"))
    with TestClient(create_app(context)) as api:
        for key, tenant in (("first-key", "key 1"), ("second-key", "key 2")):
            headers = {"Authorization": f"Bearer {key}"}
            assert sent(api, context, headers).tenant == tenant
            assert sent(api, context, headers, user="ann").tenant == tenant


def test_user_of_any_text_gives_a_tenant() -> None:
    scope = {"headers": []}
    assert tenant_of(scope, (), "\ud800").startswith("user ")
    assert tenant_of(scope, (), None) == ""
