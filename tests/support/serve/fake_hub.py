"""A server with the interface of the Hugging Face hub: listings, files with ranges, a search.

A file may be held back after some bytes, so that a test can end a download in its middle.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE_BYTES = 1000  # from here on a file has a checksum, as files in LFS have
API = re.compile(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+|/tree/[^/]+)?")
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class FakeHub:
    """The repositories (name -> file -> contents) and what clients requested."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)  # files whose contents are sent wrong
    hold_after: int | None = None  # bytes of a large file after which the server waits
    released: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)  # method, path and range
    url: str = ""

    def downloads(self) -> list[str]:
        return [each for each in self.requests if each.startswith("GET") and "/resolve/" in each]

    def variables(self, home: str) -> dict[str, str]:
        """The environment of a process that uses this hub."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": home, "HF_HUB_DISABLE_TELEMETRY": "1"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        span = self.headers.get("Range", "")
        self.hub.requests.append(f"{self.command} {self.path} {span}".strip())
        if parts.path == "/api/models":
            query = parse_qs(parts.query)
            wanted, owner = query.get("search", [""])[0].lower(), query.get("author", [""])[0]
            names = [name for name in self.hub.repos if name.startswith(owner)]
            self._json([{"id": name} for name in names if wanted in name.lower()])
        elif found := API.fullmatch(parts.path):
            self._listing(found[1], found[2] or "")
        elif found := FILE.fullmatch(parts.path):
            self._file(found[1], found[3])
        else:
            self._error(404, "")

    def _listing(self, repo: str, what: str) -> None:
        if repo in self.hub.gated:
            self._error(403, "GatedRepo")
        elif repo not in self.hub.repos:
            self._error(404, "RepoNotFound")
        elif what.startswith("/revision/") and what[10:] not in ("main", COMMIT):
            self._error(404, "RevisionNotFound")
        elif what.startswith("/tree/"):
            files = self.hub.repos[repo].items()
            self._json([self._tree_entry(name, data) for name, data in files])
        else:
            siblings = [self._sibling(*item) for item in self.hub.repos[repo].items()]
            self._json({"id": repo, "sha": COMMIT, "siblings": siblings})

    def _sibling(self, name: str, data: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": "1" * 40}
        if len(data) >= LARGE_BYTES:
            entry["lfs"] = {"sha256": _sha256(data), "size": len(data), "pointerSize": 130}
        return entry

    def _tree_entry(self, name: str, data: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(data)}
        entry["oid"] = hashlib.sha1(data).hexdigest()
        if len(data) >= LARGE_BYTES:
            entry["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 130}
        return entry

    def _file(self, repo: str, name: str) -> None:
        data = self.hub.repos.get(repo, {}).get(name)
        if data is None:
            self._error(404, "EntryNotFound")
            return
        digest = _sha256(data) if len(data) >= LARGE_BYTES else hashlib.sha1(data).hexdigest()
        if name in self.hub.damaged:
            data = bytes(len(data))
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(found[1]) if found else 0
        self.send_response(206 if found else 200)
        self.send_header("Content-Length", str(len(data) - start))
        if found:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{digest}"')
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = self.hub.hold_after
        if limit is not None and len(data) >= LARGE_BYTES:
            self.wfile.write(data[start:limit])
            self.wfile.flush()
            self.hub.released.wait(60)
            start = limit
        self.wfile.write(data[start:])

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.released.set()
            server.shutdown()
            thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, hub: FakeHub, home: str) -> None:
    """Let this process use the hub: the library reads the environment only at its import."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", f"{home}/hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
