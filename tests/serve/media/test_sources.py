"""Sources of media: rejected URLs, files and downloads, and contents that are read."""

import base64
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.base.errors import EngineBusy, RequestError
from quire.serve.media.addresses import MAX_LOOKUPS, Lookups, is_public, public_address
from quire.serve.media.download import Downloads
from quire.serve.media.sources import MediaSources
from tests.serve.media.conftest import CONTENT, make_certificate, tls_files


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
     "0.0.0.0", "255.255.255.255", "224.0.0.1", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1",
     "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1",
     "64:ff9b::a9fe:a9fe", "192.0.2.1", "198.18.0.1", "2001:db8::1"],
)  # fmt: skip
def test_private_and_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses_are_recognised(address: str) -> None:
    assert is_public(address)


def test_host_with_one_private_address_is_rejected() -> None:
    lookups = Lookups(lambda host, port: ["8.8.8.8", "10.0.0.1"])
    with pytest.raises(RequestError, match="10.0.0.1, which is not public"):
        public_address("example.org", 443, 9.0, lookups)


@pytest.mark.parametrize("host", ["a..images.net", f"{'x' * 64}.images.net"])
def test_invalid_host_name_cannot_be_resolved(host: str) -> None:
    with pytest.raises(RequestError, match="cannot be resolved"):
        Downloads((".images.net",)).get(f"https://{host}/a.png")


def test_slow_host_lookups_time_out_and_are_limited() -> None:
    is_over = threading.Event()

    def hang(host: str, port: int) -> list[str]:
        is_over.wait()
        return ["8.8.8.8"]

    downloads = Downloads(("example.org",), timeout_s=0.01, lookups=Lookups(hang))
    try:
        for _ in range(MAX_LOOKUPS):
            with pytest.raises(RequestError, match="'example.org' cannot be resolved within"):
                downloads.get("https://example.org/a.png")
        with pytest.raises(EngineBusy, match="try again later"):
            downloads.get("https://example.org/a.png")
    finally:
        is_over.set()


@pytest.mark.parametrize(
    ("url", "message"),
    [("http://example.org/a.png", "begins with 'http'"),
     ("https://example.com/a.png", "may not be fetched"),
     ("https://evil-example.org/a.png", "may not be fetched"),
     ("https://example.org.evil.com/a.png", "may not be fetched"),
     ("https://example.org@evil.com/a.png", "no user name"),
     ("https://user:word@example.org/a.png", "no user name"),
     ("https://example.org:8443/a.png", "no port other than 443"),
     ("https://127.0.0.1/a.png", "may not be fetched"),
     ("https://[::1]/a.png", "may not be fetched"),
     ("https://[::1/a.png", "malformed"),
     ("https:///a.png", "may not be fetched"),
     ("ftp://example.org/a.png", "must be a data: or an https:"),
     ("gopher://example.org/a.png", "must be a data: or an https:"),
     ("/etc/passwd", "must be a data: or an https:"),
     ("", "must be a data: or an https:"),
     ("file:///etc/passwd", "not allowed"),
     ("FILE:///etc/passwd", "not allowed"),
     ("data:image/png,abc", "base64"),
     ("data:text/html;base64,YWJj", "the type 'text/html'"),
     ("data:image/svg+xml;base64,YWJj", "the type 'image/svg"),
     ("data:application/pdf;base64,YWJj", "the type 'application/pdf'"),
     ("data:image/png;base64,@@@@", "no valid base64")],
)  # fmt: skip
def test_disallowed_urls_are_rejected(url: str, message: str) -> None:
    sources = MediaSources(downloads=Downloads(("example.org", ".images.net")))
    with pytest.raises(RequestError, match=message):
        sources.read(url)


def test_domain_with_leading_dot_allows_only_subdomains() -> None:
    downloads = Downloads((".images.net",))
    assert downloads.checked("https://a.b.IMAGES.net/x").hostname == "a.b.images.net"
    with pytest.raises(RequestError, match="may not be fetched"):
        downloads.checked("https://images.net/x")


def test_data_url_is_read_up_to_the_size_limit() -> None:
    url = "data:image/png;base64," + base64.b64encode(CONTENT).decode()
    assert MediaSources().read(url) == CONTENT
    with pytest.raises(RequestError, match="more than 1,000 bytes"):
        MediaSources(max_bytes=1000).read(url)


# ---- files -------------------------------------------------------------------------------------


def test_only_regular_files_below_the_folder_are_read(tmp_path: Path) -> None:
    folder, outside = tmp_path / "in", tmp_path / "outside.png"
    folder.mkdir()
    (folder / "a b.png").write_bytes(CONTENT)
    outside.write_bytes(CONTENT)
    (folder / "link.png").symlink_to(outside)
    os.mkfifo(folder / "pipe.png")
    sources = MediaSources(folder)
    assert sources.read(f"file://{folder}/a%20b.png") == CONTENT
    assert sources.read(f"file://localhost{folder}/a%20b.png") == CONTENT
    for path in (
        outside, folder / "link.png", folder / "pipe.png", folder / "missing.png", folder,
        folder / "../outside.png", "/dev/zero", "/proc/self/environ",
    ):  # fmt: skip
        with pytest.raises(RequestError, match="no readable file below the folder"):
            sources.read(f"file://{path}")
    with pytest.raises(RequestError, match="names no host"):
        sources.read(f"file://server{folder}/a%20b.png")
    with pytest.raises(RequestError, match="more than 100 bytes"):
        MediaSources(folder, max_bytes=100).read(f"file://{folder}/a%20b.png")


# ---- downloads ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def downloads(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Downloads]:
    with tls_files(certificate, monkeypatch) as found:
        yield found


@pytest.mark.parametrize("path", ["/file", "/same", "/ü x?y=%2F"])
def test_download_follows_redirects_to_the_same_host(downloads: Downloads, path: str) -> None:
    assert downloads.get(f"https://example.org{path}") == CONTENT


@pytest.mark.parametrize(
    ("path", "message"),
    [("/broken", "malformed"),
     ("/other", "'evil.com' may not be fetched"), ("/plain", "begins with 'http'"),
     ("/inside", "'127.0.0.1' may not be fetched"), ("/loop", "more than 3 times"),
     ("/page", "the type 'text/html'"),
     ("/missing", "status 404"), ("/short", "the download from example.org fails")],
)  # fmt: skip
def test_invalid_download_responses_are_rejected(
    downloads: Downloads, path: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        downloads.get(f"https://example.org{path}")


def test_redirect_to_another_allowed_host_is_rejected(downloads: Downloads) -> None:
    both = Downloads(("example.org", "evil.com"), context=downloads.context)
    with pytest.raises(RequestError, match="redirects to another host, 'evil.com'"):
        both.get("https://example.org/other")


def test_oversized_download_is_rejected(downloads: Downloads) -> None:
    small = Downloads(("example.org",), max_bytes=1000, context=downloads.context)
    with pytest.raises(RequestError, match="more than 1,000 bytes"):
        small.get("https://example.org/file")


def test_endless_download_times_out(downloads: Downloads) -> None:
    quick = Downloads(("example.org",), timeout_s=0.3, context=downloads.context)
    with pytest.raises(RequestError, match="the download from example.org fails"):
        quick.get("https://example.org/hangs")


def test_certificate_of_another_host_is_rejected(downloads: Downloads) -> None:
    other = Downloads(("example.net",), context=downloads.context)
    with pytest.raises(RequestError, match="CERTIFICATE_VERIFY_FAILED"):
        other.get("https://example.net/file")
