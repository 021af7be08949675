"""One response in progress: from the chunks of its chat to events and to the store."""

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

# Wait for the first chunk before a stream begins without it. The engine rejects requests sooner. It
# is shorter than the wait of `start_stream` for the first event.
BEGIN_S = 0.2


@dataclass(frozen=True)
class Turn:
    """One response in progress."""

    api: ApiContext
    body: ResponsesRequest
    owner: str
    items: list[Json]  # items of its own input
    chat: Chat  # chat that generates it
    choice: ChatChoice
    writer: ResponseWriter  # converter of chunks to events

    @property
    def id(self) -> str:
        found: str = self.writer.response["id"]
        return found

    async def whole(self) -> Json:
        """Return the response when it has ended. Raises the error of a failed response."""
        async with aclosing(self.events()) as pieces:
            async for _ in pieces:
                pass
        self.keep()
        return self.writer.response

    async def stream(self, request_id: str) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of the events. An error before the first event is raised; a later one
        becomes the last event."""
        has_begun = False
        try:
            async with aclosing(self.events()) as pieces:
                async for events in pieces:
                    has_begun = True
                    data = b"".join(map(event, events))
                    if self.writer.is_over:
                        self.keep()  # before a client can refer to it
                    yield data
        except Exception as error:
            if not has_begun or self.writer.is_over:
                raise
            last = self.writer.stop("failed", error_json(error, request_id))
            self.keep()
            yield b"".join(map(event, last))

    def start(self) -> RunningResponse:
        """Begin to generate the response in the background. Raises ApiError if too many run."""
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
        """Store the ended response, unless the request disabled that."""
        if self.body.store is not False:
            stored = Stored.of(self.writer.response, self.items, events)
            self.api.responses.store.put(self.owner, self.id, stored)

    async def _open_events(self) -> Chunks:
        """Yield the events like `events`, as an open request of its own."""
        async with open_request(self.api), aclosing(self.events()) as pieces:
            async for events in pieces:
                yield events

    async def events(self) -> Chunks:
        """Yield the events of the response in lists. Raises the error of a failed response."""
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
        return [event_json for choice in choices for event_json in self.writer.take(choice)]

    def _usage(self) -> Json:
        found = usage_json([[self.choice]])
        details = found.get("completion_tokens_details", {})
        num_cached, retention = self.choice.usage.num_cached, self.chat.job.retention
        is_retained = retention is not None and retention.is_retained
        num_written = found["prompt_tokens"] - num_cached if is_retained else 0
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": num_cached,
                "cache_write_tokens": num_written,
            },
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
            "total_tokens": found["total_tokens"],
        }


async def _next(pieces: Chunks) -> list[Json]:
    """Return the next chunks; an empty list at the end."""
    return await anext(pieces, [])
