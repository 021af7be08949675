"""Endpoints that do not generate: models, tokens, health, load, version, metrics.

`public` needs no key, because load balancers have none. `router` needs a key. Two routers describe
the endpoints: `page` without a key, and `description` with one.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastapi
import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from quire.base.errors import EngineDead
from quire.base.version import QUIRE_VERSION
from quire.render.templates.chat_template import ChatOptions
from quire.serve.bodies.open_body import (
    PROMPT,
    RESPONSE,
    OpenBody,
    becomes,
    check_neutral,
    unsupported,
)
from quire.serve.bodies.protocol import Messages, ModelField, TemplateFields, TokenIds, Tools
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.context import Api, ApiContext, require_known_model
from quire.serve.errors import ApiError, bad_request
from quire.serve.http.auth import has_key, reader_of, wrong_key
from quire.serve.llamacpp.tokens import tokens_of
from quire.serve.native.adapters import card_of
from quire.serve.native.admin import is_admin
from quire.serve.native.document import document
from quire.serve.pipeline.plan import check_model, checked_template
from quire.serve.pipeline.prompts import MAX_CUT, decode, render_prompt, tokenizer_of

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # class in transformers that reads a tokenizer.json
# Parameters whose defaults a model may define (`render/generation.py`)
DEFAULT_PARAMS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
INPUTS = ("prompt", "messages", "content")  # of /tokenize, which takes one of them
DOCS = Path(__file__).with_name("docs.html")
# The page runs its own inline script and connects to this server only.
DOCS_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}

public = APIRouter()
router = APIRouter(route_class=BoundedRoute)
page, description = APIRouter(), APIRouter()


class TokenizeBody(OpenBody, ModelField, TemplateFields):
    """A prompt, or messages as in chats, with vLLM's fields and defaults; or a text in `content`,
    with llama.cpp's."""

    content: str | None = becomes(PROMPT)
    add_special: bool | None = becomes(PROMPT)
    with_pieces: bool | None = becomes(RESPONSE)
    parse_special: Any = unsupported("names of special tokens are always read as these", True)
    prompt: str | None = becomes(PROMPT)
    messages: Messages | None = becomes(PROMPT)
    add_special_tokens: bool | None = becomes(PROMPT)
    return_token_strs: bool | None = becomes(RESPONSE, default=False)
    add_generation_prompt: bool = becomes(PROMPT, default=True)
    continue_final_message: bool = becomes(PROMPT, default=False)
    tools: Tools | None = becomes(PROMPT)


class DetokenizeBody(OpenBody, ModelField):
    """Token ids of one text."""

    tokens: TokenIds = becomes(RESPONSE, default=...)


@public.get("/health")
async def health(request: fastapi.Request, api: Api, model: str | None = None) -> Response:
    """Answer 200 while the engine is alive, even during a drain, when a restart would do harm.

    With several models, answer 200 while any of them can answer. With `model`, which needs a key,
    answer 200 while that one can. A key holder also gets the state and the fault of each model. A
    model whose process died cannot answer before it is loaded again.
    """
    is_authorised = has_key(request.scope, api.config.api_key)
    if model is not None and not is_authorised:
        raise wrong_key()
    one = api.of_model(model)
    check_model(one, model)
    is_alive = (api.engine if model is None else one.client).is_alive
    status = 200 if is_alive else 503
    if api.all_models is None or not is_authorised:
        return Response(status_code=status)
    model_states = [
        {"name": each.name, "state": each.state} | ({"why": each.why} if each.why else {})
        for each in api.all_models.states
    ]
    return JSONResponse({"models": model_states}, status)


@public.get("/ready")
async def ready(api: Api) -> Response:
    """Answer 200 while the server accepts new work."""
    return Response(status_code=200 if api.engine.is_alive and not api.draining else 503)


@public.get("/ping")
async def ping(request: fastapi.Request, api: Api) -> Response:
    """Do the same as /health."""
    return await health(request, api)


@public.post("/ping")
async def post_ping(request: fastapi.Request, api: Api) -> Response:
    """Do the same as /health."""
    return await health(request, api)


@router.get("/load")
async def load(api: Api) -> dict[str, int]:
    """Return the number of open requests that generate in this process."""
    return {"server_load": api.num_open}


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of quire."""
    return {"version": QUIRE_VERSION}


@router.get("/metrics")
async def metrics(api: Api) -> Response:
    """Return metrics in the text format of Prometheus."""
    return PlainTextResponse(await api.engine.metrics(), media_type=METRICS_TYPE)


@router.get("/v1/requests/{request_id}")
async def show_request(request_id: str, request: fastapi.Request, api: Api) -> Response:
    """Show the timeline of a request, given the id of its response. On a server with keys, only the
    request's own key and admin keys see it."""
    reader = reader_of(request.scope, api.config.api_key)
    tenant = None if is_admin(request.scope, api.config) else reader
    text = await api.engine.timeline(request_id, tenant)
    if not text:
        raise ApiError(
            404,
            f"you have no recent request {request_id[:64]!r}. Give the id of an answer (cmpl-...,"
            " chatcmpl-..., msg-..., resp_...); the last 1,000 requests are available.",
            param="request_id",
            code="not_found",
        )
    return Response(text, media_type="application/json")


@description.get("/openapi.json", include_in_schema=False)
async def schema(request: fastapi.Request) -> Response:
    """Return the OpenAPI document."""
    return JSONResponse(document(request.app))


@page.get("/docs", include_in_schema=False)
async def docs() -> Response:
    """Return a page that shows the schema. It is public, because a browser cannot send a key."""
    return HTMLResponse(DOCS.read_bytes(), headers=DOCS_HEADERS)


