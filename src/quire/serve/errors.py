"""Errors as clients see them: {"error": {"message", "type", "param", "code"}}, as in OpenAI's API.

Clients see only our own texts. The text of a library's exception may hold paths or addresses, so it
goes to the log, with its traceback.
"""

import errno
import json
import logging
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import fastapi
from starlette.responses import Response

from quire.base.errors import (
    HOOK_UNAVAILABLE,
    STEP_FAILED,
    EngineBusy,
    EngineDead,
    EngineError,
    HookFailed,
    RequestError,
    StepFailed,
)

logger = logging.getLogger("quire")

RETRY_AFTER_S = 1
MAX_SHOWN = 80
OF_PROMPTS = (None, "prompt", "prompt_token_ids")  # fields that endpoints name differently
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ApiError(Exception):
    """An error response. param: the request's field; code: identifier for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class ApiHttpError(fastapi.HTTPException):
    """Wrapper to raise an ApiError while FastAPI reads a body: it passes only its own kind on."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.status, error.message)
        self.error = error


class ErrorResponse(Response):
    """JSON response for any text of a client, including halves of surrogate pairs."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False).encode("utf-8", "backslashreplace")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400 for the caller to raise."""
    return ApiError(400, message, param=param, code=code)


def timed_out(message: str) -> ApiError:
    """Return a 408 for a request whose timeout_s has passed. OpenAI's client retries after a 408.
    The response forbids that, because repeated late work would burden an overloaded server."""
    headers = {"x-should-retry": "false"}
    return ApiError(408, message, "timeout_error", "timeout_s", "request_timeout", headers)


def as_api_error(error: BaseException, request_id: str = "") -> ApiError:
    """Return the error that the client sees for an exception. Log an unexpected exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineBusy):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return ApiError(503, str(error), "server_error", code="engine_busy", headers=headers)
    if isinstance(error, RequestError):
        return bad_request(str(error), error.field, error.code)
    if isinstance(error, EngineDead):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return ApiError(503, str(error), "server_error", code="engine_dead", headers=headers)
    if isinstance(error, HookFailed):
        return _hook_failed(error)
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return _disk_full(error, request_id)
    if isinstance(error, RecursionError):
        return bad_request("the request is nested too deeply.")
    if isinstance(error, StepFailed):
        return _step_failed(error, request_id)
    if isinstance(error, EngineError):
        logger.error("request %s: %s", request_id, error)
        text = "the engine failed while it worked on this request; its log says why."
        return ApiError(500, text, "server_error", code="engine_error")
    logger.error("request %s failed unexpectedly", request_id, exc_info=error)
    where = f" under request id {request_id}" if request_id else ""
    text = f"an error inside the server; its log has the details{where}."
    return ApiError(500, text, "server_error", code="internal_error")


def error_in(field: str, error: RequestError) -> ApiError:
    """Return the error for the client, with `field` as its parameter. An error that names a field
    other than the prompt keeps its parameter, and so does one of the server, such as EngineBusy."""
    shown = as_api_error(error)
    if shown.status == 400 and shown.param in OF_PROMPTS:
        shown.param = field
    return shown


@contextmanager
def own_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Name the fields of a request's API in errors of the request. names: fields of a completion ->
    its fields. A message may name several fields."""
    try:
        yield
    except (ApiError, RequestError) as error:
        shown = as_api_error(error)
        param = "prompt" if shown.param in OF_PROMPTS[1:] else shown.param
        # `prompt` is a field where a message begins with it, and a word elsewhere.
        places = [r"^prompt(?:_token_ids)?(?=[:=]| must\b| has\b)"]
        places += [rf"\b{name}\b" for name in names if name != "prompt"]
        place, of_prompt = "|".join(places), names.get("prompt")
        own = re.sub(place, lambda at: names.get(at[0], of_prompt or at[0]), shown.message)
        if shown.status != 400 or (own == shown.message and param not in names):
            raise
        shown.message, shown.param = own, names.get(param or "", shown.param)
        raise shown from None


def _step_failed(error: StepFailed, request_id: str) -> ApiError:
    """Return a 500 that forbids retries, because the engine has already repeated the step."""
    logger.error("request %s: %s", request_id, error)
    text = (
        "a step of the engine failed on this request; the server's log says why, under request id"
        f" {request_id}."
    )
    headers = {"x-should-retry": "false"}
    return ApiError(500, text, "server_error", code=STEP_FAILED, headers=headers)


def _disk_full(error: OSError, request_id: str) -> ApiError:
    """Return a 507. Paths go to the log only."""
    logger.error("request %s: writing to the disk failed (%s)", request_id, error)
    text = "the server's disk is full, and nothing was stored for this request; try again later."
    return ApiError(507, text, "server_error", code="disk_full")


def _hook_failed(error: HookFailed) -> ApiError:
    """Return a 503 if hooks hang, else a 500 that forbids retries."""
    if error.code == HOOK_UNAVAILABLE:
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return ApiError(503, str(error), "server_error", code=error.code, headers=headers)
    headers = {"x-should-retry": "false"}
    return ApiError(500, str(error), "server_error", code=error.code, headers=headers)


def error_body(error: BaseException, request_id: str = "") -> tuple[int, dict[str, Any]]:
    """Return status and body for an exception. A stream that has begun sends the body as event."""
    shown = as_api_error(error, request_id)
    return shown.status, shown.body()


def error_response(error: BaseException, request_id: str = "") -> Response:
    shown = as_api_error(error, request_id)
    return ErrorResponse(shown.body(), shown.status, shown.headers)


class ShortRepr(reprlib.Repr):
    """Short repr of a value of any size, which reads only the part of the value that it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = MAX_SHOWN


def short(value: object) -> str:
    """Return a value's repr, cut to about MAX_SHOWN characters."""
    shown = ShortRepr().repr(value)
    return shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."
