"""POST /v1/messages and /v1/messages/count_tokens: answer a conversation in Anthropic's format, or
count its tokens."""

from typing import Any

import fastapi
from starlette.responses import Response

from quire.serve.anthropic.as_chat import answered_chat_of, chat_of
from quire.serve.anthropic.errors import REQUEST_ID, message_error_event
from quire.serve.anthropic.events import MessageEvents, stream, whole
from quire.serve.anthropic.protocol import (
    Conversing,
    CountTokensRequest,
    MessagesRequest,
)
from quire.serve.async_renderer import MAX_CHARS_ON_LOOP, size_of
from quire.serve.bodies.constraints import with_warnings
from quire.serve.bodies.open_body import check_neutral
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.context import Api, require_known_model
from quire.serve.http.middleware import new_id, request_id_of
from quire.serve.http.sse import encode, start_stream, unless_disconnected
from quire.serve.pipeline.answer import Answer
from quire.serve.pipeline.chat import count_chat, start_chat
from quire.serve.pipeline.chat_choice import chat_choices
from quire.serve.pipeline.plan import plan_chat, plan_prompt
from quire.serve.pipeline.requests import Chat

Json = dict[str, Any]

generating_router = fastapi.APIRouter(route_class=BoundedRoute)
counting_router = fastapi.APIRouter(route_class=BoundedRoute)


@generating_router.post("/v1/messages")
async def create_message(body: MessagesRequest, request: fastapi.Request, api: Api) -> Response:
    """Answer a conversation with its next message, made of blocks."""
    check_neutral(body)
    message_id = new_id("msg")
    chat_body = await api.text_threads.run(_size(body), answered_chat_of, body)
    plan = plan_chat(api, chat_body, request.scope, message_id, is_lenient=True)
    chat = await start_chat(api, plan)
    [choice] = chat_choices(api, chat, named_call_stops=False)
    answer = Answer(api.client, plan, {}, [chat.job], [[choice]], chat.hooks)
    events = MessageEvents(
        {"id": message_id, "model": plan.model},
        choice.usage,
        body.stop_sequences or (),
        shows_thinking=body.thinking is None or body.thinking.display != "omitted",
        is_cut=_is_cut(body, chat),
        is_dropped=body.max_tokens == 0,
        retention=chat.job.retention,
    )
    if body.stream:
        response = await start_stream(request, stream(answer, events), message_error_event)
    else:
        message = await unless_disconnected(request.receive, whole(answer, events))
        response = Response(encode(message), media_type="application/json")
    response.headers[REQUEST_ID] = request_id_of(request)
    return with_warnings(response, chat.grammar)


@counting_router.post(
    "/v1/messages/count_tokens", dependencies=[fastapi.Depends(require_known_model)]
)
async def count_tokens(body: CountTokensRequest, request: fastapi.Request, api: Api) -> Response:
    """Return the number of prompt tokens that a message with the same fields would have."""
    check_neutral(body)
    chat_body = await api.text_threads.run(_size(body), chat_of, body)
    content = encode({"input_tokens": await count_chat(api, plan_prompt(api, chat_body))})
    headers = {REQUEST_ID: request_id_of(request)}
    return Response(content, media_type="application/json", headers=headers)


def _size(body: Conversing) -> int:
    """Return the approximate number of characters that become a chat, for `TextThreads.run`."""
    return size_of([body.system, body.messages, body.tools], MAX_CHARS_ON_LOOP)


def _is_cut(body: MessagesRequest, chat: Chat) -> bool:
    num_tokens = chat.job.request.params.max_tokens
    return num_tokens is not None and num_tokens < body.max_tokens
