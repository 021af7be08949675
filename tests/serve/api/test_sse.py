"""Concurrent streams, clients that disconnect, and errors in the middle of a stream."""

import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from starlette.testclient import TestClient

from quire.serve.context import ApiContext
from tests.serve.api.conftest import MakeContext, serving, small_engine
from tests.support.processes.servers import wait_until
from tests.support.serve.direct_engine import direct
from tests.support.serve.fake_client import FakeClient

LONG = {"prompt": "Once upon a time", "max_tokens": 450, "temperature": 0, "ignore_eos": True}
CHAT = {
    "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 400,
    "temperature": 0, "ignore_eos": True,
}  # fmt: skip
MANY = LONG | {"prompt": ["Once upon a time", "The cat", "A boat", "Why"]}
REQUESTS = [("/v1/completions", LONG), ("/v1/completions", MANY), ("/v1/chat/completions", CHAT)]


@pytest.fixture
def held(server_context: ApiContext) -> Iterator[FakeClient]:
    """The server's client, for tests that stop the engine. Afterwards it runs, idle."""
    client = server_context.client
    yield client
    client.revive()
    client.release()
    wait_until(lambda: client.num_unfinished == 0 and server_context.num_open == 0)


def open_connection(url: str, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
    """Send a request without reading its response."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def hang_up(connection: http.client.HTTPConnection) -> None:
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def events(lines: Iterator[str]) -> list[Any]:
    """Return the events, decoded; [DONE] stays a text."""
    data = [line.removeprefix("data: ") for line in lines if line]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_concurrent_streams_do_not_mix(openai_client: openai.OpenAI) -> None:
    """Twenty streams on eight rows; seed and tokens identify each prompt."""
    prompts = [[100 + 7 * i, 200 + i, 300 + 3 * i] for i in range(20)]
    options = [{"max_tokens": 8 + i, "seed": i, "temperature": 0.8} for i in range(20)]

    def run(index: int) -> list[int]:
        stream = openai_client.completions.create(
            model="demo", prompt=prompts[index], stream=True, top_p=1, **options[index],
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        return [i for chunk in stream for i in chunk.choices[0].model_extra["token_ids"]]

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(run, range(20)))
    for index, token_ids in enumerate(found):
        alone = direct(prompts[index], ignore_eos=True, **options[index])
        assert token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_disconnect_during_a_stream_aborts_its_requests(
    server_url: str, server_context: ApiContext, held: FakeClient, path: str, body: dict[str, Any]
) -> None:
    aborted = held.num_aborted
    connection = open_connection(server_url, path, body | {"stream": True})
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    held.hold()
    num_open = held.num_unfinished
    assert num_open >= 1
    hang_up(connection)
    wait_until(lambda: held.num_unfinished == 0)
    wait_until(lambda: server_context.num_open == 0)
    assert held.num_aborted == aborted + num_open


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_disconnect_before_the_response_aborts_its_requests(
    server_url: str, server_context: ApiContext, held: FakeClient, path: str,
    body: dict[str, Any], stream: bool,
) -> None:  # fmt: skip
    """No token was generated, so no write can fail and reveal the disconnect."""
    held.hold()
    aborted = held.num_aborted
    connection = open_connection(server_url, path, body | {"stream": stream})
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    wait_until(lambda: held.num_unfinished == num_prompts)
    hang_up(connection)
    wait_until(lambda: held.num_unfinished == 0)
    wait_until(lambda: server_context.num_open == 0)
    assert held.num_aborted == aborted + num_prompts


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_stream_sends_headers_before_the_first_token(
    server_url: str, held: FakeClient, path: str, body: dict[str, Any]
) -> None:
    held.hold()
    connection = open_connection(server_url, path, body | {"stream": True})
    answer = connection.getresponse()  # before anything is generated
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    held.release()
    assert answer.readline().startswith(b"data: {")
    hang_up(connection)


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_failure_between_headers_and_first_token_is_an_event(
    server_url: str, held: FakeClient, path: str, body: dict[str, Any]
) -> None:
    held.hold()
    answer = open_connection(server_url, path, body | {"stream": True})
    answer = answer.getresponse()
    held.kill()
    error, done = events(line.decode().strip() for line in answer.readlines())
    assert error["error"]["code"] == "engine_dead" and done == "[DONE]"


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_engine_death_ends_a_stream_with_an_error(
    server_url: str, held: FakeClient, path: str, body: dict[str, Any]
) -> None:
    connection = open_connection(server_url, path, body | {"stream": True})
    answer = connection.getresponse()
    first = answer.readline()
    held.hold()
    held.kill()
    *_, error, done = events(line.decode().strip() for line in answer.readlines())
    assert first.startswith(b"data: ")
    assert error["error"]["code"] == "engine_dead"
    assert done == "[DONE]"


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_failed_request_ends_its_stream_with_an_error(
    server_url: str, held: FakeClient, path: str, body: dict[str, Any]
) -> None:
    connection = open_connection(server_url, path, body | {"stream": True})
    answer = connection.getresponse()
    answer.readline()
    held.fail("token 7 made the step fail")
    *_, error, done = events(line.decode().strip() for line in answer.readlines())
    assert (error["error"]["code"], done) == ("request_failed", "[DONE]")
    assert "token 7 made the step fail" in error["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_request_failure_before_the_first_token_is_a_400(
    server_url: str, held: FakeClient, path: str, body: dict[str, Any], stream: bool
) -> None:
    held.hold()
    connection = open_connection(server_url, path, body | {"stream": stream})
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    wait_until(lambda: held.num_unfinished == num_prompts)
    held.fail("token 7 made the step fail")
    answer = connection.getresponse()
    error = json.load(answer)["error"]
    assert (answer.status, error["code"]) == (400, "request_failed")
    assert "token 7 made the step fail" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_dead_engine_is_a_503(
    api: TestClient, api_context: ApiContext, path: str, body: dict[str, Any], stream: bool
) -> None:
    api_context.client.kill()
    answer = api.post(path, json=body | {"stream": stream})
    assert answer.status_code == 503
    assert "Retry-After" in answer.headers
    assert api_context.num_open == 0


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_stream_has_sse_headers_and_framing(
    api: TestClient, path: str, body: dict[str, Any]
) -> None:
    answer = api.post(path, json=body | {"stream": True, "max_tokens": 5})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.text.endswith("\n\ndata: [DONE]\n\n")
    parts = answer.text.split("\n\n")
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])


def test_open_requests_are_counted_until_the_response_ends(
    server_url: str, server_context: ApiContext, held: FakeClient
) -> None:
    held.hold()
    connection = open_connection(server_url, "/v1/completions", LONG | {"max_tokens": 3})
    wait_until(lambda: server_context.num_open == 1)
    held.release()
    assert connection.getresponse().status == 200
    wait_until(lambda: server_context.num_open == 0)


def test_silent_stream_sends_keep_alive_comments(make_context: MakeContext) -> None:
    """Comments are sent while the engine takes no step; event readers ignore them."""
    context = make_context(sse_keep_alive_interval=0.02)
    client = context.client = FakeClient(small_engine())
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "stream": True}
    with serving(context) as url:
        client.hold(after_steps=2)
        connection = open_connection(url, "/v1/completions", body)
        response, lines = connection.getresponse(), list[bytes]()
        while lines.count(b": the answer goes on\n") < 3:
            lines.append(response.readline())
        client.release()
        lines += response.readlines()
        connection.close()
    data = [line for line in lines if line.startswith(b"data: ")]
    assert data[-1] == b"data: [DONE]\n"
    assert [line for line in lines if line.strip() and line not in data] == [
        b": the answer goes on\n"
    ] * lines.count(b": the answer goes on\n")
    assert len([line for line in data if b'"finish_reason":"length"' in line]) == 1
    client.engine.client.close()
