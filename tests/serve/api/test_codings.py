"""Compressed request bodies: decoding, the size limit after decompression, and errors."""

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
GZIPPED = gzip.compress(BODY, mtime=0)


@pytest.fixture
def small(make_context: MakeContext) -> Iterator[TestClient]:
    with TestClient(create_app(make_context(max_body_bytes=LIMIT))) as client:
        yield client


def post(api: TestClient, body: bytes, coding: str, size: int | None = None) -> Response:
    """size: of the pieces in which the body is sent; None sends it whole."""
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    pieces = [body[at : at + size] for at in range(0, len(body), size)] if size else body
    return api.post("/tokenize", content=iter(pieces) if size else body, headers=headers)


@pytest.mark.parametrize("size", [None, 1, 50])
@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", GZIPPED),
        ("GZip", GZIPPED),
        ("x-gzip", GZIPPED),
        ("identity, gzip", GZIPPED),
        ("deflate", zlib.compress(BODY)),
        ("identity", BODY),
        ("", BODY),
    ],
    ids=lambda value: value if isinstance(value, str) else "body",
)
def test_supported_encodings_are_decoded(
    small: TestClient, coding: str, body: bytes, size: int | None
) -> None:
    plain = small.post("/tokenize", content=BODY, headers={"Content-Type": "application/json"})
    assert plain.json()["count"] > 100
    assert post(small, body, coding, size).json() == plain.json()


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "compress", "ü"])
def test_unsupported_encodings_give_415_with_accept_encoding(
    small: TestClient, coding: str
) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": coding.encode("latin-1")}
    response = small.post("/tokenize", content=GZIPPED, headers=headers)
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, deflate"
    assert response.json()["error"]["code"] == "unsupported_encoding"


@pytest.mark.parametrize("size", [None, 10])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (GZIPPED[:-9], "it ends too early"),
        (GZIPPED[:30], "it ends too early"),
        (GZIPPED + b"more", "it has data after its end"),
        (GZIPPED + GZIPPED, "it has data after its end"),
        (BODY, "it is not valid in that encoding"),
        (GZIPPED[:-8] + bytes(8), "it is not valid in that encoding"),
    ],
    ids=lambda value: value if isinstance(value, str) else "body",
)
def test_corrupt_gzip_gives_400_with_the_reason(
    small: TestClient, body: bytes, reason: str, size: int | None
) -> None:
    response = post(small, body, "gzip", size)
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


@pytest.mark.parametrize("size", [None, 1000])
def test_size_limit_applies_after_decompression(small: TestClient, size: int | None) -> None:
    for num_bytes, status in ((LIMIT, 200), (LIMIT + 1, 413), (100 * LIMIT, 413)):
        body = b'{"prompt": "' + b"a" * (num_bytes - 14) + b'"}'
        assert post(small, gzip.compress(body), "gzip", size).status_code == status


def test_decompression_stops_at_the_size_limit(
    small: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a body of 100 MB, only one byte more than the limit is decompressed."""
    sizes: list[int] = []
    from quire.serve.http.limits import Decoder

    take = Decoder.take

    def recorded_take(self: Decoder, data: bytes, most: int, is_last: bool) -> bytes:
        found = take(self, data, most, is_last)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(Decoder, "take", recorded_take)
    bomb = gzip.compress(b" " * 100_000_000)
    assert len(bomb) > LIMIT
    assert post(small, bomb, "gzip", 2000).status_code == 413
    assert sum(sizes) == LIMIT + 1


def test_body_is_not_decompressed_without_a_key(make_context: MakeContext) -> None:
    with TestClient(create_app(make_context(api_key=("k",)))) as api:
        assert post(api, GZIPPED, "gzip").status_code == 401
        assert post(api, b"nonsense", "br").status_code == 401
