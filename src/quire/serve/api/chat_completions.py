"""POST /v1/chat/completions: a conversation, answered; reasoning and calls of tools are taken out
of the text."""

import time

import fastapi
from starlette.responses import Response

from quire.serve.api.answers import Answer
from quire.serve.api.chat_job import chat_choices, make_chat_job
from quire.serve.api.context import Api, new_id
from quire.serve.api.params import checked_stream_options
from quire.serve.api.protocol import ChatCompletionRequest
from quire.serve.api.reading import BoundedRoute
from quire.serve.api.structured import with_warnings

router = fastapi.APIRouter(route_class=BoundedRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(
    body: ChatCompletionRequest, request: fastapi.Request, api: Api
) -> Response:
    """The next message of a conversation, or n of them to choose from."""
    answer_id = new_id("chatcmpl")
    body = checked_stream_options(body, api.config)
    chat = await make_chat_job(api, body, request.scope, answer_id)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = {"id": answer_id, "object": kind, "created": int(time.time()), "model": chat.model}
    choices = chat_choices(api, chat)
    tells = api.config.enable_per_request_metrics
    answer = Answer(api.client, chat.body, head, [chat.job], [choices], chat.hooks, tells)
    return with_warnings(await answer.respond(request), chat.grammar)
