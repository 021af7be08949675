"""One response on its way: made of a body, through the chat that answers it, to events and to the
store."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from quire.base.errors import RequestError
from quire.serve.api.bodies.open_body import check_neutral
from quire.serve.api.bodies.protocol import MAX_MESSAGES
from quire.serve.api.context import ApiContext
from quire.serve.api.errors import ApiError, bad_request
from quire.serve.api.http.auth import reader_of
from quire.serve.api.http.limits import open_request
from quire.serve.api.pipeline.answer import Answer, usage_json
from quire.serve.api.pipeline.chat import Chat, start_chat
from quire.serve.api.pipeline.chat_choice import ChatChoice, chat_choices
from quire.serve.api.pipeline.plan import plan_chat
from quire.serve.api.responses.as_chat import chat_body, in_own_words
from quire.serve.api.responses.background import RunningResponse, error_json, event
from quire.serve.api.responses.body import ResponsesRequest
from quire.serve.api.responses.conversation import messages_of
from quire.serve.api.responses.custom_tools import custom_names
from quire.serve.api.responses.earlier import continued_turn, earlier_items, without_references
from quire.serve.api.responses.items import read_items
from quire.serve.api.responses.store import Stored
from quire.serve.api.responses.writer import ResponseWriter

Json = dict[str, Any]
Chunks = AsyncGenerator[list[Json], None]

# What the engine refuses it refuses sooner; later a stream begins without a token. Below what
# `start_stream` waits for the first event.
BEGIN_S = 0.2


def owner_of(scope: Scope, api: ApiContext) -> str:
    """Return who may see what a request makes: its key; on a server without keys everybody."""
    return reader_of(scope, api.config.api_key) or ""


async def make_turn(api: ApiContext, body: ResponsesRequest, scope: Scope) -> "Turn":
    """Make a response ready for the engine. Raises ApiError, RequestError or HookFailed for what
    cannot be served."""
    check_neutral(body)
    if body.background and body.store is False:
        text = (
            "background=true needs store=true, so that you can read the response later; remove"
            " store."
        )
        raise bad_request(text, "store")
    owner = owner_of(scope, api)
    items = read_items(body.input, api.responses.new_id)
    items = without_references(api, owner, items)
    earlier = await earlier_items(api, owner, body.previous_response_id)
    known = earlier + items
    if not known or len(known) > MAX_MESSAGES:
        rule = f"must have from 1 to {MAX_MESSAGES} items, including earlier ones"
        raise bad_request(f"input {rule}, got {len(known)}.", "input")
    chat = chat_body(body, messages_of(body.instructions, known, len(earlier)))
    response_id = api.responses.new_id("resp")
    try:
        continued = await continued_turn(api, body, owner, scope, items)
        plan = plan_chat(api, chat, scope, response_id, continued=continued)
        made = await start_chat(api, plan)
    except (RequestError, ApiError) as error:
        raise in_own_words(error) from error
    [choice] = chat_choices(api, made)
    response = _described(body, made, response_id)
    return Turn(api, body, owner, items, made, choice, _writer(api, body, response, choice))


def _writer(
    api: ApiContext, body: ResponsesRequest, response: Json, choice: ChatChoice
) -> ResponseWriter:
    def num_reasoning() -> int:
        return choice.usage.num_reasoning or 0

    return ResponseWriter(
        response,
        api.responses.new_id,
        num_reasoning,
        bool(body.background),
        custom_names(body.tools),
    )


def _described(body: ResponsesRequest, chat: Chat, response_id: str) -> Json:
    """Return a response without its answer: what was asked for, and what counts in its place."""
    params, text, reasoning = chat.job.request.params, body.text, body.reasoning
    asked_format = text.format if text is not None else None
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "model": chat.plan.model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "background": bool(body.background),
        "store": body.store is not False,
        "metadata": body.metadata or {},
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "tools": body.tools or [],
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {
            "format": asked_format or {"type": "text"},
            "verbosity": None if text is None else text.verbosity,
        },
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "truncation": body.truncation or "disabled",
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "usage": None,
    }


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
