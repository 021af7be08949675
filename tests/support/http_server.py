"""A server for tests: what it answers is given as bytes or as a coroutine over the connection."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import h11

Send = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True)
class Seen:
    """A request that arrived. headers: names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


Answer = Callable[[Seen, Send], Awaitable[None]]


@dataclass
class TestServer:
    """What arrived, on how many connections, and where the server is."""

    __test__ = False  # not a test class
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    num_connections: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)  # a client went away early


def head(status: int = 200, kind: str = "application/json", length: int | None = None) -> bytes:
    """The first lines of an answer: of this length, or chunked."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"HTTP/1.1 {status} Any\r\nContent-Type: {kind}\r\n{size}\r\n\r\n".encode()


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


LAST_CHUNK = b"0\r\n\r\n"


async def send_json(send: Send, value: Any, status: int = 200) -> None:
    body = json.dumps(value).encode()
    await send(head(status, length=len(body)) + body)


@asynccontextmanager
async def serving(answer: Answer, ssl: Any = None) -> AsyncIterator[TestServer]:
    """Every request is answered by the coroutine, on a free port of this machine."""
    state = TestServer()
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        state.num_connections += 1

        async def send(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            while (seen := await _read_request(reader)) is not None:
                state.seen.append(seen)
                gone = asyncio.ensure_future(reader.read(1))
                answering = asyncio.ensure_future(answer(seen, send))
                await asyncio.wait({gone, answering}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    answering.cancel()
                    state.left.set()
                    return
                answering.result()
                gone.cancel()
                await asyncio.wait({gone})
        except OSError:
            state.left.set()
        finally:
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=ssl)
    port = server.sockets[0].getsockname()[1]
    state.url = f"{'https' if ssl else 'http'}://localhost:{port}"
    try:
        yield state
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read_request(reader: asyncio.StreamReader) -> Seen | None:
    """None at the end of the connection."""
    state, request, body = h11.Connection(h11.SERVER), None, b""
    while True:
        event = state.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(1 << 16)
            if not data and request is None:
                return None
            state.receive_data(data)
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        else:
            break
    assert request is not None
    headers = {name.decode(): value.decode() for name, value in request.headers}
    return Seen(request.method.decode(), request.target.decode(), headers, body)
