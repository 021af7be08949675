"""One response while it is made: from the chunks of its chat to events and to the store."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from quire.serve.context import ApiContext
from quire.serve.http.limits import open_request
from quire.serve.pipeline.answer import Answer, usage_json
from quire.serve.pipeline.chat_choice import ChatChoice
from quire.serve.pipeline.requests import Chat
from quire.serve.responses.background import RunningResponse, error_json, event
from quire.serve.responses.body import ResponsesRequest
from quire.serve.responses.store import Stored
from quire.serve.responses.writer import ResponseWriter

Json = dict[str, Any]
Chunks = AsyncGenerator[list[Json], None]

# What the engine refuses it refuses sooner; later a stream begins without a token. Below what
# `start_stream` waits for the first event.
BEGIN_S = 0.2


@dataclass(frozen=True)
class Turn:
    """items: of its own input. chat: what answers it. writer: makes events of the answer."""

    api: ApiContext
    body: ResponsesRequest
    owner: str
    items: list[Json]
    chat: Chat
    choice: ChatChoice
    writer: ResponseWriter

    @property
    def id(self) -> str:
        found: str = self.writer.response["id"]
        return found

    async def whole(self) -> Json:
        """Return the response when it is over. Raises what makes it fail."""
        async with aclosing(self.events()) as pieces:
            async for _ in pieces:
                pass
        self.keep()
        return self.writer.response

    async def stream(self, request_id: str) -> AsyncGenerator[bytes, None]:
        """Yield the events as they are sent. What fails before the first is raised, what fails
        later is the last event."""
        has_begun = False
        try:
            async with aclosing(self.events()) as pieces:
                async for events in pieces:
                    has_begun = True
                    data = b"".join(map(event, events))
                    if self.writer.is_over:
                        self.keep()  # before a client can name it
                    yield data
        except Exception as error:
            if not has_begun or self.writer.is_over:
                raise
            last = self.writer.stop("failed", error_json(error, request_id))
            self.keep()
            yield b"".join(map(event, last))

    def start(self) -> RunningResponse:
        """Begin to make the response in the background. Raises ApiError if too much is there."""
        responses, keeps_events = self.api.responses, bool(self.body.stream)
        responses.check_room()

        def keep(events: Sequence[bytes]) -> None:
            forget()
            self.keep(events if keeps_events else None)

        running = RunningResponse(self.id, lambda: self.writer.response, self.writer.stop, keep)
        forget = responses.begin(self.owner, running)
        running.start(self._open_events())
        return running

    def keep(self, events: Sequence[bytes] | None = None) -> None:
        """Put the response, which is over, into the store, if it is to be there."""
        if self.body.store is not False:
            stored = Stored.of(self.writer.response, self.items, events)
            self.api.responses.store.put(self.owner, self.id, stored)

    async def _open_events(self) -> Chunks:
        """Do what `events` does, as a request of its own."""
        async with open_request(self.api), aclosing(self.events()) as pieces:
            async for events in pieces:
                yield events

    async def events(self) -> Chunks:
        """Yield the events of the response. Raises what makes it fail."""
        api, chat = self.api, self.chat
        answer = Answer(api.client, chat.plan, {}, [chat.job], [[self.choice]], chat.hooks)
        async with aclosing(answer.chunks()) as pieces:
            first = asyncio.ensure_future(_next(pieces))
            try:
                await asyncio.wait((first,), timeout=BEGIN_S)
                if first.done():
                    first.result()
                yield self.writer.begin()
                chunks = await first
                while chunks:
                    if events := self._events_of(chunks):
                        yield events
                    chunks = await _next(pieces)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
        yield self.writer.end(self._usage(), int(time.time()))

    def _events_of(self, chunks: list[Json]) -> list[Json]:
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return [told for choice in choices for told in self.writer.take(choice)]

    def _usage(self) -> Json:
        found = usage_json([[self.choice]])
        details = found.get("completion_tokens_details", {})
        cached = {"cached_tokens": found["prompt_tokens_details"]["cached_tokens"]}
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": cached | {"cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
            "total_tokens": found["total_tokens"],
        }


async def _next(pieces: Chunks) -> list[Json]:
    """Return the next chunks; none at the end."""
    return await anext(pieces, [])
