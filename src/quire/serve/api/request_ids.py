"""X-Request-Id on every answer, and an answer for exceptions that nobody expected.

A client's own id is echoed, so that it finds its request again; inside, ids are server-made.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.wire.logs import current_request
from quire.serve.api.context import new_id
from quire.serve.api.error_shapes import error_answer

HEADER = b"x-request-id"
MAX_CHARS = 128


class RequestIds:
    """Plain ASGI, around everything else of the app."""

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
                message = {**message, "headers": [*message["headers"], (HEADER, shown)]}
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
        if name == HEADER and 0 < len(value) <= MAX_CHARS:
            return bytes(value) if all(33 <= byte < 127 for byte in value) else None
    return None
