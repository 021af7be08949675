"""Requests to the app of this process, without HTTP: what a server would answer, byte for byte."""

import asyncio
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.types import Message

from quire.serve.native.document import document

JSON = "application/json"
# A batch may not ask for what an operator does, for files and batches, or for what is about one
# request.
NOT_IN_BATCHES = ("/v1/files", "/v1/batches", "/v1/prefixes", "/v1/requests/", "/abort_requests")


def batch_urls(app: FastAPI) -> frozenset[str]:
    """Return the paths that lines may name: all that take JSON by POST."""
    paths = document(app)["paths"]
    return frozenset(
        path
        for path, operations in paths.items()
        if JSON in operations.get("post", {}).get("requestBody", {}).get("content", {})
        and not path.startswith(NOT_IN_BATCHES)
    )


@dataclass(frozen=True)
class Reply:
    """request_id: by which the log and /v1/requests know it."""

    status: int
    request_id: str
    body: bytes


class AppCaller:
    """Calls one app. key: the API key that requests bring, if any. urls: that it may call."""

    def __init__(self, app: FastAPI, key: str | None = None) -> None:
        self.urls = batch_urls(app)
        self._app = app
        self._headers = [(b"host", b"batch"), (b"content-type", b"application/json")]
        if key is not None:
            self._headers.append((b"authorization", b"Bearer " + key.encode()))

    async def post(self, path: str, body: bytes) -> Reply:
        """Post a JSON body. A caller that is cancelled is a client that has gone."""
        status, headers, parts = 0, dict[bytes, bytes](), list[bytes]()
        is_sent = False

        async def receive() -> Message:
            nonlocal is_sent
            if is_sent:
                await asyncio.Event().wait()  # the client stays until it is cancelled
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], dict(message["headers"])
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app(self._scope(path, len(body)), receive, send)
        return Reply(status, headers.get(b"x-request-id", b"").decode(), b"".join(parts))

    def _scope(self, path: str, size: int) -> dict[str, object]:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [*self._headers, (b"content-length", b"%d" % size)],
            "client": None,
            "server": None,
            "state": {},
        }
