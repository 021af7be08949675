"""Plain ASGI around all routes: request ids, HEAD, and the headers of traces.

`app.py` puts the layers together. Those that refuse requests are in `limits.py` and `origins.py`.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.wire.logs import current_request
from quire.serve.error_handlers import error_answer
from quire.serve.http.ids import new_id
from quire.serve.observers.observed_client import TRACE_HEADERS

REQUEST_ID_HEADER = b"x-request-id"
MAX_ID_CHARS = 128
TRACE_NAMES = (b"traceparent", b"tracestate")


class RequestIds:
    """Puts X-Request-Id on every answer, and turns unexpected exceptions into responses.

    A client's own id is echoed, so that it finds its request again; inside, ids are server-made.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        shown = _client_id(scope) or new_id("req").encode()
        scope.setdefault("state", {})["request_id"] = shown.decode("ascii")
        current_request.set(shown.decode("ascii"))  # of this task, for its lines in the log
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
                raise  # the connection is closed in the middle of the answer
            await answer(scope, receive, send_with_id)


def _client_id(scope: Scope) -> bytes | None:
    """Return what the client calls this request, if it is one short word of printable ASCII."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and 0 < len(value) <= MAX_ID_CHARS:
            return bytes(value) if all(33 <= byte < 127 for byte in value) else None
    return None


class HeadAsGet:
    """Answers HEAD with status and headers of GET (RFC 9110, 9.3.2). The answer ends
    with them: whoever streams is told that nobody reads."""

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
    """Keeps W3C's trace headers of a request for those that are made of it."""

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
