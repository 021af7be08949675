"""The size limit of bodies, the count of open requests, and the drain.

Most tests call the ASGI app directly, so that they control when each part of a request arrives.
"""

import asyncio
import http.client
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
import uvicorn
from fastapi import Depends, FastAPI
from starlette.responses import StreamingResponse
from starlette.testclient import TestClient
from starlette.types import Message

from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.serve.http.http import TimedProtocol
from quire.serve.http.limits import generating
from quire.serve.server import ApiServer
from tests.serve.api.conftest import MODEL, MakeContext, serving
from tests.support.serve.fake_client import FakeClient

LIMIT = 1024
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def small(make_context: MakeContext) -> Iterator[TestClient]:
    with TestClient(create_app(make_context(max_body_bytes=LIMIT))) as client:
        yield client


def body_of(num_bytes: int) -> bytes:
    return b'{"prompt": "' + b"a" * (num_bytes - 14) + b'"}'


def chunks(body: bytes, size: int = 100) -> Iterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


@pytest.mark.parametrize("in_chunks", [False, True])
def test_bodies_above_the_size_limit_give_413(small: TestClient, in_chunks: bool) -> None:
    """Both with a Content-Length, and in chunks that are counted as they arrive."""
    for num_bytes, status in ((LIMIT, 200), (LIMIT + 1, 413), (100 * LIMIT, 413)):
        body = body_of(num_bytes)
        content: Any = chunks(body) if in_chunks else body
        response = small.post("/tokenize", content=content, headers=JSON)
        assert response.status_code == status
    error = response.json()["error"]
    assert error["code"] == "body_too_large"
    assert f"larger than {LIMIT} bytes" in error["message"]
    assert "x-request-id" in response.headers


def test_huge_content_length_is_refused_before_the_body_is_sent(
    make_context: MakeContext,
) -> None:
    with serving(make_context(max_body_bytes=LIMIT)) as url:
        for length in ("9" * 12, "9" * 30):
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
            connection.putrequest("POST", "/tokenize")
            connection.putheader("Content-Length", length)
            connection.putheader("Expect", "100-continue")
            connection.endheaders()
            assert connection.getresponse().status in (400, 413)
            connection.close()


def test_client_reads_the_413_while_it_sends_a_large_body(make_context: MakeContext) -> None:
    """The client is still sending when the limit is reached; the connection must stay open."""
    with serving(make_context(max_body_bytes=1 << 20)) as url:
        for in_chunks in (False, True):
            body = body_of(3 << 20)
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
            content: Any = chunks(body, 1 << 16) if in_chunks else body
            connection.request("POST", "/tokenize", content, JSON, encode_chunked=in_chunks)
            assert connection.getresponse().status == 413
            connection.close()


class Exchange:
    """One request to an app; the test controls the client's side."""

    def __init__(self, app: FastAPI, path: str) -> None:
        self.sent: list[Message] = []
        self.first_chunk = asyncio.Event()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": [], "scheme": "http",
            "server": ("localhost", 80), "client": ("localhost", 1),
        }  # fmt: skip
        self.done = asyncio.create_task(app(scope, self._incoming.get, self._send))

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.first_chunk.set()


def streaming_app(context: ApiContext, proceed: asyncio.Event) -> FastAPI:
    """Return the app with a route that streams like a generating one, and one that fails."""
    app = create_app(context)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        await proceed.wait()
        yield b"two"

    @app.post("/stream", dependencies=[Depends(generating)])
    async def stream() -> StreamingResponse:
        return StreamingResponse(pieces())

    @app.post("/fail", dependencies=[Depends(generating)])
    async def fail() -> None:
        assert context.num_open == 1
        raise ZeroDivisionError("0x7f00dead")

    return app


