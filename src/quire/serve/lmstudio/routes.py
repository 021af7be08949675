"""LM Studio's REST API: OpenAI's answers with times, and models with their state."""

from typing import Any

import fastapi
from fastapi import APIRouter, Depends
from starlette.responses import Response

from quire.render.grammars.grammars import Checked
from quire.serve.bodies.constraints import with_warnings
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.context import Api, ApiContext
from quire.serve.http.limits import generating
from quire.serve.http.sse import encode, start_stream, unless_disconnected
from quire.serve.lmstudio.protocol import (
    StudioChatBody,
    StudioCompletionBody,
    StudioEmbeddingBody,
)
from quire.serve.lmstudio.stats import card, stream, whole
from quire.serve.openai.chat_completions import chat_answer
from quire.serve.openai.completions import completion_answer
from quire.serve.openai.embeddings import create_embeddings
from quire.serve.pipeline.answer import Answer
from quire.serve.pipeline.plan import check_model

Json = dict[str, Any]

UNLIMITED = -1

router = APIRouter(prefix="/api/v0", route_class=BoundedRoute)
generating_router = APIRouter(
    prefix="/api/v0", route_class=BoundedRoute, dependencies=[Depends(generating)]
)


@router.get("/models")
async def list_models(api: Api) -> Json:
    """List the served models, once under each name."""
    cards = [card(each, name) for each in api.models or (api,) for name in each.model_names]
    return {"object": "list", "data": cards}


@router.get("/models/{name:path}")
async def show_model(name: str, api: Api) -> Json:
    """Show a served model, given one of its names."""
    found = api.of_model(name)
    return card(found, check_model(found, name))


@generating_router.post("/chat/completions")
async def chat(body: StudioChatBody, request: fastapi.Request, api: Api) -> Response:
    """Answer a conversation as /v1/chat/completions does, with times. A max_tokens of -1 is what
    fits."""
    if body.max_tokens == UNLIMITED:
        body = body.model_copy(update={"max_tokens": None})
    return await _respond(api, request, *await chat_answer(body, request, api))


@generating_router.post("/completions")
async def complete(body: StudioCompletionBody, request: fastapi.Request, api: Api) -> Response:
    """Continue prompts as /v1/completions does, with times."""
    return await _respond(api, request, *await completion_answer(body, request, api))


@generating_router.post("/embeddings")
async def embed(body: StudioEmbeddingBody, request: fastapi.Request, api: Api) -> Response:
    """Return the embedding of each input, as /v1/embeddings does."""
    return await create_embeddings(body, request, api)


async def _respond(
    api: ApiContext, request: fastapi.Request, answer: Answer, grammar: Checked
) -> Response:
    if answer.plan.body.stream:
        response = await start_stream(request, stream(api, answer))
    else:
        found = await unless_disconnected(request.receive, whole(api, answer))
        response = Response(encode(found), media_type="application/json")
    return with_warnings(response, grammar)
