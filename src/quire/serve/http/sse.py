"""Server-sent events: chunks as bytes, and the response that sends them while the client listens.

Once a stream has begun, its status is fixed, and a later error becomes an event with the error's
body. So the first event is awaited before the response starts, but only briefly. The engine refuses
a bad request within milliseconds, and a client with a long prompt sees the headers early. Work for
a client is cancelled when its connection closes.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import fastapi
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.serve.errors import ApiError, error_body
from quire.serve.http.middleware import request_id_of

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
ALIVE = b": the answer goes on\n\n"  # a comment, which event readers skip

HEADERS_AFTER_S = 0.25

Events = AsyncGenerator[bytes, None]
ErrorEvent = Callable[[BaseException, str], bytes]  # (error, id of its request) -> last event
First = asyncio.Task[bytes]
encode = msgspec.json.Encoder().encode
T = TypeVar("T")
CLIENT_CLOSED = 499


def event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"


def error_event(error: BaseException, request_id: str = "") -> bytes:
    """Return the last event of a stream that fails."""
    body = error_body(error, request_id)[1]
    return b"data: " + json.dumps(body).encode() + b"\n\n" + DONE


async def start_stream(
    request: fastapi.Request,
    events: Events,
    last: ErrorEvent = error_event,
    alive_s: float | None = None,
) -> Response:
    """Return the response of a stream, after waiting up to HEADERS_AFTER_S for the first event. An
    error before that is raised, and so gets a status of its own. last: makes the last event of a
    failed stream. alive_s: quiet seconds before a comment is sent; None takes the setting."""
    first = asyncio.ensure_future(_first(events))
    try:
        await unless_disconnected(request.receive, _wait_briefly(first))
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        raise
    if alive_s is None:
        alive_s = request.app.state.context.config.sse_keep_alive_interval
    return EventStream(first, events, request_id_of(request), last, alive_s)


async def _first(events: Events) -> bytes:
    return await anext(events)


async def _wait_briefly(first: First) -> None:
    """Wait briefly for the first event. Raises the error if it failed already."""
    await asyncio.wait((first,), timeout=HEADERS_AFTER_S)
    if first.done():
        first.result()


class EventStream(Response):
    """Response that sends events until they end or the client disconnects. In both cases it closes
    the events' generator, which stops the generation. alive_s: quiet seconds before a comment is
    sent; 0 sends none."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: First,
        rest: Events,
        request_id: str,
        last: ErrorEvent,
        alive_s: float = 0.0,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._request_id = request_id
        self._last = last
        self._alive_s = alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(send)
        sending = asyncio.ensure_future(self._send(body))
        disconnect = asyncio.ensure_future(disconnected(receive))
        tasks: list[asyncio.Future[Any]] = [sending, disconnect]
        if self._alive_s:
            tasks.append(asyncio.ensure_future(body.keep_alive(self._alive_s)))
        try:
            await asyncio.wait((sending, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._rest.aclose()

    async def _send(self, body: "_Body") -> None:
        await body.begin(self.raw_headers)
        try:
            await body.send(await self._first)
            async for data in self._rest:
                await body.send(data)
        except Exception as error:
            await body.send(self._last(error, self._request_id))
        await body.end()


class _Body:
    """Body of a response, which several tasks write in turn."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self._sent_s: float | None = None  # time of the last write; None outside of the body

    async def begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._sent_s = asyncio.get_running_loop().time()

    async def send(self, data: bytes) -> None:
        async with self._turn:
            await self._write(data)

    async def end(self) -> None:
        async with self._turn:
            self._sent_s = None
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep_alive(self, alive_s: float) -> None:
        """Send a comment whenever the stream was quiet for `alive_s` seconds."""
        wait_s = alive_s
        while True:
            await asyncio.sleep(wait_s)
            wait_s = alive_s - self._quiet_s()
            if wait_s <= 0:
                async with self._turn:
                    if self._quiet_s() >= alive_s:  # still quiet, after the wait for the lock
                        await self._write(ALIVE)
                wait_s = alive_s

    async def _write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent_s = asyncio.get_running_loop().time()

    def _quiet_s(self) -> float:
        """Return the seconds since the last write; 0.0 before the body begins and after its end."""
        now_s = asyncio.get_running_loop().time()
        return 0.0 if self._sent_s is None else now_s - self._sent_s


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result. If the client disconnects first, cancel the work and raise
    ApiError."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(CLIENT_CLOSED, "the client closed the connection.", code="client_closed")
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)