@pytest.mark.parametrize("end", ["to its end", "client leaves"])
def test_stream_counts_as_open_until_it_ends(
    context_of: Callable[[], ApiContext], end: str
) -> None:
    async def run() -> None:
        context, proceed = context_of(), asyncio.Event()
        exchange = Exchange(streaming_app(context, proceed), "/stream")
        await exchange.first_chunk.wait()
        assert context.num_open == 1
        if end == "client leaves":
            exchange.leave()
        else:
            proceed.set()
        await exchange.done
        assert context.num_open == 0
        assert exchange.status == 200

    asyncio.run(asyncio.wait_for(run(), 30))


def test_drain_refuses_new_requests_and_finishes_open_ones(
    context_of: Callable[[], ApiContext],
) -> None:
    async def run() -> None:
        context, proceed = context_of(), asyncio.Event()
        app = streaming_app(context, proceed)
        open_one = Exchange(app, "/stream")
        await open_one.first_chunk.wait()
        context.draining = True
        refused = Exchange(app, "/stream")
        await refused.done
        assert refused.status == 503
        assert b"retry-after" in dict(refused.sent[0]["headers"])
        assert b"shutting down" in refused.sent[1]["body"]
        assert context.num_open == 1
        proceed.set()
        await open_one.done
        assert b"".join(message.get("body", b"") for message in open_one.sent) == b"onetwo"
        assert context.num_open == 0

    asyncio.run(asyncio.wait_for(run(), 30))


def test_generating_routes_are_counted_and_drained(
    server_context: ApiContext, server_url: str, openai_client: openai.OpenAI
) -> None:
    """The engine stops after the first tokens, so that the request stays open."""
    client, server = server_context.client, httpx.Client(base_url=server_url)
    assert isinstance(client, FakeClient)
    client.hold(after_steps=3)
    try:
        stream = openai_client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=8, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        assert server.get("/load").json() == {"server_load": 1}
        server_context.draining = True
        assert server.get("/ready").status_code == 503
        with pytest.raises(openai.InternalServerError) as caught:
            openai_client.completions.create(model=MODEL, prompt="Hello")
        assert caught.value.code == "draining"
        assert caught.value.response.headers["retry-after"]
        client.release()
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    finally:
        server_context.draining = False
        client.release()
        server.close()


def test_failed_handler_is_counted_as_ended_and_gives_500(
    context_of: Callable[[], ApiContext], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> Exchange:
        context = context_of()
        exchange = Exchange(streaming_app(context, asyncio.Event()), "/fail")
        await exchange.done
        assert context.num_open == 0
        return exchange

    exchange = asyncio.run(asyncio.wait_for(run(), 30))
    assert exchange.status == 500
    shown = dict(exchange.sent[0]["headers"])[b"x-request-id"]
    assert shown in exchange.sent[1]["body"]
    assert b"7f00dead" not in exchange.sent[1]["body"]
    assert "7f00dead" in caplog.text and shown.decode() in caplog.text


@pytest.fixture
def context_of(make_context: MakeContext) -> Callable[[], ApiContext]:
    return make_context


def test_incomplete_requests_time_out(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incomplete body gets a 408; an incomplete head gets no response."""
    monkeypatch.setattr("quire.serve.http.limits.BODY_S", 0.05)
    monkeypatch.setattr("quire.serve.http.http.HEAD_S", 0.05)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    config = uvicorn.Config(
        create_app(make_context()), http=TimedProtocol, lifespan="off", log_config=None
    )

    async def run() -> list[bytes]:
        sock = socket.create_server(("127.0.0.1", 0))
        server = ApiServer(config)
        serving = asyncio.create_task(server.serve([sock]))
        answers = []
        for data in (b"", head, head + b"Content-Length: 100\r\n\r\n{"):
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(data)
            answers.append(await reader.read())
            writer.close()
        server.should_exit = True
        await serving
        return answers

    nothing, half, body = asyncio.run(asyncio.wait_for(run(), 30))
    assert nothing == half == b""
    assert body.startswith(b"HTTP/1.1 408 ") and b'"code": "body_timeout"' in body
