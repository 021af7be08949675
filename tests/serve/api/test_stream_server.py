"""/v1/stream through uvicorn: real connections, and the example client of the documentation."""

import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from quire.serve.context import ApiContext
from tests.serve.api.conftest import MakeContext, serving
from tests.support.processes.servers import wait_until
from tests.support.serve.direct_engine import text_of

DOCUMENT = Path(__file__).parents[3] / "docs" / "use" / "streaming.md"
STORY = "Once upon a time, there was a little fox. It lived in the woods, and one day it"
START = {"type": "start", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
HANDSHAKE = (
    "Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.fixture
def ws(server_url: str) -> Iterator[ClientConnection]:
    with open_stream(server_url) as found:
        yield found


def open_stream(url: str, **options: Any) -> ClientConnection:
    return connect(f"ws://{urlsplit(url).netloc}/v1/stream", **options)


def send(ws: ClientConnection, **fields: Any) -> None:
    ws.send(json.dumps(fields))


def text(ws: ClientConnection) -> str:
    found = ""
    for data in ws:
        message = json.loads(data)
        if message["type"] == "done":
            return found
        assert message["type"] in ("started", "chunk"), message
        found += "".join(choice["text"] for choice in message.get("choices", []))
    raise AssertionError("the connection was closed")


def frame(opcode: int, data: bytes) -> bytes:
    """Return a frame of a client, with a mask of zeros. opcode: has 0x80 set in the last frame."""
    return bytes([opcode, 0x80 | len(data)]) + b"\0\0\0\0" + data


def test_prompt_in_pieces_gives_the_same_text(ws: ClientConnection) -> None:
    for cut in (3, 9, 40):
        send(ws, **START, prompt=STORY[:cut])
        send(ws, type="append", prompt=STORY[cut:])
        send(ws, type="end")
        assert text(ws) == text_of(STORY, max_tokens=12, ignore_eos=True)


def test_documented_client_works(server_url: str) -> None:
    [source] = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert len(source.splitlines()) <= 25
    source = source.replace("127.0.0.1:8000", urlsplit(server_url).netloc)
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    prompt = "Once upon a time there was a fox named Anna. One morning Anna went to the forest."
    assert done.stdout.startswith(text_of(prompt, max_tokens=40))
    assert "prompt_tokens" in done.stdout


def test_too_large_message_closes_the_connection(make_context: MakeContext) -> None:
    context = make_context(max_body_bytes=2048)
    with serving(context) as url, open_stream(url) as ws:
        send(ws, **START, prompt="x" * 1900)
        ws.send(b"{" * 3000, text=True)
        with pytest.raises(ConnectionClosed) as closed:
            for _ in range(2):
                ws.recv()
        assert closed.value.rcvd.code == 1009
        wait_until(lambda: context.num_open == 0)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([(0x81, b"\xff\xfe")], 1007),
        ([(0x01, b"\xe4\xbd"), (0x80, b"\xff")], 1007),
        ([(0x01, b"\xe4\xbd"), (0x80, b"")], 1007),
        ([(0x81, b"\xff"), (0x81, b"\xff"), (0x88, b"\x03\xe8")], 1000),
    ],
)
def test_invalid_utf8_closes_the_connection(
    ws: ClientConnection,
    frames: list[tuple[int, bytes]],
    code: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In one frame or in several. A close frame sent along with it takes precedence."""
    ws.socket.sendall(b"".join(frame(*item) for item in frames))
    with pytest.raises(ConnectionClosed) as closed:
        ws.recv()
    assert closed.value.rcvd.code == code
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_frames_may_split_a_character(ws: ClientConnection) -> None:
    message = {"type": "start", "prompt": "你好 世界", "max_tokens": 3, "last": True}
    data = json.dumps(message, ensure_ascii=False).encode()
    cut = data.index("好".encode()) + 1
    ws.socket.sendall(frame(0x01, data[:cut]) + frame(0x80, data[cut:]))
    text(ws)


@pytest.mark.parametrize(
    "head",
    [
        "GET /v1/stream HTTP/1.1\r\n" + HANDSHAKE + "X: a\r\n" * 200,
        "GET /v1/stream HTTP/1.1\r\n" + HANDSHAKE + f"X: {'a' * 12_000}\r\n",
        "GET /v1/stream HTTP/1.1\r\n" + HANDSHAKE + "Content-Length: 3\r\n",
        "GET /v1/stream HTTP/1.1\r\n" + HANDSHAKE.replace("13", "8"),
        "POST /v1/stream HTTP/1.1\r\n" + HANDSHAKE,
        "POST /v1/stream HTTP/1.1\r\n" + HANDSHAKE + "Content-Length: 3\r\n",
        "GET /health HTTP/1.1\r\n" + HANDSHAKE,
    ],
)
def test_bad_handshakes_are_refused(
    server_url: str, head: str, caplog: pytest.LogCaptureFixture
) -> None:
    address = urlsplit(server_url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as raw:
        raw.sendall(head.encode() + b"\r\n")
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        assert answer.status in (400, 403, 405)
        answer.read()
        assert raw.recv(1) == b""
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_wrong_key_or_origin_refuses_the_handshake(
    make_context: MakeContext, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(make_context(api_key=("one",))) as url:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer two"}, 401),
            ({"Authorization": "Bearer one", "Origin": "https://evil.example"}, 403),
        ):
            with (
                pytest.raises(InvalidStatus) as refused,
                open_stream(url, additional_headers=headers),
            ):
                pass
            assert refused.value.response.status_code == status
            assert json.loads(refused.value.response.body)["error"]["message"]
        with open_stream(url, additional_headers={"Authorization": "Bearer one"}) as ws:
            send(ws, **START, prompt=STORY, last=True)
            text(ws)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("is_last", [False, True])
def test_lost_connection_ends_its_request(
    server_url: str, server_context: ApiContext, is_last: bool
) -> None:
    client = server_context.client
    client.hold()
    with contextlib.closing(open_stream(server_url, legacy=True)) as ws:
        send(ws, **START, prompt=STORY, last=is_last)
        wait_until(lambda: client.num_unfinished == 1)
        ws.socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: client.num_unfinished == 0 and server_context.num_open == 0)
    client.release()


def test_head_timeout_applies_only_to_the_handshake(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a handshake times out; an established connection stays open."""
    monkeypatch.setattr("quire.serve.http.http.HEAD_S", 0.2)
    with serving(make_context()) as url, open_stream(url) as ws:
        address = urlsplit(url)
        for before in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            with socket.create_connection((address.hostname, address.port), timeout=30) as half:
                half.sendall(before + f"GET /v1/stream HTTP/1.1\r\n{HANDSHAKE}".encode())
                while half.recv(1000):
                    pass
        send(ws, **START, prompt=STORY, last=True)
        text(ws)
