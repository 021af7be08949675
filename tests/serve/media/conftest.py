"""A server with a certificate for example.org, from which images are downloaded."""

import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from quire.serve.media import download
from quire.serve.media.download import Downloads

CONTENT = bytes(range(256)) * 40
hang = threading.Event()


class Handler(BaseHTTPRequestHandler):
    """Serves the response that the path names."""

    def do_GET(self) -> None:
        redirects = {"/same": "/file", "/other": "https://evil.com/x", "/loop": "/loop",
                  "/plain": "http://example.org/x", "/inside": "https://127.0.0.1/x",
                  "/broken": "https://[::1/x"}  # fmt: skip
        if self.path in redirects:
            self.send_response(302)
            self.send_header("Location", redirects[self.path])
            self.end_headers()
        elif self.path in ("/file", "/%C3%BC%20x?y=%2F"):
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT)
        elif self.path == "/page":
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
        elif self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT) + 1))
            self.end_headers()
            self.wfile.write(CONTENT)
        elif self.path == "/hangs":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x")
            self.wfile.flush()
            hang.wait()
        else:
            self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a key and a certificate; return their paths."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    names = ["-subj", "/CN=example.org", "-addext", "subjectAltName=DNS:example.org"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *files, *names], check=True, capture_output=True)
    return key, certificate


@contextmanager
def tls_files(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Downloads]:
    """Yield downloads from a local server, whose address counts as public."""
    key, public = certificate
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hang.clear()
    monkeypatch.setattr(download, "HTTPS_PORT", server.server_port)
    monkeypatch.setattr(download, "public_address", lambda *given: "127.0.0.1")
    yield Downloads(
        ("example.org",), context=lambda: ssl.create_default_context(cafile=str(public))
    )
    hang.set()
    server.shutdown()
    thread.join()
    server.server_close()
