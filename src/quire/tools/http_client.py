"""A small HTTP/1.1 client on asyncio and h11: requests and streams of server-sent events.

Input: an address such as http://127.0.0.1:8000. Output: whole responses, or a stream's `data:`
payloads as they arrive. It measures servers, so it does little work per chunk. It follows no
redirects and uses no proxies. A connection carries one exchange at a time, and is reused if the
exchange ended cleanly.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

import h11

from quire.base.errors import ConfigError, QuireError

READ_BYTES = 1 << 16
# Servers close idle connections after some seconds; uvicorn after 5.
REUSE_S = 2.0
DONE = "[DONE]"

Headers = Mapping[str, str]


class HttpError(QuireError):
    """A missing, broken or refusing response. `status` is HTTP's; 0 without a response."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Response:
    """A whole response. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """Parse the body. Raises HttpError if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise HttpError(
                f"the answer is not JSON ({error}): {self.text[:200]!r}", self.status
            ) from error


class EventParser:
    """Parses `text/event-stream` in pieces of any size, and returns the `data` of whole events.

    Lines end in LF or CR LF. Comments, event names, ids and retry times are ignored.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[str]:
        """Return the data of each event that this piece completes."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data.clear()
        return events


@dataclass
class _Connection:
    """One connection to the server, with its h11 state."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    state: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))
    idle_since_s: float = 0.0

    async def send(self, head: h11.Request, body: bytes) -> None:
        pieces = [self.state.send(head)]
        if body:
            pieces.append(self.state.send(h11.Data(body)))
        pieces.append(self.state.send(h11.EndOfMessage()))
        self.writer.write(b"".join(piece for piece in pieces if piece))
        await self.writer.drain()

    async def next_event(self) -> Any:
        while True:
            event = self.state.next_event()
            if event is not h11.NEED_DATA:
                return event
            self.state.receive_data(await self.reader.read(READ_BYTES))

    async def head(self) -> h11.Response:
        while True:
            event = await self.next_event()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise HttpError("the server closed the connection without an answer.")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body as they arrive."""
        while not isinstance(event := await self.next_event(), h11.EndOfMessage):
            yield event.data

    def renew(self) -> bool:
        """Prepare for the next exchange; return False if the connection is not reusable."""
        if self.state.our_state is not h11.DONE or self.state.their_state is not h11.DONE:
            return False
        self.state.start_next_cycle()
        self.idle_since_s = time.monotonic()
        return True

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self.idle_since_s < REUSE_S and not self.reader.at_eof()


