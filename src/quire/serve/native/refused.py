"""OpenAI's endpoints that quire does not have: refused with the reason and what to use instead.

The status is 501, and a header stops clients that retry after a status of 5xx.
"""

from collections.abc import Mapping
from typing import Any

import fastapi
from fastapi import WebSocket

from quire.serve.context import ApiContext
from quire.serve.errors import ApiError
from quire.serve.native.stream import refusal_of, refuse

METHODS = ["GET", "POST", "DELETE"]
NOT_STORED = "quire runs no stored assistants; use /v1/responses with previous_response_id"
NO_SPEECH = "quire serves models that read and write text; transcribe or speak with another server"
NO_PICTURES = "quire generates text only; use another server. Models may read images in messages"
# Path below /v1/, with everything below it -> reason, and what to use instead.
REFUSED: Mapping[str, str] = {
    "audio": NO_SPEECH,
    "realtime": "quire has no voice sessions; use /v1/chat/completions with stream=true, or the"
    " WebSocket /v1/stream for prompts in pieces",
    "images": NO_PICTURES,
    "videos": NO_PICTURES,
    "moderations": "quire has no moderation model; use hooks to filter prompts and answers, or"
    " /classify with a model that classifies",
    "fine_tuning": "quire trains no models; train elsewhere, and serve the checkpoint",
    "assistants": NOT_STORED,
    "threads": NOT_STORED,
    "conversations": NOT_STORED,
    "vector_stores": "quire searches no files; use /v1/embeddings and a vector database",
    "containers": "quire runs no code; run the tools yourself",
    "evals": "quire runs no evaluations; run them against /v1/chat/completions",
    "uploads": "uploads in parts are disabled; use /v1/files",
}

router = fastapi.APIRouter()
sockets = fastapi.APIRouter()


def refusal(path: str) -> ApiError:
    """Return the error for a path below /v1/."""
    text = f"/v1/{path} is not supported: {REFUSED[path]}."
    headers = {"x-should-retry": "false"}
    return ApiError(501, text, code="unsupported_endpoint", headers=headers)


def _endpoint(path: str) -> Any:
    async def refuse_always() -> None:
        """Refuse the request without reading its body."""
        raise refusal(path)

    return refuse_always


for _path in REFUSED:
    for _below in ("", "/{rest:path}"):
        router.add_api_route(
            f"/v1/{_path}{_below}", _endpoint(_path), methods=METHODS, include_in_schema=False
        )


@sockets.websocket("/v1/realtime")
async def realtime(websocket: WebSocket) -> None:
    """Refuse the handshake of a voice session."""
    api: ApiContext = websocket.app.state.context
    await refuse(websocket, refusal_of(websocket.scope, api.config) or refusal("realtime"))
