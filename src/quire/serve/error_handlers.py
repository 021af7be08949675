"""Exception handlers, which turn every exception of a handler into an error response."""

from typing import Any

import fastapi
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from quire.base.errors import QuireError
from quire.serve.anthropic.errors import is_messages, message_error_response
from quire.serve.bodies.open_body import add_suggestion, ignored_fields, naming_ignored
from quire.serve.bodies.validation_errors import invalid_request
from quire.serve.errors import ApiError, ApiHttpError, as_api_error, bad_request, error_response
from quire.serve.ollama.errors import is_ollama, ollama_error_response

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


async def answer(request: fastapi.Request, error: Exception) -> Response:
    """Return the error response for an exception of ours, of Starlette's or of FastAPI's."""
    if isinstance(error, RequestValidationError):
        error = invalid_request(error, request)
    elif isinstance(error, ApiHttpError):
        error = error.error
    elif isinstance(error, HTTPException):
        error = _of_http(request, error)
    ignored = ignored_fields(request.scope)
    if isinstance(error, ApiError):
        add_suggestion(error, ignored)
    return naming_ignored(error_answer(error, request.scope), ignored)


def _of_http(request: fastapi.Request, error: HTTPException) -> ApiError:
    """Describe an unknown route, a wrong method, or a body that FastAPI could not read."""
    headers = dict(error.headers or {})
    if error.status_code == 404:
        path = request.scope["path"][:200]  # request.url is made from the Host header
        text = f"there is no endpoint {path!r}; see /docs or /openapi.json."
        return ApiError(404, text, code="not_found")
    if error.status_code == 405:
        allowed = ", ".join(_allowed_methods(request.app.router.routes, request.scope))
        text = f"{request.method[:20]} is not allowed here; use {allowed}."
        return ApiError(405, text, code="method_not_allowed", headers={"Allow": allowed})
    cause = error.__cause__
    if isinstance(cause, UnicodeDecodeError):
        return bad_request(f"the body is not UTF-8: byte {cause.start} cannot be decoded.")
    if isinstance(cause, RecursionError):
        return bad_request("the body is not usable: its JSON is nested too deeply.")
    if error.status_code == 400:
        return bad_request("the body cannot be read as JSON; send one JSON object in UTF-8.")
    text = f"the server refuses this request (status {error.status_code})."
    return ApiError(error.status_code, text, headers=headers)


def install_error_handlers(app: fastapi.FastAPI) -> None:
    """Register `answer` for every exception that a route may raise."""
    kinds: tuple[type[Exception], ...] = (
        ApiError, QuireError, RecursionError, RequestValidationError, HTTPException,
    )  # fmt: skip
    for kind in kinds:
        app.add_exception_handler(kind, answer)


def _allowed_methods(routes: list[Any], scope: Scope) -> list[str]:
    """Return the methods that the routes at the request's path accept."""
    found = []
    for method in METHODS:
        matched_method = "GET" if method == "HEAD" else method
        if any(
            route.matches({**scope, "method": matched_method})[0] is Match.FULL for route in routes
        ):
            found.append(method)
    return found


def error_answer(error: BaseException, scope: Scope) -> Response:
    """Return the response to a failed request. An unexpected exception is also logged."""
    request_id = str(scope.get("state", {}).get("request_id", ""))
    api_error = as_api_error(error, request_id)
    if is_messages(scope):
        return message_error_response(api_error, request_id)
    if is_ollama(scope):
        return ollama_error_response(api_error)
    return error_response(api_error)
