"""In-process calls of the app without HTTP. The reply's body equals a server's, byte for byte."""

import asyncio
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.types import Message

from quire.serve.native.document import document

JSON = "application/json"
# Endpoints that batches may not call: for operators, files, batches and single requests, and the
# APIs of Ollama, llama.cpp, SGLang and TRL.
NOT_IN_BATCHES = (
    "/v1/files", "/v1/batches", "/v1/prefixes", "/v1/requests/", "/abort_requests", "/api/",
    "/apply-template", "/completion", "/embedding", "/generate", "/infill", "/reranking",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters",
    "/init_weight_transfer_engine", "/inference/", "/chat/", "/get_sequence_logprobs/",
    "/start_weight_update", "/update_weights", "/finish_weight_update",
)  # fmt: skip


def batch_urls(app: FastAPI) -> frozenset[str]:
    """Return the paths that lines may name: the endpoints that accept a JSON body by POST."""
    paths = document(app)["paths"]
    return frozenset(
        path
        for path, operations in paths.items()
        if JSON in operations.get("post", {}).get("requestBody", {}).get("content", {})
        and not path.startswith(NOT_IN_BATCHES)
    )


@dataclass(frozen=True)
class Reply:
    """Reply of the app. request_id: its name in the log and in /v1/requests."""

    status: int
    request_id: str
    body: bytes


class AppCaller:
    """Caller of one app. key: API key sent with each request. urls: paths it may call."""

    def __init__(self, app: FastAPI, key: str | None = None) -> None:
        self.urls = batch_urls(app)
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
