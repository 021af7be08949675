"""Errors in the format of Ollama's API, on the paths below /api/: {"error": "a sentence"}."""

import json

from starlette.responses import Response
from starlette.types import Scope

from quire.serve.errors import ApiError, ErrorResponse, as_api_error

PATH = "/api/"
LM_STUDIO = ("/api/v0/", "/api/v1/")  # LM Studio's API, whose errors have OpenAI's format
# Fields of a chat or a completion that have another name in Ollama's bodies.
FIELDS = {
    "response_format": "format", "chat_template_kwargs": "think",
    "max_tokens": "num_predict", "repetition_penalty": "repeat_penalty",
}  # fmt: skip


def is_ollama(scope: Scope) -> bool:
    """Return whether a request is for Ollama's API."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path.startswith(PATH) and not f"{path}/".startswith(LM_STUDIO)


def text_of(error: ApiError) -> str:
    """Return an error's message, with Ollama's name of its field."""
    name = FIELDS.get(error.param or "")
    return error.message if name is None else error.message.replace(error.param or "", name, 1)


def ollama_error_response(error: ApiError) -> Response:
    return ErrorResponse({"error": text_of(error)}, error.status, error.headers)


def ollama_error_line(error: BaseException, request_id: str) -> bytes:
    """Return the last line of a stream that fails."""
    return json.dumps({"error": text_of(as_api_error(error, request_id))}).encode() + b"\n"
