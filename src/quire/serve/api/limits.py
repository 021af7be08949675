"""What keeps a request from its handler: a body that is too large, and a server that is ending.

`BodyLimit` is plain ASGI, so that it counts while the body comes in and adds nothing per chunk of
an answer.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.serve.api.auth import has_key, wrong_key
from quire.serve.api.context import Api, ApiContext
from quire.serve.api.errors import ApiError, ApiHttpError, error_response

RETRY_AFTER_S = 5
BODY_S = 60.0  # for the next piece of a body


class BodyLimit:
    """Caps the body of every request, and gives handlers none of those that bring no key.

    The key is not judged here (`auth.authorised` does that, with the route): without one, a handler
    that asks for a body gets the 401 in its place, so that strangers have nothing parsed.
    """

    def __init__(self, app: ASGIApp, context: ApiContext) -> None:
        self._app = app
        self._config = context.config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._config.max_body_bytes
        if not has_key(scope, self._config.api_key):
            await self._app(scope, _Body(receive, 0, wrong_key()).receive, send)
            return
        declared = _header(scope, b"content-length")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > most):
            await error_response(too_large(most))(scope, receive, send)
            return
        await self._app(scope, _Body(receive, most, too_large(most)).receive, send)


class _Body:
    """One request's body on its way in. With more than `most` bytes it is refused, and what is
    still to come is left to the server, which drops it. So is one that stops coming in."""

    def __init__(self, receive: Receive, most: int, refusal: ApiError) -> None:
        self._receive = receive
        self._most = most
        self._refusal = refusal
        self._num_bytes = 0
        self._is_whole = False

    async def receive(self) -> Message:
        try:
            message = await asyncio.wait_for(self._receive(), None if self._is_whole else BODY_S)
        except TimeoutError:
            raise ApiHttpError(too_slow()) from None
        self._is_whole = not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._most:
            raise ApiHttpError(self._refusal)
        return message


def too_large(most: int) -> ApiError:
    text = (
        f"the body is larger than {most} bytes; send less, or start with a larger max_body_bytes."
    )
    return ApiError(413, text, code="body_too_large")


def too_slow() -> ApiError:
    text = f"nothing more of the body came for {BODY_S:g} s; send it again, in one go."
    return ApiError(408, text, code="body_timeout", headers={"Connection": "close"})


def _header(scope: Scope, wanted: bytes) -> bytes:
    found: bytes = next((value for name, value in scope["headers"] if name == wanted), b"")
    return found


async def generating(api: Api) -> AsyncIterator[None]:
    """Dependency of the routes that generate: refuses new work while the server ends, and counts.

    FastAPI leaves it when the answer has been sent to its end, or the client has gone; a streaming
    handler has nothing to do for that.
    """
    async with open_request(api):
        yield


@asynccontextmanager
async def open_request(context: ApiContext) -> AsyncIterator[None]:
    """Counts one request that generates. Raises ApiError 503 while the server ends."""
    if context.draining:
        text = "the server is shutting down and takes no new requests; try again later."
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        raise ApiError(503, text, "server_error", code="draining", headers=headers)
    context.num_open += 1
    try:
        yield
    finally:
        context.num_open -= 1
