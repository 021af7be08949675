"""Server-sent events: chunks as bytes, and the response that sends them while the client listens.

Once a stream has begun its status is fixed: what fails later becomes an event with the error's
body. So the first event is awaited before the response starts, but not for long: what the engine
refuses it refuses within milliseconds, and a client whose prompt takes a while sees the headers.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import fastapi
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.serve.api.disconnect import disconnected, unless_disconnected
from quire.serve.api.errors import error_body, request_id_of

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"

HEADERS_AFTER_S = 0.25

Events = AsyncGenerator[bytes, None]
ErrorEvent = Callable[[BaseException, str], bytes]  # of an error and the id of its request
First = asyncio.Task[bytes]
encode = msgspec.json.Encoder().encode


def event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"


def error_event(error: BaseException, request_id: str = "") -> bytes:
    """Return the end of a stream that fails."""
    body = error_body(error, request_id)[1]
    return b"data: " + json.dumps(body).encode() + b"\n\n" + DONE


async def start_stream(
    request: fastapi.Request, events: Events, last: ErrorEvent = error_event
) -> Response:
    """Wait for the first event, HEADERS_AFTER_S at most; what goes wrong until then is raised, for
    a status of its own. last: makes the end of a stream that fails."""
    first = asyncio.ensure_future(_first(events))
    try:
        await unless_disconnected(request.receive, _look(first))
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        raise
    return EventStream(first, events, request_id_of(request), last)


async def _first(events: Events) -> bytes:
    return await anext(events)


async def _look(first: First) -> None:
    """Wait for a while. Raises what the first event raised instead of being there."""
    await asyncio.wait((first,), timeout=HEADERS_AFTER_S)
    if first.done():
        first.result()


class EventStream(Response):
    """Sends events until they end or the client goes; either way the events' generator is closed,
    which ends what it generates."""

    media_type = "text/event-stream"

    def __init__(self, first: First, rest: Events, request_id: str, last: ErrorEvent) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._request_id = request_id
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            gone.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await _send_body(send, await self._first)
            async for data in self._rest:
                await _send_body(send, data)
        except Exception as error:
            await _send_body(send, self._last(error, self._request_id))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_body(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
