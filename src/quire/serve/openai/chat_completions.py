"""POST /v1/chat/completions: parse the body, plan, start the chat, and answer as OpenAI does."""

import time

import fastapi
from starlette.responses import Response

from quire.render.grammars.grammars import Checked
from quire.serve.bodies.constraints import with_warnings
from quire.serve.bodies.open_body import check_neutral
from quire.serve.bodies.protocol import ChatCompletionRequest
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.context import Api, ApiContext
from quire.serve.http.middleware import new_id
from quire.serve.pipeline.answer import Answer
from quire.serve.pipeline.chat import start_chat
from quire.serve.pipeline.chat_choice import chat_choices
from quire.serve.pipeline.plan import plan_chat, usage_chunks

router = fastapi.APIRouter(route_class=BoundedRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(
    body: ChatCompletionRequest, request: fastapi.Request, api: Api
) -> Response:
    """Answer a conversation with its next message, or with n choices of it."""
    answer, grammar = await chat_answer(body, request, api)
    response = await answer.respond(request)
    return with_warnings(response, grammar) if grammar.warnings else response


async def chat_answer(
    body: ChatCompletionRequest, request: fastapi.Request, api: ApiContext
) -> tuple[Answer, Checked]:
    """Return the answer to a chat, and the constraint on it. Raises ApiError, RequestError,
    HookFailed or EngineBusy for what cannot be served."""
    check_neutral(body)
    usage = usage_chunks(body, api.config)
    plan = plan_chat(api, body, request.scope, new_id("chatcmpl"), usage)
    chat = await start_chat(api, plan)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = {
        "id": plan.id, "object": kind, "created": int(time.time()), "model": plan.model,
    }  # fmt: skip
    choices = [chat_choices(api, chat)]
    reports = api.config.enable_per_request_metrics
    answer = Answer(api.client, chat.plan, head, [chat.job], choices, chat.hooks, reports, True)
    return answer, chat.grammar
