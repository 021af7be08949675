"""Server-sent events: chunks as bytes, and the response that sends them while the client listens.

Once a stream has begun its status is fixed: what fails later becomes an event with the error's
body. So the first event is awaited before the response starts, but not for long: what the engine
refuses it refuses within milliseconds, and a client whose prompt takes a while sees the headers.
Work for a client is cancelled when its connection closes.
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
from quire.serve.http.ids import request_id_of

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
ALIVE = b": the answer goes on\n\n"  # a comment, which readers of events pass over

HEADERS_AFTER_S = 0.25

Events = AsyncGenerator[bytes, None]
ErrorEvent = Callable[[BaseException, str], bytes]  # of an error and the id of its request
First = asyncio.Task[bytes]
encode = msgspec.json.Encoder().encode
T = TypeVar("T")
CLIENT_CLOSED = 499


def event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"


def error_event(error: BaseException, request_id: str = "") -> bytes:
    """Return the end of a stream that fails."""
    body = error_body(error, request_id)[1]
    return b"data: " + json.dumps(body).encode() + b"\n\n" + DONE


async def start_stream(
    request: fastapi.Request,
    events: Events,
    last: ErrorEvent = error_event,
    alive_s: float | None = None,
) -> Response:
    """Wait for the first event, HEADERS_AFTER_S at most; what goes wrong until then is raised, for
    a status of its own. last: makes the end of a stream that fails. alive_s: seconds without an
    event after which a comment is sent; None: as the server's settings say."""
    first = asyncio.ensure_future(_first(events))
    try:
        await unless_disconnected(request.receive, _look(first))
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        raise
    if alive_s is None:
        alive_s = request.app.state.context.config.sse_keep_alive_interval
    return EventStream(first, events, request_id_of(request), last, alive_s)


async def _first(events: Events) -> bytes:
    return await anext(events)


async def _look(first: First) -> None:
    """Wait for a while. Raises what the first event raised instead of being there."""
    await asyncio.wait((first,), timeout=HEADERS_AFTER_S)
    if first.done():
        first.result()


class EventStream(Response):
    """Sends events until they end or the client goes; either way the events' generator is closed,
    which ends what it generates. alive_s: after so many seconds without one a comment is sent; 0 is
    never."""

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
        gone = asyncio.ensure_future(disconnected(receive))
        tasks: list[asyncio.Future[Any]] = [sending, gone]
        if self._alive_s:
            tasks.append(asyncio.ensure_future(body.keep_alive(self._alive_s)))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
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
    """The body of a response, in pieces of several tasks, one after the other."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self._sent_s: float | None = None  # when the last piece was; None before and behind all

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
        """Send a comment whenever nothing was sent for so long."""
        wait_s = alive_s
        while True:
            await asyncio.sleep(wait_s)
            wait_s = alive_s - self._quiet_s()
            if wait_s <= 0:
                async with self._turn:
                    if self._quiet_s() >= alive_s:  # also after it was waited for the turn
                        await self._write(ALIVE)
                wait_s = alive_s

    async def _write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent_s = asyncio.get_running_loop().time()

    def _quiet_s(self) -> float:
        """Return for how long nothing was sent, while something may be."""
        now_s = asyncio.get_running_loop().time()
        return 0.0 if self._sent_s is None else now_s - self._sent_s


async def disconnected(receive: Receive) -> None:
    """Wait until the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result. Raises ApiError if the client goes first; the work is cancelled
    then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(CLIENT_CLOSED, "the client closed the connection.", code="client_closed")
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
