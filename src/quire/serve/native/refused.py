"""Endpoints of other servers that quire does not have: refused with the reason and what to use.

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
RENDERED = ("chat/completions", "completions", "messages")
# Path, with everything below it -> reason, and what to use instead.
REFUSED: Mapping[str, str] = {
    "/v1/audio": NO_SPEECH,
    "/v1/realtime": "quire has no voice sessions; use /v1/chat/completions with stream=true, or the"
    " WebSocket /v1/stream for prompts in pieces",
    "/v1/images": NO_PICTURES,
    "/v1/videos": NO_PICTURES,
    "/v1/moderations": "quire has no moderation model; use hooks to filter prompts and answers, or"
    " /classify with a model that classifies",
    "/v1/fine_tuning": "quire trains no models; train elsewhere, and serve the checkpoint",
    "/v1/assistants": NOT_STORED,
    "/v1/threads": NOT_STORED,
    "/v1/conversations": NOT_STORED,
    "/v1/vector_stores": "quire searches no files; use /v1/embeddings and a vector database",
    "/v1/containers": "quire runs no code; run the tools yourself",
    "/v1/evals": "quire runs no evaluations; run them against /v1/chat/completions",
    "/v1/uploads": "uploads in parts are disabled; use /v1/files",
    "/v1/messages/batches": "batches have OpenAI's form here; use /v1/files and /v1/batches, whose"
    " lines may be requests to /v1/messages",
    "/api/v1": "quire has version 0 of LM Studio's REST API; use /api/v0/models and"
    " /api/v0/chat/completions, or /v1/responses for conversations that the server stores",
    # vLLM, whose other routes quire has
    "/invocations": "send the body to the endpoint of its API, such as /v1/chat/completions",
    "/pooling": "use /v1/embeddings, or /classify with a model that classifies",
    **{f"/v1/{name}/render": "use /tokenize with messages" for name in RENDERED},
    # text-generation-inference, whose other routes quire has
    "/info": "use /v1/models, which has the model's name and length, or /version",
    "/generate_stream": "use /v1/completions or /v1/chat/completions with stream=true",
    "/chat_tokenize": "use /tokenize with messages",
}

router = fastapi.APIRouter()
sockets = fastapi.APIRouter()


def refusal(path: str) -> ApiError:
    """Return the error for a path of REFUSED."""
    text = f"{path} is not supported: {REFUSED[path]}."
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
            f"{_path}{_below}", _endpoint(_path), methods=METHODS, include_in_schema=False
        )


@sockets.websocket("/v1/realtime")
async def realtime(websocket: WebSocket) -> None:
    """Refuse the handshake of a voice session."""
    api: ApiContext = websocket.app.state.context
    await refuse(websocket, refusal_of(websocket.scope, api.config) or refusal("/v1/realtime"))
