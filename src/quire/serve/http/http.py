"""HTTP/1.1 for slow clients: uvicorn's protocol with timeouts, WebSockets for text, a strict h11.

uvicorn times out a connection between two requests, but not one that never finishes the head of its
request. A few thousand such connections would use up all open files.

h11 accepts a head of any size that arrives at once, and requests whose end is ambiguous. A proxy in
front may see another end than this server. Then clients can send requests past the proxy's rules
("request smuggling", RFC 9112, 11.2). Ambiguous requests are therefore refused, and the connection
is closed. Bodies in very small chunks are refused, too, because finding the ends of chunks would
dominate all other work.
"""

import asyncio
import codecs
import errno
import logging
import re
import socket
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from quire.engine.wire.wire import NO_RESOURCES
from quire.serve.errors import ApiError, error_response

MAX_HEAD_BYTES = 1 << 16
MAX_CHUNKS = 1 << 14  # chunks of one body
STATUS_OF_LARGE_HEADS = 431

HEAD_END = re.compile(rb"\n\r?\n")
ODD_LINE_END = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]|\0")
LENGTH = re.compile(rb"\ncontent-length[ \t]*:([^\r\n]*)", re.IGNORECASE)
CODING = re.compile(rb"\ntransfer-encoding[ \t]*:", re.IGNORECASE)


class StrictConnection(h11.Connection):
    """Server side of a connection. refusal: the error in the client's data, after an error."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.refusal: h11.RemoteProtocolError | None = None
        self._num_chunks = 0

    def next_event(self) -> Any:
        """Return the next event. Raise h11.RemoteProtocolError for invalid or ambiguous HTTP."""
        try:
            if self.their_state is h11.IDLE:
                self._num_chunks = 0
                check_head(self.trailing_data[0])
            event = super().next_event()
            if isinstance(event, h11.Data) and event.chunk_start:
                self._num_chunks += 1
                if self._num_chunks > MAX_CHUNKS:
                    raise _refused(f"the body comes in more than {MAX_CHUNKS} chunks")
            return event
        except h11.RemoteProtocolError as error:
            self.refusal = error
            raise


def check_head(data: bytes) -> None:
    """Raise h11.RemoteProtocolError if the data begins with a complete head that is refused."""
    end = HEAD_END.search(data, 0, MAX_HEAD_BYTES + 2)
    if end is None or end.end() > MAX_HEAD_BYTES:
        if len(data) > MAX_HEAD_BYTES:
            text = f"its head has more than {MAX_HEAD_BYTES} bytes"
            raise _refused(text, STATUS_OF_LARGE_HEADS)
        return
    head = data[: end.end()]
    if ODD_LINE_END.search(head):
        raise _refused("a line of its head ends otherwise than with CR LF, or is folded")
    lengths = LENGTH.findall(head)
    if len(lengths) > 1 or any(b"," in length for length in lengths):
        raise _refused("it has more than one Content-Length")
    if CODING.search(head):
        if lengths:
            raise _refused("it has both Content-Length and Transfer-Encoding")
        if not head.partition(b"\r\n")[0].endswith(b"HTTP/1.1"):
            raise _refused("only HTTP/1.1 has Transfer-Encoding")


def _refused(text: str, status: int = 400) -> h11.RemoteProtocolError:
    return h11.RemoteProtocolError(text, error_status_hint=status)


logger = logging.getLogger("quire")

HEAD_S = 60.0
MAX_REASON_CHARS = 200
NOT_UTF8 = 1007  # close code of a WebSocket (RFC 6455, 7.4.1)


class TimedProtocol(H11Protocol):
    """Protocol that closes a connection if a request's head is not complete within `HEAD_S`. The
    time begins with the connection, or with the first byte after a response."""

    _closing: asyncio.TimerHandle | None = None
    conn: StrictConnection
    _is_upgraded = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = StrictConnection()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Hand the connection to the WebSocket protocol, whose pings find disconnected clients. If
        only that protocol finds the head invalid, answer with a 400 here."""
        self._is_upgraded = True
        self._forget()
        super().handle_websocket_upgrade(event)
        other = cast(WebSocketsSansIOProtocol, self.transport.get_protocol())
        if not other.handshake_initiated:
            self.send_400_response("Invalid WebSocket handshake.")

    def send_400_response(self, msg: str) -> None:
        """Send an error response with the reason, and close the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # a response is already partly sent
            return
        if self.cycle is not None:  # the handler has not answered yet, and must not any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        reason = self.conn.refusal
        status = 400 if reason is None else reason.error_status_hint
        text = f"the request cannot be read: {str(reason or msg)[:MAX_REASON_CHARS].rstrip('.')}."
        answer = error_response(ApiError(status, text, code="unreadable_request"))
        headers = [*answer.raw_headers, (b"connection", b"close")]
        phrase = HTTPStatus(status).phrase.encode()
        for event in (
            h11.Response(status_code=status, headers=headers, reason=phrase),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        """Start the timer while no request is open; stop it otherwise."""
        if self._is_upgraded:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._closing is None:
            self._closing = self.loop.call_later(HEAD_S, self.transport.close)

    def _forget(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


class TextProtocol(WebSocketsSansIOProtocol):
    """WebSocket protocol that closes a connection whose text is not UTF-8. uvicorn would log a
    traceback for each. It also marks a refused handshake as answered, or uvicorn logs an error."""

    _decoder: codecs.IncrementalDecoder | None = None  # decoder of the incoming text message

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True

    def handle_text(self, event: Any) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        if self._is_text(event):
            super().handle_text(event)

    def handle_bytes(self, event: Any) -> None:
        self._decoder = None
        super().handle_bytes(event)

    def handle_cont(self, event: Any) -> None:
        if self._is_text(event):
            super().handle_cont(event)

    def _is_text(self, event: Any) -> bool:
        if self._decoder is None:
            return True
        try:
            self._decoder.decode(event.data, final=event.fin)
        except UnicodeDecodeError:
            self.conn.fail(NOT_UTF8, "the text is not UTF-8")
            self.handle_parser_exception()
            return False
        return True


class Listener(socket.socket):
    """Listening socket for times without free descriptors. `accept` fails once; its next call
    reports that no connection waits, which ends asyncio's round. Clients wait in the backlog."""

    _has_failed = False

    def accept(self) -> tuple[socket.socket, Any]:
        if self._has_failed:
            self._has_failed = False
            raise BlockingIOError(errno.EAGAIN, "no connection can be accepted now")
        try:
            return super().accept()
        except OSError as error:
            self._has_failed = error.errno in NO_RESOURCES
            raise


def report_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle an exception of the event loop. Log one line for a failed `Listener`, which happens
    once a second, and the usual report for other errors."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in NO_RESOURCES:
        reason = error.strerror
        logger.error(
            "no connection can be accepted (%s); the server tries again every second. Raise the"
            " limit of open files (ulimit -n), or connect fewer clients.",
            reason,
        )
        return
    loop.default_exception_handler(context)
