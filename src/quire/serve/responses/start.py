"""Preparation of a response's body into a turn that is ready for the engine."""

import time
from typing import Any

from starlette.types import Scope

from quire.base.errors import RequestError
from quire.serve.bodies.open_body import check_neutral
from quire.serve.bodies.protocol import MAX_MESSAGES
from quire.serve.context import ApiContext
from quire.serve.errors import ApiError, bad_request
from quire.serve.http.auth import reader_of
from quire.serve.pipeline.chat import start_chat
from quire.serve.pipeline.chat_choice import ChatChoice, chat_choices
from quire.serve.pipeline.plan import plan_chat
from quire.serve.pipeline.requests import Chat
from quire.serve.responses.as_chat import chat_body, in_own_words
from quire.serve.responses.body import ResponsesRequest
from quire.serve.responses.conversation import messages_of
from quire.serve.responses.custom_tools import custom_names, described_tools
from quire.serve.responses.earlier import continued_turn, earlier_items, without_references
from quire.serve.responses.items import read_items
from quire.serve.responses.turn import Turn
from quire.serve.responses.writer import ResponseWriter

Json = dict[str, Any]


def owner_of(scope: Scope, api: ApiContext) -> str:
    """Return the owner of a request's responses: its key; empty without keys, for all clients."""
    return reader_of(scope, api.config.api_key) or ""


async def make_turn(api: ApiContext, body: ResponsesRequest, scope: Scope) -> Turn:
    """Return a response that is ready for the engine. Raises ApiError, RequestError or HookFailed
    for a request that cannot be served."""
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
    continued = await continued_turn(api, body, owner, scope, items)
    chat = chat_body(body, messages_of(body.instructions, known, len(earlier)))
    response_id = api.responses.new_id("resp")
    try:
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
    """Return a response without its output: the requested parameters, with defaults applied."""
    params, text, reasoning = chat.job.request.params, body.text, body.reasoning
    requested_format = text.format if text is not None else None
    chosen = None if text is None else text.verbosity
    verbosity = {} if chosen is None else {"verbosity": chosen}
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
        "service_tier": "default",
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "top_logprobs": body.top_logprobs or 0,
        "tools": described_tools(body.tools),
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": requested_format or {"type": "text"}} | verbosity,
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
