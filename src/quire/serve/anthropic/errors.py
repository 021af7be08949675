"""Errors in the format of the Messages API, on its paths and below them."""

import json
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from quire.base.errors import CONTEXT_LENGTH_EXCEEDED
from quire.serve.errors import ApiError, ErrorResponse, as_api_error

PATH = "/v1/messages"
REQUEST_ID = "request-id"  # header in which these clients expect the id
# Types by status. Of other statuses, 500 and above are the server's fault, the rest the request's.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Fields of a chat that have another name in a Messages request.
FIELDS = {"response_format": "output_config.format"}
# Clients search for these words to detect that they must send less.
TOO_LONG = "prompt is too long: "


def is_messages(scope: Scope) -> bool:
    """Return whether a request is for the Messages API or a path below it."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == PATH or path.startswith(f"{PATH}/")


def message_error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the body of an error response."""
    fault = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = TYPES.get(error.status, fault)
    text = error.message
    if error.param in FIELDS:
        text = text.replace(error.param, FIELDS[error.param], 1)
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        text = TOO_LONG + text
    shown = {"type": kind, "message": text}
    return {"type": "error", "error": shown, "request_id": request_id or None}


def message_error_response(error: ApiError, request_id: str) -> Response:
    headers = error.headers | ({REQUEST_ID: request_id} if request_id else {})
    return ErrorResponse(message_error_body(error, request_id), error.status, headers)


def message_error_event(error: BaseException, request_id: str) -> bytes:
    """Return the last event of a stream that fails."""
    body = message_error_body(as_api_error(error, request_id), request_id)
    return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"
