"""Pinned prefixes: prompts whose KV blocks stay cached, for requests that begin with them.

A prefix belongs to the key that pinned it, and each key may pin a share of the memory. Without keys
all clients share the prefixes.
"""

from typing import Annotated, Any

import fastapi
from fastapi import APIRouter, Depends
from pydantic import WithJsonSchema

from quire.base.errors import RequestError
from quire.base.messages import PinnedPrefix
from quire.engine.client.admission import admit
from quire.engine.client.async_client import pin
from quire.render.renderer import RenderedPrompt
from quire.render.templates.chat_template import ChatOptions
from quire.serve.bodies.open_body import PROMPT, becomes
from quire.serve.bodies.protocol import Label, Messages, ModelField, Salt, TemplateFields, Tools
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.bodies.schemas import ONE_PROMPT
from quire.serve.bodies.validation_errors import shown
from quire.serve.context import Api, ApiContext
from quire.serve.errors import ApiError, bad_request, error_in
from quire.serve.http.auth import reader_of, tenant_of
from quire.serve.http.limits import generating
from quire.serve.http.sse import unless_disconnected
from quire.serve.pipeline.plan import check_generates, check_model, checked_template
from quire.serve.pipeline.prompts import render_prompt

router = APIRouter(route_class=BoundedRoute)


class PrefixBody(ModelField, TemplateFields):
    """A prompt, or messages as in chats. ttl_s: lifetime in seconds; 0 is unlimited."""

    prompt: Annotated[Any, WithJsonSchema(ONE_PROMPT)] = becomes(PROMPT)
    messages: Messages | None = becomes(PROMPT)
    tools: Tools | None = becomes(PROMPT)
    add_special_tokens: bool = becomes(PROMPT, default=True)
    cache_salt: Salt | None = becomes("Request.cache_salt")
    ttl_s: float = becomes("Request.pin_s", default=0.0)
    user: Label | None = becomes("Request.tenant")


@router.post("/v1/prefixes", dependencies=[Depends(generating)])
async def pin_prefix(body: PrefixBody, request: fastapi.Request, api: Api) -> dict[str, Any]:
    """Compute a prefix and pin it. The response follows when it is computed."""
    check_model(api, body.model)
    check_generates(api)
    rendered = await _render(api, body)
    tenant = tenant_of(request.scope, api.config.api_key, body.user)
    share = api.config.pin_share_of_key
    try:
        made = admit(
            api.client,
            api.requests.make_pin(rendered, body.ttl_s, None, body.cache_salt or "", tenant, share),
        )
        found = await unless_disconnected(request.receive, pin(api.client, made))
    except ApiError:  # the client disconnected, perhaps after the prefix was computed
        await api.client.unpin(made.request_id)
        raise
    except RequestError as error:
        whole = "prompt" if body.messages is None else "messages"
        raise error_in(whole, error) from error
    return _as_json(found)


@router.get("/v1/prefixes")
async def list_prefixes(request: fastapi.Request, api: Api) -> dict[str, Any]:
    """List the prefixes of the caller's key; without keys, all."""
    found = await api.engine.prefixes(reader_of(request.scope, api.config.api_key))
    return {"object": "list", "data": [_as_json(prefix) for prefix in found]}


@router.get("/v1/prefixes/{prefix_id}")
async def show_prefix(prefix_id: str, request: fastapi.Request, api: Api) -> dict[str, Any]:
    """Show one prefix."""
    for prefix in await api.engine.prefixes(reader_of(request.scope, api.config.api_key)):
        if prefix.id == prefix_id:
            return _as_json(prefix)
    raise _unknown(prefix_id)


@router.delete("/v1/prefixes/{prefix_id}")
async def unpin_prefix(prefix_id: str, request: fastapi.Request, api: Api) -> dict[str, Any]:
    """Unpin a prefix. Running requests keep their blocks."""
    if not await api.engine.unpin(prefix_id, reader_of(request.scope, api.config.api_key)):
        raise _unknown(prefix_id)
    return {"id": prefix_id, "object": "prefix", "deleted": True}


async def _render(api: ApiContext, body: PrefixBody) -> RenderedPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt (a text or token ids) or messages.", "prompt")
    if body.messages is None:
        _check_prompt(body)
        return await render_prompt(api, body.prompt, add_special_tokens=body.add_special_tokens)
    if not body.messages:
        raise bad_request("messages is empty; give at least one message.", "messages")
    options = ChatOptions(
        add_generation_prompt=False,
        tools=body.tools,
        template_kwargs=body.chat_template_kwargs or {},
    )
    template = checked_template(api, body.chat_template)
    return await render_prompt(api, body.messages, options, template)


def _check_prompt(body: PrefixBody) -> None:
    """Raise ApiError unless the prompt is valid, and without fields that are for messages."""
    prompt = body.prompt
    is_ids = isinstance(prompt, list) and all(type(item) is int and item >= 0 for item in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise bad_request(
            f"prompt must be one text or list of token ids, and not empty, got {shown(prompt)}.",
            "prompt",
        )
    for name in ("tools", "chat_template", "chat_template_kwargs"):
        if getattr(body, name):
            raise bad_request(
                f"{name} applies to messages only, and prompt was given; remove it.", name
            )


def _unknown(prefix_id: str) -> ApiError:
    text = f"you have no pinned prefix {shown(prefix_id)}; GET /v1/prefixes lists them."
    return ApiError(404, text, param="prefix_id", code="not_found")


def _as_json(prefix: PinnedPrefix) -> dict[str, Any]:
    return {
        "id": prefix.id,
        "object": "prefix",
        "status": "ready" if prefix.is_ready else "computing",
        "num_tokens": prefix.num_tokens,
        "num_blocks": prefix.num_blocks,
        "num_hits": prefix.num_hits,
        "age_s": round(prefix.age_s, 3),
        "expires_in_s": None if prefix.expires_in_s is None else round(prefix.expires_in_s, 3),
    }
