"""POST /api/chat and /api/generate: answer a conversation or a prompt in Ollama's format."""

import time
from dataclasses import replace

import fastapi
from starlette.responses import Response

from quire.serve.bodies.any_type import AnyTypeRoute
from quire.serve.bodies.constraints import with_warnings
from quire.serve.bodies.protocol import ChatCompletionRequest
from quire.serve.context import Api, ApiContext
from quire.serve.errors import bad_request
from quire.serve.http.middleware import new_id
from quire.serve.http.sse import start_stream, unless_disconnected
from quire.serve.ollama.as_chat import chat_of, completion_of, generated_chat_of
from quire.serve.ollama.checks import checked
from quire.serve.ollama.errors import ollama_error_line
from quire.serve.ollama.lines import NDJSON, LineWriter, loaded, stream, whole
from quire.serve.ollama.models import as_json
from quire.serve.ollama.protocol import AnsweredBody, ChatBody, GenerateBody
from quire.serve.openai.completions import with_suffix
from quire.serve.pipeline.answer import Answer
from quire.serve.pipeline.chat import start_chat
from quire.serve.pipeline.chat_choice import chat_choices
from quire.serve.pipeline.plan import check_model, plan_chat, plan_completion
from quire.serve.pipeline.text import start_text

router = fastapi.APIRouter(route_class=AnyTypeRoute)


@router.post("/api/chat")
async def chat(body: ChatBody, request: fastapi.Request, api: Api) -> Response:
    """Answer a conversation with its next message. Without messages, only load the model."""
    started_ns = time.perf_counter_ns()
    api, body = await checked(api, body, request)
    if not body.messages:
        return as_json(loaded(check_model(api, body.model), is_chat=True))
    return await _answer_chat(api, body, chat_of(body), request, started_ns)


@router.post("/api/generate")
async def generate(body: GenerateBody, request: fastapi.Request, api: Api) -> Response:
    """Answer a prompt as a conversation of one message, or continue its text with `raw` or
    `suffix`. Without a prompt, only load the model."""
    started_ns = time.perf_counter_ns()
    api, body = await checked(api, body, request)
    if not (body.prompt or body.images or body.suffix):
        return as_json(loaded(check_model(api, body.model), is_chat=False))
    if body.raw or body.suffix:
        return await _answer_text(api, body, request, started_ns)
    return await _answer_chat(api, body, generated_chat_of(body), request, started_ns)


async def _answer_chat(
    api: ApiContext,
    body: AnsweredBody,
    chat_body: ChatCompletionRequest,
    request: fastapi.Request,
    started_ns: int,
) -> Response:
    limit = body.limit
    plan = plan_chat(api, chat_body, request.scope, new_id("chat"), is_lenient=True)
    plan = replace(plan, limit=limit)
    if body.think and api.renderer.answer_format(None, bool(chat_body.tools)).reasoning is None:
        raise bad_request(f"think: the model {plan.model} does not reason; remove it.", "think")
    chat = await start_chat(api, plan)
    [choice] = chat_choices(api, chat, named_call_stops=False)
    answer = Answer(api.client, chat.plan, {}, [chat.job], [[choice]], chat.hooks)
    writer = LineWriter(plan.model, choice.usage, isinstance(body, ChatBody), started_ns)
    return with_warnings(await _respond(answer, writer, request), chat.grammar)


async def _answer_text(
    api: ApiContext, body: GenerateBody, request: fastapi.Request, started_ns: int
) -> Response:
    completion, limit, scope = completion_of(body), body.limit, request.scope
    plan = plan_completion(api, completion, scope, new_id("gen"), is_lenient=True)
    completion, [prompt] = await with_suffix(api, plan.body, [plan.body.prompt])
    plan = replace(plan, body=completion, limit=limit)
    text = await start_text(api, plan, prompt)
    answer = Answer(api.client, text.plan, {}, text.jobs, text.choices, text.hooks)
    [[choice]] = text.choices
    writer = LineWriter(plan.model, choice.usage, is_chat=False, started_ns=started_ns)
    return with_warnings(await _respond(answer, writer, request), text.grammar)


async def _respond(answer: Answer, writer: LineWriter, request: fastapi.Request) -> Response:
    if not answer.plan.body.stream:
        return as_json(await unless_disconnected(request.receive, whole(answer, writer)))
    lines = stream(answer, writer)
    response = await start_stream(request, lines, ollama_error_line, alive_s=0)
    response.headers["content-type"] = NDJSON
    return response
