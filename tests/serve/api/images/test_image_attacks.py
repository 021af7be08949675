"""Hostile images through the API: their cost is bounded, and they reach no other file or host."""

import asyncio
import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from quire.base.errors import EngineBusy
from quire.base.settings.config import ServerConfig
from quire.render.media.prepared import PreparedMedia
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.serve.media import download, request_images
from quire.serve.media.addresses import Lookups
from quire.serve.media.download import Downloads
from quire.serve.media.request_images import ImageReader
from quire.serve.media.sources import MediaSources
from tests.serve.api.images.conftest import (
    MakeImageContext,
    chat_part,
    data_url,
    file_of,
    picture,
    text_part,
)
from tests.serve.media.conftest import CONTENT, make_certificate, tls_files

PNG = file_of(picture())
JPEG = file_of(picture(64, 64), "JPEG")
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
PDF = b"%PDF-1.7\n1 0 obj\n<< /Type /Catalog >>\nendobj\n"


def icon() -> bytes:
    data = io.BytesIO()
    picture(16, 16).save(data, "ICO", sizes=[(16, 16)])
    return data.getvalue()


def bomb(width: int, height: int) -> bytes:
    """Return a PNG file whose header claims this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = zlib.compress(bytes(1 << 16))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", content)
        + chunk(b"IEND", b"")
    )


def ask(client: TestClient, *urls: str, text: str = "Hi") -> Any:
    content = [text_part(text), *(chat_part(url) for url in urls)]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return client.post("/v1/chat/completions", json=body)


def refused(client: TestClient, *urls: str, status: int = 400) -> str:
    answer = ask(client, *urls)
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    return message


@pytest.fixture
def downloading(
    seeing: TestClient, context: ApiContext, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TestClient]:
    """A server that may download from example.org, which has a private address."""
    names: list[str] = []

    def resolver(host: str, port: int) -> list[str]:
        names.append(host)
        return ["169.254.169.254"]

    downloads = Downloads(("example.org",), lookups=Lookups(resolver))
    monkeypatch.setattr(context.images, "sources", MediaSources(downloads=downloads))
    monkeypatch.setattr(download._Pinned, "connect", lambda self: pytest.fail("a connection"))
    yield seeing
    assert names == ["example.org"] * len(names)


@pytest.mark.parametrize(
    ("url", "words"),
    [("https://example.org/a.png", "169.254.169.254, which is not public"),
     ("http://example.org/a.png", "begins with 'http'"),
     ("https://169.254.169.254/latest/meta-data", "may not be fetched"),
     ("https://localhost/a.png", "may not be fetched"),
     ("https://example.org:22/", "no port other than 443"),
     ("https://example.org.evil.com/", "may not be fetched"),
     ("file:///etc/passwd", "file: URLs are not allowed")],
)  # fmt: skip
def test_private_addresses_and_other_hosts_are_not_fetched(
    downloading: TestClient, url: str, words: str
) -> None:
    assert words in refused(downloading, url)


def test_by_default_nothing_is_downloaded(seeing: TestClient) -> None:
    assert "allowed: none" in refused(seeing, "https://example.org/a.png")


def test_bad_downloads_are_refused(
    seeing: TestClient, context: ApiContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redirects to other hosts, web pages, too large files, and servers that never finish."""
    with tls_files(make_certificate(tmp_path), monkeypatch) as downloads:
        for path, words, changes in (
            ("/other", "'evil.com' may not be fetched", {}),
            ("/inside", "'127.0.0.1' may not be fetched", {}),
            ("/page", "the type 'text/html'", {}),
            ("/file", "none of the formats", {}),
            ("/file", "more than 1,000 bytes", {"max_bytes": 1000}),
            ("/hangs", "the download from example.org fails", {"timeout_s": 0.2}),
        ):
            limited = Downloads(downloads.domains, context=downloads.context, **changes)
            monkeypatch.setattr(context.images, "sources", MediaSources(downloads=limited))
            assert words in refused(seeing, f"https://example.org{path}")


def test_files_outside_the_allowed_folder_are_refused(
    images: MakeImageContext, tmp_path: Path
) -> None:
    folder, outside = tmp_path / "in", tmp_path / "outside.png"
    folder.mkdir()
    for path in (folder / "a.png", outside):
        path.write_bytes(PNG)
    (folder / "link.png").symlink_to(outside)
    (folder / "up").symlink_to(tmp_path)
    with TestClient(create_app(images(allowed_local_media_path=str(folder)))) as client:
        assert ask(client, f"file://{folder}/a.png").status_code == 200
        for path in ("../outside.png", "%2e%2e/outside.png", "link.png", "up/outside.png", "b.png"):
            assert "no readable file" in refused(client, f"file://{folder}/{path}")
        for path in ("/etc/passwd", "/proc/self/environ", "/dev/zero", "/proc/self/fd/0"):
            assert "no readable file" in refused(client, f"file://{path}")


