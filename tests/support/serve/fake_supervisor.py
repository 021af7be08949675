"""The supervisor's end of a `ModelLink`, which says what a test has it say."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from quire.engine.wire.wire import LENGTH, body_length
from quire.serve.several.link import ModelLink
from quire.serve.several.messages import ModelState, States, ToManager, manager_codec


class FakeKeeper:
    """heard: what came in, oldest first."""

    def __init__(self) -> None:
        self.heard: list[ToManager] = []
        self._news = asyncio.Event()
        self._codec = manager_codec()
        self.writer: asyncio.StreamWriter | None = None

    async def follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.tell_states(a="loaded", b="unloaded")
        try:
            while True:
                body = await reader.readexactly(body_length(await reader.readexactly(LENGTH.size)))
                self.heard.append(self._codec.decode(body))
                self._news.set()
        except asyncio.IncompleteReadError:
            writer.close()

    def tell(self, *messages: msgspec.Struct) -> None:
        assert self.writer is not None
        for message in messages:
            self.writer.write(self._codec.encode(message))

    def tell_states(self, **states: str) -> None:
        self.tell(States([ModelState(name, state) for name, state in states.items()]))

    async def hear(self, num_messages: int) -> list[ToManager]:
        """All that was heard, once there is so much."""
        async with asyncio.timeout(10.0):
            while len(self.heard) < num_messages:
                self._news.clear()
                await self._news.wait()
        return self.heard


@asynccontextmanager
async def linked(folder: Path, wait_s: float = 10.0) -> AsyncIterator[tuple[ModelLink, FakeKeeper]]:
    """A link, and who is at its other end."""
    keeper, path = FakeKeeper(), folder / "keeper.sock"
    server = await asyncio.start_unix_server(keeper.follow, path)
    link = ModelLink(path, wait_s)
    await link.start()
    try:
        yield link, keeper
    finally:
        await link.close()
        if keeper.writer is not None:
            keeper.writer.close()
        server.close()