class HttpClient:
    """Exchanges with one server. All uses must be on one event loop.

    url: scheme, host, port, and a path that is the prefix of all paths.
    headers: headers of every request. verify: whether to check an https server's certificate.
    """

    def __init__(
        self,
        url: str,
        headers: Headers | None = None,
        verify: bool = True,
        connect_timeout_s: float = 10.0,
    ) -> None:
        parts = _parts_of(url)
        self.url = url.rstrip("/")
        self._host, self._netloc = parts.hostname or "", parts.netloc.rpartition("@")[2]
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._headers = dict(headers or {})
        self._ssl = _ssl_context(verify) if parts.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_Connection] = []

    async def request(
        self,
        path: str,
        method: str = "GET",
        body: Any = None,
        headers: Headers | None = None,
        timeout_s: float | None = None,
    ) -> Response:
        """Run one exchange. body: bytes, or an object to send as JSON.

        Raises HttpError, also for a status that is not 2xx, with the server's message.
        """
        try:
            async with asyncio.timeout(timeout_s):
                async with self._exchange(path, method, body, headers) as (connection, head):
                    content = b"".join([piece async for piece in connection.pieces()])
        except TimeoutError as error:
            raise HttpError(f"{self.url}{path} did not answer within {timeout_s} s.") from error
        names = {name.decode().lower(): value.decode("latin-1") for name, value in head.headers}
        response = Response(head.status_code, names, content)
        if not 200 <= response.status < 300:
            raise HttpError(_refusal(response), response.status)
        return response

    async def stream_json(
        self, path: str, body: Any, headers: Headers | None = None, method: str = "POST"
    ) -> AsyncGenerator[str, None]:
        """Yield the `data` of each event, up to `[DONE]` or the end of the answer.

        A response that is not a stream is yielded as one payload. Closing the iterator early closes
        the connection. Raises HttpError as `request` does.
        """
        async with self._exchange(path, method, body, headers) as (connection, head):
            if not 200 <= head.status_code < 300:
                content = b"".join([piece async for piece in connection.pieces()])
                raise HttpError(_refusal(Response(head.status_code, {}, content)), head.status_code)
            kinds = [value for name, value in head.headers if name == b"content-type"]
            if not any(kind.startswith(b"text/event-stream") for kind in kinds):
                content = b"".join([piece async for piece in connection.pieces()])
                yield content.decode("utf-8", "replace")
                return
            parser, done = EventParser(), False
            async for piece in connection.pieces():
                for data in parser.feed(piece):
                    done = done or data == DONE
                    if not done:
                        yield data

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            await _close(self._idle.pop())

    @asynccontextmanager
    async def _exchange(
        self, path: str, method: str, body: Any, headers: Headers | None
    ) -> AsyncIterator[tuple[_Connection, h11.Response]]:
        """Send a request and read the head of the response; the caller reads the body inside."""
        content = body if isinstance(body, bytes) else b"" if body is None else _to_json(body)
        fields = {"Host": self._netloc, "Accept": "*/*", "Content-Length": str(len(content))}
        if body is not None:
            fields["Content-Type"] = "application/json"
        given = self._headers | dict(headers or {})
        replaced = {name.lower() for name in given}
        fields = {name: value for name, value in fields.items() if name.lower() not in replaced}
        connection = await self._connect()
        reusable = False
        try:
            target = self._prefix + path
            head = h11.Request(method=method, target=target, headers=[*(fields | given).items()])
            await connection.send(head, content)
            yield connection, await connection.head()
            reusable = connection.renew()
        except h11.LocalProtocolError as error:
            raise HttpError(f"{method} {path} cannot be sent: {error}.") from error
        except (h11.RemoteProtocolError, OSError) as error:
            raise HttpError(
                f"the connection to {self.url} broke before the answer was complete ({error})."
            ) from error
        finally:
            if reusable:
                self._idle.append(connection)
            else:
                connection.writer.close()

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh:
                return connection
            await _close(connection)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                streams = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        except ssl.SSLError as error:
            raise HttpError(f"no secure connection to {self.url}: {error}.") from error
        except (OSError, TimeoutError) as error:
            reason = str(error) or "it took too long"
            raise HttpError(
                f"nothing answers at {self.url} ({reason}); is the server running?"
            ) from error
        return _Connection(*streams)


async def first_model(client: HttpClient) -> str:
    """Return the first model that /v1/models lists. Raises ConfigError if there is none."""
    listed = (await client.request("/v1/models")).json()
    try:
        return str(listed["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise ConfigError(
            f"{client.url}/v1/models lists no model; name one with --model."
        ) from error


def _parts_of(url: str) -> SplitResult:
    """Split an address. Raises ConfigError for an invalid one."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:  # an invalid port, or an incomplete IPv6 address
        pass
    raise ConfigError(f"{url!r} is not a server's address; give one such as http://127.0.0.1:8000.")


async def _close(connection: _Connection) -> None:
    connection.writer.close()
    with suppress(OSError):  # the server closed it first
        await connection.writer.wait_closed()


def _ssl_context(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _refusal(response: Response) -> str:
    """Return the server's message, from OpenAI's or FastAPI's form of errors, or as text."""
    try:
        error_body = json.loads(response.body)
    except ValueError:
        error_body = response.text.strip()[:500]
    for key in ("error", "message", "detail"):
        if isinstance(error_body, dict) and key in error_body:
            error_body = error_body[key]
    return f"the server answered {response.status}: {error_body or 'without a reason'}"
