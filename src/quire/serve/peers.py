"""Forwarding between the API processes of one server, each of which listens on a Unix socket.

An id of an object in the memory of one process contains the number of that process. Another process
that receives a request for the id forwards the request unchanged, including its key, and returns
the response. The sockets are in the core's private directory.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

import fastapi
import h11
from starlette.responses import Response
from starlette.types import Scope

from quire.serve.bodies.reading import BoundedRequest
from quire.serve.errors import ApiError
from quire.serve.http.middleware import request_id_of
from quire.serve.http.sse import ErrorEvent, start_stream, unless_disconnected

PIECE_BYTES = 1 << 16
RETRY_AFTER_S = 5
BACKLOG = 128
EVENTS = b"text/event-stream"
# Headers of the connection or of the body's coding, which are not forwarded. The headers of the
# requesting page are not forwarded either, because the first process has checked them (origins.py).
OWN = {
    b"connection", b"keep-alive", b"transfer-encoding", b"content-encoding", b"content-length",
    b"accept-encoding", b"expect", b"upgrade", b"te", b"host", b"date", b"server", b"x-request-id",
    b"origin", b"sec-fetch-site",
}  # fmt: skip

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Peers:
    """The API processes of a server, as one of them sees them.

    number: this process; count: all processes. home: directory of the sockets, None for a process
    without peers. has_tls: whether the sockets use TLS, as the server's own socket does.
    """

    number: int = 0
    count: int = 1
    home: Path | None = None
    has_tls: bool = False

    def listener(self) -> socket.socket | None:
        """Return a listening socket for the requests of other processes; None if there are none."""
        if self.home is None or self.count == 1:
            return None
        path = self._path(self.number)
        path.unlink(missing_ok=True)  # left by a process that died
        found = socket.socket(socket.AF_UNIX)
        found.bind(str(path))
        found.listen(BACKLOG)
        return found

    def is_other(self, number: int | None) -> TypeGuard[int]:
        """Return whether `number` is another process of this server."""
        return number is not None and self.home is not None and self.number != number < self.count

    def have_sent(self, scope: Scope) -> bool:
        """Return whether another process has forwarded this request, and so has admitted it."""
        own = None if self.home is None else (str(self._path(self.number)), None)
        return own is not None and tuple(scope.get("server") or ()) == own

    async def pass_on(self, request: fastapi.Request, number: int, last: ErrorEvent) -> Response:
        """Forward a request to another process and return its response. last: event that ends a
        stream whose connection breaks. Raises ApiError if the process does not answer."""
        exchange = _Exchange()
        body = b""
        if isinstance(request, BoundedRequest):
            body = bytes(request.whole)
        else:
            await request.body()  # read it to the end; the route does not use it
        try:
            sending = self._send(exchange, request, body, number)
            status, headers = await unless_disconnected(request.receive, sending)
            forwarded = [(name, value) for name, value in headers if name not in OWN]
            if dict(forwarded).get(b"content-type", b"").startswith(EVENTS):
                response = await start_stream(request, exchange.pieces(), last)
            else:
                whole = await unless_disconnected(request.receive, exchange.whole())
                response = Response(whole, status)
        except (OSError, h11.ProtocolError) as error:
            exchange.close()
            raise _unreachable() from error
        except BaseException:
            exchange.close()
            raise
        for name, value in forwarded:
            response.headers[name.decode("latin-1")] = value.decode("latin-1")
        return response

    async def _send(
        self, exchange: "_Exchange", request: fastapi.Request, body: bytes, number: int
    ) -> tuple[int, Headers]:
        """Forward a request; return status and headers of the response."""
        scope = request.scope
        path = scope["raw_path"].removeprefix(scope.get("root_path", "").encode())
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        headers = [(name, value) for name, value in scope["headers"] if name not in OWN]
        headers += [
            (b"host", b"peer"),
            (b"connection", b"close"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id_of(request).encode()),
        ]
        context = _any_certificate() if self.has_tls else None
        await exchange.open(self._path(number), context)
        method = scope["method"].encode()
        return await exchange.send_request(
            h11.Request(method=method, target=path + query, headers=headers), body
        )

    def _path(self, number: int) -> Path:
        assert self.home is not None
        return self.home / f"api-{number}.sock"


@dataclass
class _Exchange:
    """One forwarded request and its response, on a connection of its own."""

    _connection: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))
    _reader: asyncio.StreamReader | None = None
    _writer: asyncio.StreamWriter | None = None

    async def open(self, path: Path, context: ssl.SSLContext | None) -> None:
        name = "" if context is None else "peer"
        self._reader, self._writer = await asyncio.open_unix_connection(
            path, ssl=context, server_hostname=name or None
        )

    async def send_request(self, head: h11.Request, body: bytes) -> tuple[int, Headers]:
        """Send the request with one write; return status and headers of the response."""
        assert self._writer is not None
        events: list[h11.Event] = [head, h11.Data(data=body), h11.EndOfMessage()]
        self._writer.write(b"".join([self._connection.send(event) or b"" for event in events]))
        await self._writer.drain()
        while not isinstance(event := await self._next(), h11.Response):
            pass
        return event.status_code, list(event.headers)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of the response body as they arrive, then close the connection."""
        try:
            while not isinstance(event := await self._next(), h11.EndOfMessage):
                if isinstance(event, h11.Data):
                    yield bytes(event.data)
        finally:
            self.close()

    async def whole(self) -> bytes:
        """Return the whole response body."""
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()

    async def _next(self) -> h11.Event:
        assert self._reader is not None
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            self._connection.receive_data(await self._reader.read(PIECE_BYTES))
        if not isinstance(event, h11.Event):
            raise h11.RemoteProtocolError("the answer has ended")
        return event


def _any_certificate() -> ssl.SSLContext:
    """Return a TLS context that accepts any certificate: the directory protects the socket."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _unreachable() -> ApiError:
    text = "the API process that holds this id does not answer; try again later."
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(503, text, "server_error", code="process_gone", headers=headers)