@pytest.mark.parametrize(
    ("data", "media_type", "words"),
    [(bomb(60_000, 60_000), "image/png", "more pixels than the limit of 67,108,864"),
     (bomb(1 << 30, 1 << 30), "image/png", "image"),
     (bomb(40_000, 10), "image/png", "at most 200 times its shorter side"),
     (PNG[: len(PNG) // 2], "image/png", "damaged"),
     (JPEG[: len(JPEG) // 2], "image/jpeg", "damaged"),
     (PNG[:20], "image/png", "image"), (b"", "image/png", "none of the formats"),
     (SVG, "image/png", "none of the formats"), (PDF, "image/png", "none of the formats"),
     (icon(), "image/png", "none of the formats"), (CONTENT, "image/png", "none of the formats"),
     (SVG, "image/svg+xml", "the type 'image/svg+xml'"),
     (PDF, "application/pdf", "the type 'application/pdf'"),
     (PNG, "text/html", "the type 'text/html'")],
)  # fmt: skip
def test_unusable_image_files_are_refused(
    seeing: TestClient, data: bytes, media_type: str, words: str
) -> None:
    assert words in refused(seeing, data_url(data, media_type))


def test_total_pixels_of_a_request_are_bounded(seeing: TestClient) -> None:
    """Each of ten images may have a tenth of the pixels."""
    wide = bomb(7000, 7000)
    assert "damaged" in refused(seeing, data_url(wide))  # alone it is decoded
    urls = [data_url(wide), *(data_url(file_of(picture(seed=seed))) for seed in range(9))]
    assert "7000 x 7000 pixels, more than the limit" in refused(seeing, *urls)


def test_too_many_images_are_refused_before_they_are_read(
    seeing: TestClient, context: ApiContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context.images, "sources", None)
    message = refused(seeing, *["https://example.org/a.png"] * 1000)
    assert message.startswith("messages[0].content[17] is image 17 of the request, which may have")


def test_operator_can_limit_the_number_of_images(images: MakeImageContext) -> None:
    limited = images(limit_mm_per_prompt='{"image": 1, "video": 0}')
    with TestClient(create_app(limited)) as client:
        assert ask(client, data_url(PNG)).status_code == 200
        assert "may have at most 1" in refused(client, data_url(PNG), data_url(PNG))


def test_body_text_and_image_sizes_are_limited(images: MakeImageContext) -> None:
    """Limits of a body, its text, one image and all images."""
    config = {"max_media_bytes": 1 << 18, "max_body_bytes": 1 << 15}
    one = file_of(picture(160, 256))  # 120 kB
    three = [data_url(file_of(picture(160, 192, seed))) for seed in range(3)]  # 270 kB
    with TestClient(create_app(images(**config))) as client:
        assert ask(client, data_url(one), text="\N{FOX FACE}").status_code == 200
        message = refused(client, *three)
        assert "makes the images of the request exceed 262,144 bytes" in message
        large = data_url(bytes(1 << 20))
        assert "the body is larger than" in refused(client, large, status=413)
        text = ask(client, data_url(one), text="a" * (1 << 16))
        assert text.status_code == 413
        assert f"the body is larger than {1 << 15} bytes" in text.json()["error"]["message"]
    with TestClient(create_app(images(max_media_bytes=1024))) as client:
        assert "more than 1,024 bytes" in refused(client, data_url(file_of(picture(64, 64))))


def test_only_endpoints_with_images_take_larger_bodies(images: MakeImageContext) -> None:
    with TestClient(create_app(images(max_body_bytes=1 << 15))) as client:
        answer = client.post("/v1/completions", json={"prompt": "a" * (1 << 16)})
    assert answer.status_code == 413


def test_image_bytes_do_not_count_as_wide_text(images: MakeImageContext) -> None:
    """Text with a character above U+FFFF takes four bytes per character; images do not count."""
    url = "data:image/png;base64," + base64.b64encode(bytes(9 << 20)).decode()
    with TestClient(create_app(images())) as client:
        answer = ask(client, url, text="\N{FOX FACE}")
        assert "none of the formats" in answer.json()["error"]["message"]
        answer = ask(client, text="\N{FOX FACE}" + "a" * (9 << 20))
        assert answer.status_code == 413 and "above U+FFFF" in answer.text


def test_too_many_image_tokens_are_refused(
    seeing: TestClient, context: ApiContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreparedMedia, "num_tokens", 300)
    message = refused(seeing, data_url(PNG), data_url(PNG))
    assert "the images have 600 tokens, and max_model_len is 512" in message


def test_busy_image_decoder_is_a_503_with_retry_after(
    seeing: TestClient, context: ApiContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy(data: bytes, max_pixels: int | None = None) -> PreparedMedia:
        raise EngineBusy("too many images wait to be decoded; try again later.")

    monkeypatch.setattr(context.renderer.media, "file_async", busy)
    answer = ask(seeing, data_url(PNG))
    assert answer.status_code == 503 and "Retry-After" in answer.headers
    assert json.loads(answer.text)["error"]["message"].startswith("too many images wait")


def test_image_bytes_and_reads_of_open_requests_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_images, "MAX_OPEN_BYTES", 2 * len(PNG))
    monkeypatch.setattr(request_images, "MAX_READS", 2)
    messages = [{"role": "user", "content": [chat_part(data_url(PNG))]}]
    large = [{"role": "user", "content": [chat_part(data_url(PNG + bytes(len(PNG))))]}]
    several = [{"role": "user", "content": [chat_part(data_url(PNG + bytes([i])))]} for i in (1, 2)]
    reader = ImageReader(ServerConfig())

    async def read() -> None:
        async with reader.open(large, True):  # alone it may have any size
            pass
        async with reader.open(messages, True):
            with pytest.raises(EngineBusy, match="are being decoded"):
                async with reader.open(large, True):
                    pass
            async with reader.open(messages, True):
                pass
        opened = [asyncio.ensure_future(_opened(reader, each)) for each in (several, messages)]
        with pytest.raises(EngineBusy, match="2 images are being read"):
            await asyncio.gather(*opened)

    asyncio.run(read())


async def _opened(reader: ImageReader, messages: list[Any]) -> None:
    async with reader.open(messages, True):
        pass


def test_animated_gif_is_accepted(seeing: TestClient) -> None:
    frames = [picture(seed=seed) for seed in range(3)]
    data = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(data)).n_frames == 3  # type: ignore[attr-defined]
    assert ask(seeing, data_url(data, "image/gif")).status_code == 200