@router.get("/models")
@router.get("/v1/models")
async def list_models(api: Api, request: fastapi.Request) -> dict[str, Any]:
    """List the served models, once under each name. On a server with keys, only admin keys see the
    location of a model's files, as its root."""
    contexts = api.models or (api,)
    shows_root = is_admin(request.scope, api.config)
    cards = [_card(each, name, shows_root) for each in contexts for name in each.model_names]
    cards += [_card(each, name, shows_root) for name, each in api.adapters.items()]
    return {"object": "list", "data": cards}


@router.get("/v1/models/{name:path}")
async def show_model(name: str, api: Api, request: fastapi.Request) -> dict[str, Any]:
    """Show a served model, given one of its names."""
    if not name:
        return await list_models(api, request)
    found = api.of_model(name)
    return _card(found, check_model(found, name), is_admin(request.scope, api.config))


@router.post("/tokenize", dependencies=[Depends(require_known_model)])
async def tokenize(body: TokenizeBody, api: Api) -> Response:
    """Return the token ids of a text or a conversation, equal to the ids that a request has."""
    check_neutral(body)
    check_model(api, body.model)
    tokenizer_of(api)
    given = [name for name in INPUTS if getattr(body, name) is not None]
    if len(given) != 1:
        raise bad_request(
            "give one of prompt (a text), messages (a conversation) and content (a text, as for"
            f" llama.cpp), got {' and '.join(given) or 'none of them'}.",
            "prompt",
        )
    if body.content is not None:
        return await tokens_of(api, body.content, bool(body.add_special), bool(body.with_pieces))
    token_ids = await _token_ids(body, api)
    return await api.text_threads.run(len(token_ids), _shown, body, api, token_ids)


@router.post("/detokenize", dependencies=[Depends(require_known_model)])
async def detokenize(body: DetokenizeBody, api: Api) -> Response:
    """Return the text of token ids, special tokens included. Clients of vLLM read it in `prompt`,
    and clients of llama.cpp in `content`."""
    check_model(api, body.model)
    _check_ids(api, body.tokens)
    text = await decode(api, body.tokens)
    return await api.text_threads.run(len(text), _as_json, {"prompt": text, "content": text})


@router.get("/tokenizer_info")
async def tokenizer_info(api: Api) -> dict[str, Any]:
    """Return the facts that clients need to make prompts themselves: named tokens, chat template.

    A named token that the tokenizer lacks is null, as in vLLM's response.
    """
    tokenizer = tokenizer_of(api)
    named = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
    return {
        "tokenizer_class": TOKENIZER_CLASS,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": api.client.ready.max_model_len,
        "chat_template": tokenizer.chat_template,
        **(named | tokenizer.named_tokens),
    }


def _shown(body: TokenizeBody, api: ApiContext, token_ids: list[int]) -> Response:
    """Return the response of /tokenize."""
    strings = tokenizer_of(api).tokens(token_ids) if body.return_token_strs else None
    return _as_json(
        {
            "count": len(token_ids),
            "max_model_len": api.client.ready.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }
    )


def _as_json(value: Any) -> Response:
    """Encode with msgspec, which is far faster than FastAPI: that checks every number of a list."""
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _token_ids(body: TokenizeBody, api: ApiContext) -> list[int]:
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    if body.prompt == "":
        return tokenizer_of(api).encode("", special)  # render_prompt refuses an empty prompt
    if body.messages is None:
        prompt = await render_prompt(api, body.prompt, add_special_tokens=special, is_cut=True)
        return prompt.token_ids
    if not body.messages:
        raise bad_request("messages is empty; give at least one message.", "messages")
    options = ChatOptions(
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=body.tools,
        template_kwargs=body.chat_template_kwargs or {},
    )
    async with api.images.open(body.messages, api.takes_images) as images:
        max_tokens = MAX_CUT * api.client.ready.max_model_len
        messages, media = await images.prepared(images.messages, api.renderer.media, max_tokens)
        template = checked_template(api, body.chat_template)
        prompt = await render_prompt(api, messages, options, template, is_cut=True, media=media)
        if special:
            prompt = await render_prompt(api, prompt.text, is_cut=True, media=media)
    return prompt.token_ids


def _check_ids(api: ApiContext, token_ids: Sequence[int]) -> None:
    size = api.client.ready.vocab_size
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < size:
            text = f"tokens must be ids from 0 to {size - 1}, got {str(token_id)[:40]}."
            raise bad_request(text, "tokens")


def _card(api: ApiContext, name: str, shows_root: bool) -> dict[str, Any]:
    """Describe a model, which may never have been loaded. default_sampling_params: the values for
    requests that do not set them."""
    defaults = api.requests.defaults.default_sampling_params()
    card = {
        "id": name,
        "object": "model",
        "created": api.started_s,
        "owned_by": "quire",
        "root": name,
        "parent": None,
        "max_model_len": None,
        "capabilities": {"vision": api.takes_images},
        "default_sampling_params": {name: getattr(defaults, name) for name in DEFAULT_PARAMS},
    }
    with contextlib.suppress(EngineDead):
        known = api.client.ready
        if shows_root:
            card["root"] = known.settings.get("model", name)
        card["max_model_len"] = known.max_model_len
    if api.adapter is not None:
        card = card_of(api, card, shows_root=shows_root)
    if api.all_models is not None:
        [state] = [each for each in api.all_models.states if each.name == api.model_names[0]]
        card |= {"state": state.state, "state_since": round(state.since_s, 3)}
        card |= {"num_loads": state.num_loads, "why": state.why or None}
    return card
