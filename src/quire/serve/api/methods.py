"""Methods of HTTP that no route names: HEAD, which is GET without its body, and what is allowed."""

import asyncio
from typing import Any

from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


class HeadAsGet:
    """Plain ASGI: answers HEAD with status and headers of GET (RFC 9110, 9.3.2). The answer ends
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


def allowed_methods(routes: list[Any], scope: Scope) -> list[str]:
    """Return the methods that the routes at a request's path answer."""
    found = []
    for method in METHODS:
        asked = "GET" if method == "HEAD" else method
        if any(route.matches({**scope, "method": asked})[0] is Match.FULL for route in routes):
            found.append(method)
    return found
