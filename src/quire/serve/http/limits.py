"""Limits in front of the handlers: size and speed of bodies, and the shutdown of the server.

`BodyLimit` is plain ASGI, so that it counts a body as it arrives and adds no work per chunk of a
response. A body may be compressed with gzip or deflate (Content-Encoding, RFC 9110, 8.4).
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import fastapi
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.serve.bodies.reading import MODEL, too_large
from quire.serve.context import Api, ApiContext, model_known
from quire.serve.error_handlers import error_answer
from quire.serve.errors import ApiError, ApiHttpError
from quire.serve.http.auth import has_key, wrong_key
from quire.serve.http.decoder import Decoder, decoder_of
from quire.serve.http.rate_gate import admit

RETRY_AFTER_S = 5
BODY_S = 60.0  # timeout for the next piece of a body
WHOLE_BODY_S = 600.0
UPLOADS = ("POST", "/v1/files")
WITH_IMAGES = (
    "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/api/chat", "/api/generate",
    "/api/v0/chat/completions", "/chat/",
)  # fmt: skip
FORM_BYTES = 1 << 16  # size of an upload's form around the file


class BodyLimit:
    """Middleware that limits the body of each request, and hides bodies of requests without a key.

    `auth.authorised` checks the key per route. Here, a handler that reads the body of a request
    without a valid key gets the 401, so nothing of strangers is parsed. The same holds for an
    unknown coding. The decoded size of a compressed body counts.
    """

    def __init__(self, app: ASGIApp, context: ApiContext) -> None:
        self._app = app
        self._context, self._config = context, context.config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._max_bytes(scope)
        declared = _header(scope, b"content-length")
        if not has_key(scope, self._config.api_key):
            body = _Body(receive, 0, refusal=wrong_key())
        elif declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
            await error_answer(too_large(max_bytes), scope)(scope, receive, send)
            return
        else:
            body = _decoded(scope, receive, max_bytes)
        await self._app(scope, body.receive, send)

    def _max_bytes(self, scope: Scope) -> int:
        """Return the maximum size of a body in bytes. Uploads are also counted on disk, and
        `reading.py` measures a body without its images."""
        config, path = self._config, scope["path"].removeprefix(scope.get("root_path", ""))
        if config.files_dir is not None and (scope["method"], path) == UPLOADS:
            return max(config.max_body_bytes, int(config.files_gb * 1e9) + FORM_BYTES)
        if path in WITH_IMAGES and self._context.takes_images_at_all:
            return config.max_bytes_with_images
        return config.max_body_bytes


def _decoded(scope: Scope, receive: Receive, max_bytes: int) -> "_Body":
    try:
        decoder = decoder_of(scope) if _header(scope, b"content-encoding") else None
        return _Body(receive, max_bytes, decoder)
    except ApiError as error:
        return _Body(receive, 0, refusal=error)


class _Body:
    """The body of one request as it arrives. It is refused if it exceeds `max_bytes` bytes, stops
    arriving, or arrives too slowly. The server drops the rest of a refused body."""

    def __init__(
        self,
        receive: Receive,
        max_bytes: int,
        decoder: Decoder | None = None,
        refusal: ApiError | None = None,
    ) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._refusal = refusal
        self._decoder = decoder
        self._num_bytes = 0
        self._is_whole = False
        self._end_s = time.monotonic() + WHOLE_BODY_S

    async def receive(self) -> Message:
        message = await self._next()
        if message["type"] != "http.request":
            return message
        self._is_whole = not message.get("more_body", False)
        data = message.get("body", b"")
        if self._decoder is not None and (data or self._num_bytes):
            data = self._inflated(self._decoder, data)
            message = {**message, "body": data}
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            raise ApiHttpError(self._refusal or too_large(self._max_bytes))
        return message

    async def _next(self) -> Message:
        """Return the next message. The wait is bounded until the body is complete; after that, the
        only message to come is the client's disconnect."""
        if self._is_whole:
            return await self._receive()
        seconds = min(BODY_S, self._end_s - time.monotonic())
        try:
            async with asyncio.timeout(seconds):  # wait_for may lose a cancellation
                return await self._receive()
        except TimeoutError:
            raise ApiHttpError(too_slow()) from None

    def _inflated(self, decoder: Decoder, data: bytes) -> bytes:
        try:
            return decoder.take(data, self._max_bytes - self._num_bytes, self._is_whole)
        except ApiError as error:
            raise ApiHttpError(error) from error


def too_slow() -> ApiError:
    text = (
        f"the body did not arrive in time: no data for {BODY_S:g} s, or not all of it in"
        f" {WHOLE_BODY_S:g} s; send the request again."
    )
    return ApiError(408, text, code="body_timeout", headers={"Connection": "close"})


def _header(scope: Scope, header: bytes) -> bytes:
    found: bytes = next((value for name, value in scope["headers"] if name == header), b"")
    return found


async def generating(request: fastapi.Request, api: Api) -> AsyncIterator[None]:
    """Count a request that generates; dependency of the generating routes. Raise ApiError while the
    server shuts down, and for a key at its limits.

    FastAPI ends the dependency when the response has been sent or the client has disconnected, so
    streaming handlers need no code for that.
    """
    async with open_request(api):
        if api.rates is not None and not api.peers.have_sent(request.scope):
            admit(api.rates, api, request.scope)
        await model_known(api, request.scope.get(MODEL))
        yield


@asynccontextmanager
async def open_request(context: ApiContext) -> AsyncIterator[None]:
    """Count one open request that generates. Raise ApiError 503 while the server shuts down."""
    if context.draining:
        text = "the server is shutting down and does not accept new requests; try again later."
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        raise ApiError(503, text, "server_error", code="draining", headers=headers)
    context.num_open += 1
    try:
        yield
    finally:
        context.num_open -= 1
