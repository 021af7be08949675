"""The headers by which a request belongs to a client's trace, on their way to where it ends."""

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.serve.api.observed_client import TRACE_HEADERS

NAMES = (b"traceparent", b"tracestate")


class TraceHeaders:
    """Plain ASGI: keeps W3C's trace headers of a request for those that are made of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = {
            name.decode(): value.decode("latin-1")
            for name, value in scope.get("headers", ())
            if name in NAMES
        }
        token = TRACE_HEADERS.set(found)
        try:
            await self._app(scope, receive, send)
        finally:
            TRACE_HEADERS.reset(token)
