"""Compressed bodies: read, with their size before compression, or refused with what to do."""

import gzip
import json
import zlib
from collections.abc import Iterator

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from quire.serve.app import create_app
from tests.serve.api.conftest import MakeContext

LIMIT = 4096
BODY = json.dumps({"prompt": "Once upon a time, there was a little fox. " * 20}).encode()
PACKED = gzip.compress(BODY, mtime=0)


@pytest.fixture
def small(make_context: MakeContext) -> Iterator[TestClient]:
    with TestClient(create_app(make_context(max_body_bytes=LIMIT))) as client:
        yield client


def post(api: TestClient, body: bytes, coding: str, size: int | None = None) -> Response:
    """size: of the pieces in which it is sent."""
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    pieces = [body[at : at + size] for at in range(0, len(body), size)] if size else body
    return api.post("/tokenize", content=iter(pieces) if size else body, headers=headers)


@pytest.mark.parametrize("size", [None, 1, 50])
@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", PACKED),
        ("GZip", PACKED),
        ("x-gzip", PACKED),
        ("identity, gzip", PACKED),
        ("deflate", zlib.compress(BODY)),
        ("identity", BODY),
        ("", BODY),
    ],
    ids=lambda value: value if isinstance(value, str) else "body",
)
def test_read(small: TestClient, coding: str, body: bytes, size: int | None) -> None:
    plain = small.post("/tokenize", content=BODY, headers={"Content-Type": "application/json"})
    assert plain.json()["count"] > 100
    assert post(small, body, coding, size).json() == plain.json()


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "compress", "ü"])
def test_what_cannot_be_read_says_what_can(small: TestClient, coding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": coding.encode("latin-1")}
    response = small.post("/tokenize", content=PACKED, headers=headers)
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, deflate"
    assert response.json()["error"]["code"] == "unsupported_encoding"


@pytest.mark.parametrize("size", [None, 10])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (PACKED[:-9], "it ends too early"),
        (PACKED[:30], "it ends too early"),
        (PACKED + b"more", "it has data after its end"),
        (PACKED + PACKED, "it has data after its end"),
        (BODY, "it is not valid in that encoding"),
        (PACKED[:-8] + bytes(8), "it is not valid in that encoding"),
    ],
    ids=lambda value: value if isinstance(value, str) else "body",
)
def test_what_is_no_gzip(small: TestClient, body: bytes, reason: str, size: int | None) -> None:
    response = post(small, body, "gzip", size)
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


@pytest.mark.parametrize("size", [None, 1000])
def test_the_limit_is_of_what_comes_out(small: TestClient, size: int | None) -> None:
    for num_bytes, status in ((LIMIT, 200), (LIMIT + 1, 413), (100 * LIMIT, 413)):
        body = b'{"prompt": "' + b"a" * (num_bytes - 14) + b'"}'
        assert post(small, gzip.compress(body), "gzip", size).status_code == status


def test_a_bomb_is_not_unpacked(small: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 MB no more is made than is allowed."""
    made: list[int] = []
    from quire.serve.http.limits import Decoder

    take = Decoder.take

    def noted(self: Decoder, data: bytes, most: int, is_last: bool) -> bytes:
        found = take(self, data, most, is_last)
        made.append(len(found))
        return found

    monkeypatch.setattr(Decoder, "take", noted)
    bomb = gzip.compress(b" " * 100_000_000)
    assert len(bomb) > LIMIT
    assert post(small, bomb, "gzip", 2000).status_code == 413
    assert sum(made) == LIMIT + 1


def test_a_stranger_has_nothing_unpacked(make_context: MakeContext) -> None:
    with TestClient(create_app(make_context(api_key=("k",)))) as api:
        assert post(api, PACKED, "gzip").status_code == 401
        assert post(api, b"nonsense", "br").status_code == 401
