"""In-process calls of the app without HTTP. The reply's body equals a server's, byte for byte."""

import asyncio
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.types import Message

# Endpoints that the lines of a batch may call: generation, pooling and token counts
BATCH_URLS = frozenset(
    (
        "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses",
        "/v1/embeddings", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
        "/tokenize", "/detokenize", "/v1/messages/count_tokens",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """Reply of the app. request_id: its name in the log and in /v1/requests."""

    status: int
    request_id: str
    body: bytes


class AppCaller:
    """Caller of one app. key: API key sent with each request."""

    def __init__(self, app: FastAPI, key: str | None = None) -> None:
        self._app = app
        self._headers = [(b"host", b"batch"), (b"content-type", b"application/json")]
        if key is not None:
            self._headers.append((b"authorization", b"Bearer " + key.encode()))

    async def post(self, path: str, body: bytes) -> Reply:
        """Post a JSON body and return the reply. To the app, a cancelled call is a disconnect."""
        status, headers, parts = 0, dict[bytes, bytes](), list[bytes]()
        is_sent = False

        async def receive() -> Message:
            nonlocal is_sent
            if is_sent:
                await asyncio.Event().wait()  # the client stays connected until it is cancelled
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
