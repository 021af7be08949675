"""Input that could be read as two different requests is refused, and its connection closed."""

import contextlib
import json
import socket
from urllib.parse import urlsplit

import pytest

from quire.serve.context import ApiContext
from quire.serve.http.http import MAX_CHUNKS, MAX_HEAD_BYTES
from tests.support.processes.servers import wait_until

JSON = b"Host: localhost\r\nContent-Type: application/json\r\n"
POST = b"POST /tokenize HTTP/1.1\r\n" + JSON
BODY = b'{"prompt": "a"}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


def exchange(url: str, data: bytes) -> bytes:
    """Send the data and one more request; return all that the server sends until it closes."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as raw:
        found = b""
        try:
            raw.sendall(data + SMUGGLED)
            while piece := raw.recv(1 << 16):
                found += piece
        except ConnectionResetError:  # closed before it had read all our bytes
            pass
        return found


def padded(num_bytes: int) -> bytes:
    """Return the head of a request, of `num_bytes` bytes."""
    head = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: %s\r\n\r\n"
    return head % (b"a" * (num_bytes - len(head) + 2))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS, "both Content-Length and Transfer-Encoding"),
        (POST + CHUNKED + LENGTH + b"\r\n" + CHUNKS, "both Content-Length and Transfer-Encoding"),
        (POST + LENGTH + LENGTH + b"\r\n" + BODY, "more than one Content-Length"),
        (POST + LENGTH + b"content-length: 3\r\n\r\n" + BODY, "more than one Content-Length"),
        (POST + b"Content-Length: 15, 15\r\n\r\n" + BODY, "more than one Content-Length"),
        (POST + b"Content-Length: 15,3\r\n\r\n" + BODY, "more than one Content-Length"),
        (POST + b"Content-Length: +15\r\n\r\n" + BODY, "bad Content-Length"),
        (POST + b"Content-Length: 0x0f\r\n\r\n" + BODY, "bad Content-Length"),
        (POST + b"Content-Length : 15\r\n\r\n" + BODY, "illegal header line"),
        (POST + CHUNKED + CHUNKED + b"\r\n" + CHUNKS, "Transfer-Encoding"),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS, "Transfer-Encoding"),
        (POST + b"Transfer-Encoding: identity\r\n" + LENGTH + b"\r\n" + BODY, "both"),
        (POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n" + CHUNKS, "Transfer-Encoding"),
        (POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS, "only HTTP/1.1"),
        (POST + b"X: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY, "folded"),
        (POST + b"X: a\r\n\tb\r\n" + LENGTH + b"\r\n" + BODY, "folded"),
        (POST + b"X: a\n" + LENGTH + b"\r\n" + BODY, "CR LF"),
        (POST + LENGTH + b"\n" + BODY, "CR LF"),
        (POST + b"X: a\rb\r\n" + LENGTH + b"\r\n" + BODY, "CR LF"),
        (POST + b"X: a\0b\r\n" + LENGTH + b"\r\n" + BODY, "CR LF"),
        (b"GET /version HTTP/1.1\r\n\r\n", "Host"),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nHost: b\r\n\r\n", "Host"),
        (b"\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n", "no request line"),
        (b"GET /version\r\nHost: localhost\r\n\r\n", "illegal request line"),
    ],
    ids=lambda value: value if isinstance(value, str) else "head",
)
def test_ambiguous_requests_are_refused(server_url: str, data: bytes, reason: str) -> None:
    found = exchange(server_url, data)
    status, _, rest = found.partition(b"\r\n")
    assert status.split(b" ")[1] in (b"400", b"501"), found
    assert b"connection: close" in rest.lower()
    error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]  # no second response
    assert error["code"] == "unreadable_request"
    assert reason in error["message"]


@pytest.mark.parametrize(
    "chunks",
    [
        b"f\n" + BODY + b"\r\n0\r\n\r\n",
        b"0xf\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"f \r\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"f\r\n" + BODY + b"xx0\r\n\r\n",
        b"-1\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"f" * 21 + b"\r\n" + BODY,
        b"1\r\n{\r\n" * (MAX_CHUNKS + 1),
    ],
    ids=range(7),
)
def test_odd_chunks_are_refused(server_url: str, chunks: bytes) -> None:
    """Also more chunks than any client sends; the request that follows gets no response."""
    found = exchange(server_url, POST + CHUNKED + b"\r\n" + chunks)
    assert found.count(b"HTTP/1.1 ") <= 1
    assert found.startswith(b"HTTP/1.1 400 ") or not found
    assert b'"version"' not in found


def test_unambiguous_requests_are_served(server_url: str) -> None:
    close = b"Connection: close\r\n"
    for data in (
        POST + LENGTH + b"\r\n" + BODY,
        POST + CHUNKED + b"\r\n" + CHUNKS,
        POST.replace(b"1.1", b"1.0") + LENGTH + close + b"\r\n" + BODY,
        POST + CHUNKED + b"\r\n" + b"1\r\n \r\n" * (MAX_CHUNKS - 20) + CHUNKS,
    ):
        found = exchange(
            server_url, data + SMUGGLED.replace(b"\r\n\r\n", b"\r\n" + close + b"\r\n")
        )
        assert found.startswith(b"HTTP/1.1 200 OK"), found
        assert b'"tokens"' in found


@pytest.mark.parametrize("in_pieces", [False, True])
def test_head_larger_than_the_limit_is_a_431(server_url: str, in_pieces: bool) -> None:
    """Whether the head arrives whole or in pieces."""
    for num_bytes, status in (
        (MAX_HEAD_BYTES, b"200"), (MAX_HEAD_BYTES + 1, b"431"), (3 * MAX_HEAD_BYTES, b"431"),
    ):  # fmt: skip
        head = padded(num_bytes)
        assert len(head) == num_bytes
        address = urlsplit(server_url)
        with socket.create_connection((address.hostname, address.port), timeout=30) as raw:
            size = 9_999 if in_pieces else len(head)
            with contextlib.suppress(ConnectionError):  # the server may close before the rest
                for start in range(0, len(head), size):
                    raw.sendall(head[start : start + size])
            assert raw.recv(1 << 16).split(b" ")[1] == status


def test_broken_body_after_the_response_began_logs_no_error(
    server_url: str, server_context: ApiContext, caplog: pytest.LogCaptureFixture
) -> None:
    """The response has begun, so the server can send no other status."""
    data = (
        b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
        + CHUNKED
        + b"\r\n"
        + b"1\r\nx\r\nnonsense\r\n"
    )
    assert exchange(server_url, data).count(b"HTTP/1.1 ") <= 1
    wait_until(lambda: server_context.num_open == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
