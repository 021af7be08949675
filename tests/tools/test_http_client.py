"""The client against servers that send byte by byte, too few bytes, or none."""

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.tools.http_client import EventParser, HttpClient, HttpError, Response
from tests.support.http_server import (
    LAST_CHUNK,
    Answer,
    Seen,
    Send,
    chunk,
    head,
    send_json,
    serving,
)

EVENTS = 'data: {"text": "grün 🌿"}\r\n\r\n: comment\n\ndata:a\ndata: b\nid: 7\n\ndata: [DONE]\n\n'
PAYLOADS = ['{"text": "grün 🌿"}', "a\nb"]


async def request(url: str, path: str, *more: Any, **options: Any) -> Response:
    """Send a request over its own connection."""
    client = HttpClient(url)
    try:
        return await client.request(path, *more, **options)
    finally:
        await client.close()


async def stream_json(url: str, path: str, body: Any) -> AsyncGenerator[str, None]:
    """Stream events over their own connection."""
    client = HttpClient(url)
    try:
        async with aclosing(client.stream_json(path, body)) as events:
            async for data in events:
                yield data
    finally:
        await client.close()


def run(coroutine: Coroutine[Any, Any, Any], timeout_s: float = 30.0) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(timeout_s):
            return await coroutine

    return asyncio.run(limited())


def stream_answer(size: int, chunk_size: int) -> Answer:
    """Answer with EVENTS in HTTP chunks of one size, written in pieces of another size."""
    data = EVENTS.encode()
    chunks = [chunk(data[i : i + chunk_size]) for i in range(0, len(data), chunk_size)]
    wire = head(kind="text/event-stream; charset=utf-8") + b"".join(chunks) + LAST_CHUNK

    async def answer(seen: Seen, send: Send) -> None:
        for i in range(0, len(wire), size):
            await send(wire[i : i + size])
            await asyncio.sleep(0)  # lets the client read this piece on its own

    return answer


@pytest.mark.parametrize("cut", range(len(EVENTS.encode()) + 1))
def test_events_may_be_split_at_any_byte(cut: int) -> None:
    data, parser = EVENTS.encode(), EventParser()
    assert parser.feed(data[:cut]) + parser.feed(data[cut:]) == [*PAYLOADS, "[DONE]"]


@pytest.mark.parametrize(("size", "chunk_size"), [(1, 1), (1, 1000), (7, 3), (10_000, 5)])
def test_streams_are_read_in_pieces_of_any_size(size: int, chunk_size: int) -> None:
    async def scenario() -> None:
        async with serving(stream_answer(size, chunk_size)) as server:
            client = HttpClient(server.url + "/base/", {"Authorization": "Bearer key"})
            for _ in range(2):
                events = client.stream_json("/v1/x", {"prompt": "ü"}, {"X-A": "b"})
                assert [data async for data in events] == PAYLOADS
            await client.close()
            first = server.seen[0]
            assert (first.method, first.path) == ("POST", "/base/v1/x")
            assert first.json() == {"prompt": "ü"}
            assert first.headers["authorization"] == "Bearer key"
            assert first.headers["x-a"] == "b"
            assert server.num_connections == 1  # reused

    run(scenario())


def test_whole_answers_are_read_byte_by_byte() -> None:
    wire = b"HTTP/1.1 100 Continue\r\n\r\n" + head(201, length=13) + b'{"a": [1, 2]}'

    async def answer(seen: Seen, send: Send) -> None:
        for i in range(len(wire)):
            await send(wire[i : i + 1])
            await asyncio.sleep(0)

    async def scenario() -> None:
        async with serving(answer) as server:
            response = await request(server.url, "/x", "PUT", b"raw")
            assert (response.status, response.json()) == (201, {"a": [1, 2]})
            assert response.headers["content-type"] == "application/json"
            assert server.seen[0].body == b"raw"

    run(scenario())


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, {"error": {"message": "max_tokens must be positive"}}, "400: max_tokens must be pos"),
        (422, {"detail": "no such field"}, "422: no such field"),
        (503, "busy", "503: busy"),
        (307, {}, "307: without a reason"),
    ],
)
def test_errors_contain_the_message_of_the_server(status: int, body: Any, words: str) -> None:
    async def answer(seen: Seen, send: Send) -> None:
        await send_json(send, body, status)

    async def scenario() -> None:
        async with serving(answer) as server:
            with pytest.raises(HttpError, match=words) as refused:
                await request(server.url, "/x")
            assert refused.value.status == status
            with pytest.raises(HttpError, match=words):
                [data async for data in stream_json(server.url, "/x", {})]

    run(scenario())


def test_answer_without_a_stream_is_one_payload() -> None:
    async def answer(seen: Seen, send: Send) -> None:
        await send_json(send, {"choices": []})

    async def scenario() -> None:
        async with serving(answer) as server:
            events = stream_json(server.url, "/x", {})
            assert [data async for data in events] == ['{"choices": []}']

    run(scenario())


def test_closing_a_stream_closes_the_connection() -> None:
    async def answer(seen: Seen, send: Send) -> None:
        await send(head(kind="text/event-stream") + chunk(b"data: 1\n\n"))
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with serving(answer) as server:
            async with aclosing(stream_json(server.url, "/x", {})) as events:
                assert await anext(events) == "1"
            await server.left.wait()

    run(scenario())


def test_truncated_stream_raises_after_its_events() -> None:
    async def answer(seen: Seen, send: Send) -> None:
        await send(head(kind="text/event-stream") + chunk(b"data: 1\n\n"))
        raise ConnectionError

    async def scenario() -> None:
        async with serving(answer) as server:
            received = []
            with pytest.raises(HttpError, match="broke before the answer was complete"):
                async for data in stream_json(server.url, "/x", {}):
                    received.append(data)
            assert received == ["1"]

    run(scenario())


def test_late_answer_raises_a_timeout() -> None:
    async def answer(seen: Seen, send: Send) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with serving(answer) as server:
            with pytest.raises(HttpError, match="did not answer within 0.01 s"):
                await request(server.url, "/x", timeout_s=0.01)

    run(scenario())


def test_missing_server_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(HttpError, match="nothing answers at .* is the server running") as error:
        run(request(f"http://127.0.0.1:{port}", "/x"))
    assert error.value.status == 0


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://host", "http://", "", "http://a:99999", "http://a:x", "http://[::1"],
)
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://127.0.0.1:8000"):
        HttpClient(url)


def test_invalid_header_is_refused() -> None:
    async def answer(seen: Seen, send: Send) -> None:
        await send_json(send, {})

    async def scenario() -> None:
        async with serving(answer) as server:
            with pytest.raises(HttpError, match="cannot be sent"):
                await request(server.url, "/x", headers={"X-A": "line\nbreak"})

    run(scenario())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_https_checks_the_certificate(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    files = ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def answer(seen: Seen, send: Send) -> None:
        await send_json(send, {"ok": True})

    async def scenario() -> None:
        async with serving(answer, context) as server:
            assert server.url.startswith("https:")
            with pytest.raises(HttpError, match="no secure connection"):
                await request(server.url, "/x")
            client = HttpClient(server.url, verify=False)
            assert (await client.request("/x")).json() == {"ok": True}
            await client.close()

    run(scenario())
