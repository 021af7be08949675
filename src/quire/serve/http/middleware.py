"""Ids of requests and responses, and plain ASGI middleware: request ids, HEAD, trace headers.

`app.py` puts the layers together. The layers that refuse requests are in `limits.py` and
`origins.py`.
"""

import asyncio
import uuid

import fastapi
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.wire.logs import current_request
from quire.serve.error_handlers import error_answer
from quire.serve.observers.observed_client import TRACE_HEADERS

REQUEST_ID_HEADER = b"x-request-id"
MAX_ID_CHARS = 128
TRACE_NAMES = (b"traceparent", b"tracestate")


class RequestIds:
    """Middleware that adds X-Request-Id to every response and answers unexpected exceptions.

    It echoes the client's own id, if there is one. Ids of engine requests never come from clients.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        shown = _client_id(scope) or new_id("req").encode()
        scope.setdefault("state", {})["request_id"] = shown.decode("ascii")
        current_request.set(shown.decode("ascii"))  # id for this task's log lines
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message["headers"], (REQUEST_ID_HEADER, shown)]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            answer = error_answer(error, scope)  # also writes the log
            if started:
                raise  # the server then closes the connection amid the response
            await answer(scope, receive, send_with_id)


def _client_id(scope: Scope) -> bytes | None:
    """Return the client's id of this request, if it is a short word of printable ASCII."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and 0 < len(value) <= MAX_ID_CHARS:
            return bytes(value) if all(33 <= byte < 127 for byte in value) else None
    return None


class HeadAsGet:
    """Middleware that answers HEAD with status and headers of GET (RFC 9110, 9.3.2). After them,
    the handler sees a disconnect, so a stream ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        ended = asyncio.Event()

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                ended.set()

        async def receive_until_then() -> Message:
            coming = asyncio.ensure_future(receive())
            ending = asyncio.ensure_future(ended.wait())
            try:
                await asyncio.wait((coming, ending), return_when=asyncio.FIRST_COMPLETED)
                return coming.result() if coming.done() else {"type": "http.disconnect"}
            finally:
                coming.cancel()
                ending.cancel()

        await self._app({**scope, "method": "GET"}, receive_until_then, send_head)


class TraceHeaders:
    """Middleware that stores a request's W3C trace headers for the engine requests made from it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = {
            name.decode(): value.decode("latin-1")
            for name, value in scope.get("headers", ())
            if name in TRACE_NAMES
        }
        token = TRACE_HEADERS.set(found)
        try:
            await self._app(scope, receive, send)
        finally:
            TRACE_HEADERS.reset(token)


def request_id_of(request: fastapi.Request) -> str:
    """Return the id in the response's X-Request-Id, which the log shows, too."""
    return str(request.scope.get("state", {}).get("request_id", ""))


def answer_id_of(request_id: str) -> str:
    """Return the response id of an engine request. A completion has one engine request per prompt,
    and a retained completion has one prompt."""
    return request_id.removesuffix("-0") if request_id.startswith("cmpl-") else request_id


def new_id(prefix: str) -> str:
    """Return a unique id such as cmpl-3f2a...; clients cannot choose these ids."""
    return f"{prefix}-{uuid.uuid4().hex}"
