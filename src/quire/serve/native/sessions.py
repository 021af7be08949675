"""Sessions: fork a running or retained request at a token, append to it, rewind it, or release it.

A request has the id of its response. Requests of another key are not found.
"""

from typing import Annotated, Any

import fastapi
from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import Response

from quire.base.errors import HOOK_FAILED, EngineBusy, HookFailed, RequestError
from quire.base.messages import Fork, RetainedRequest
from quire.base.requests.media_items import items_before
from quire.base.requests.retention import MAX_KEEP_S
from quire.render.renderer import RenderedPrompt
from quire.render.templates.chat_template import ChatOptions
from quire.serve.bodies.constraints import checked_grammar
from quire.serve.bodies.open_body import (
    PROMPT,
    StrictBody,
    becomes,
    check_neutral,
    unsupported,
)
from quire.serve.bodies.protocol import (
    MAX_N,
    CompletionRequest,
    Messages,
    OrUnlimited,
    Positive,
    TokenIds,
)
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.bodies.validation_errors import shown
from quire.serve.context import Api, ApiContext
from quire.serve.errors import ApiError, bad_request, error_in
from quire.serve.http.auth import reader_of
from quire.serve.http.limits import generating
from quire.serve.http.middleware import answer_id_of, new_id
from quire.serve.openai.completions import Prompts, respond
from quire.serve.pipeline.continued import tokens_after
from quire.serve.pipeline.hooked_prompt import admitted_prompts
from quire.serve.pipeline.plan import plan_completion, usage_chunks
from quire.serve.pipeline.prompts import render_prompt
from quire.serve.pipeline.requests import Origin

router = APIRouter(route_class=BoundedRoute)
Index = Annotated[int, Field(ge=0, lt=MAX_N)]
INPUTS = ("prompt", "token_ids", "messages")
NOT_CONTINUED = "cannot be set for a continued request; remove it"


class ContinuedBody(CompletionRequest):
    """Input that continues a request: one of prompt, token_ids and messages, or none of them."""

    index: Index = becomes("Fork.index", default=0)  # index of the request's choice
    token_ids: TokenIds | None = becomes(PROMPT)
    messages: Messages | None = becomes(PROMPT)
    suffix: str | None = unsupported(NOT_CONTINUED)
    truncate_prompt_tokens: OrUnlimited | None = unsupported(NOT_CONTINUED)


class ForkBody(ContinuedBody):
    """A body of /v1/requests/ID/fork."""

    at_token: Positive | None = becomes("Fork.num_tokens")  # tokens to keep; all if absent


class AppendBody(ContinuedBody):
    """A body of /v1/requests/ID/append. keep_source: also retain the continued request."""

    keep_source: bool = becomes("Fork.takes_over", default=False)


class RewindBody(StrictBody):
    """A body of /v1/requests/ID/rewind. num_tokens: tokens to drop from the end."""

    num_tokens: Positive = becomes("Rewind.num_tokens", default=...)
    index: Index = becomes("Rewind.index", default=0)


class KeepBody(StrictBody):
    """A body of /v1/requests/ID/keep. keep_s: seconds from now, or from a running request's end."""

    keep_s: Annotated[float, Field(gt=0, le=MAX_KEEP_S)] = becomes("Hold.keep_s", default=...)


@router.get("/v1/requests")
async def list_held(request: fastapi.Request, api: Api) -> dict[str, Any]:
    """List the retained requests of the caller's key; without keys, all."""
    found = await api.engine.held(tenant=reader_of(request.scope, api.config.api_key))
    return {"object": "list", "data": [_as_json(held) for held in found]}


@router.get("/v1/requests/{request_id}/tokens")
async def show_tokens(
    request_id: str, request: fastapi.Request, api: Api, index: Index = 0
) -> dict[str, Any]:
    """Show all known tokens of a running or retained request: prompt and output."""
    api = await _of_request(api, request, request_id)
    source = await _found(api, request, request_id, index)
    return _as_json(source) | {"token_ids": source.token_ids}


@router.post("/v1/requests/{request_id}/fork", dependencies=[Depends(generating)])
async def fork(request_id: str, body: ForkBody, request: fastapi.Request, api: Api) -> Response:
    """Continue a request from one of its tokens, n times. The request itself is unchanged."""
    api = await _of_request(api, request, request_id)
    source = await _found(api, request, request_id, body.index)
    at_token = source.num_tokens if body.at_token is None else body.at_token
    if at_token > source.num_tokens:
        text = f"at_token must be from 1 to {source.num_tokens}, the number of its tokens"
        raise bad_request(f"{text}; got {at_token}.", "at_token")
    items_before(source.media, at_token, "at_token")
    return await _continue_request(api, body, request, source, at_token, takes_over=False)


@router.post("/v1/requests/{request_id}/append", dependencies=[Depends(generating)])
async def append(request_id: str, body: AppendBody, request: fastapi.Request, api: Api) -> Response:
    """Append input to a retained request and continue it. Unless keep_source is set, the new
    request replaces it."""
    api = await _of_request(api, request, request_id)
    source = await _found(api, request, request_id, body.index)
    _check_retained(source, "fork it at one of its tokens, or wait until it has ended")
    takes_over = not body.keep_source
    if takes_over and (body.n or 1) > 1:
        text = "n: only one continuation can replace the request; use fork for several."
        raise bad_request(text, "n")
    if body.keep_s is None:
        body = body.model_copy(update={"keep_s": source.keep_s})
    return await _continue_request(api, body, request, source, source.num_tokens, takes_over)


@router.post("/v1/requests/{request_id}/rewind")
async def rewind(
    request_id: str, body: RewindBody, request: fastapi.Request, api: Api
) -> dict[str, Any]:
    """Drop the last tokens of a retained request, even prompt tokens; the first token stays."""
    api = await _of_request(api, request, request_id)
    source = await _found(api, request, request_id, body.index)
    _check_retained(source, "fork it at the token to rewind to, or wait until it has ended")
    left = source.num_tokens - body.num_tokens
    if left < 1:
        raise bad_request(
            f"num_tokens must be from 1 to {source.num_tokens - 1}: the request has"
            f" {source.num_tokens} tokens, and the first one stays; got {body.num_tokens}.",
            "num_tokens",
        )
    items_before(source.media, left)
    tenant = reader_of(request.scope, api.config.api_key)
    await api.client.rewind(source.id, source.index, left, tenant, source.core_id)
    return _as_json(await _found(api, request, request_id, body.index))


@router.post("/v1/requests/{request_id}/keep")
async def keep(
    request_id: str, body: KeepBody, request: fastapi.Request, api: Api
) -> dict[str, Any]:
    """Retain a request with all its choices for keep_s seconds."""
    api = await _of_request(api, request, request_id)
    source = await _found(api, request, request_id, -1)
    tenant = reader_of(request.scope, api.config.api_key)
    await api.client.keep(source.id, body.keep_s, tenant, source.core_id)
    found = await _found(api, request, request_id, source.index)
    if found.keep_s != body.keep_s:
        raise EngineBusy(
            "keep_s: the limit of retained requests is reached; release requests you no longer"
            " need."
        )
    return _as_json(found)


@router.delete("/v1/requests/{request_id}")
async def let_go(request_id: str, request: fastapi.Request, api: Api) -> dict[str, Any]:
    """Release a retained request; abort a running one, with finish_reason `abort`."""
    api = await _of_request(api, request, request_id)
    source = await _found(api, request, request_id, -1)
    tenant = reader_of(request.scope, api.config.api_key)
    await api.client.cancel([source.id], tenant)
    await api.client.keep(source.id, 0.0, tenant, source.core_id)
    return {"id": request_id, "object": "request", "deleted": True}


async def _continue_request(
    api: ApiContext,
    body: ContinuedBody,
    request: fastapi.Request,
    source: RetainedRequest,
    at_token: int,
    takes_over: bool,
) -> Response:
    """Return the response that continues the first at_token tokens and the appended input."""
    check_neutral(body)
    usage = usage_chunks(body, api.config)
    if body.cache_salt not in (None, source.cache_salt):
        raise bad_request("cache_salt is taken from the retained request; remove it.", "cache_salt")
    body = body.model_copy(update={"cache_salt": source.cache_salt or None})
    plan = plan_completion(api, body, request.scope, new_id("cmpl"), usage)
    kept_ids = source.token_ids[:at_token]
    num_items = len(items_before(source.media, at_token))
    grammar = await checked_grammar(api, body, 1)
    whole = kept_ids + await _added_ids(api, body, kept_ids)
    given, hooks = await admitted_prompts(api, plan, [whole])
    [prompt] = [await render_prompt(api, each) for each in given]
    made = Fork(source.id, source.index, at_token, takes_over, num_items)
    is_same = prompt.token_ids[:at_token] == kept_ids  # false if a hook has changed it
    if num_items and not is_same:
        text = "a hook of this server changed the beginning of a prompt that holds images."
        raise HookFailed(text, HOOK_FAILED)
    prompts = Prompts([RenderedPrompt(prompt.token_ids)], hooks, grammar)
    origin = Origin(source.core_id, made if is_same else None)
    return await respond(api, plan, request, prompts, origin)


async def _added_ids(api: ApiContext, body: ContinuedBody, kept_ids: list[int]) -> list[int]:
    """Return the token ids of the appended input. kept_ids: the token ids before it."""
    given = [name for name in INPUTS if getattr(body, name) is not None]
    if len(given) > 1:
        raise bad_request(f"give one of {', '.join(INPUTS)}, got {' and '.join(given)}.", given[1])
    if body.messages:
        try:
            return (await tokens_after(api, kept_ids, body.messages, ChatOptions())).token_ids
        except RequestError as error:
            raise error_in("messages", error) from error
    prompt = body.prompt if body.token_ids is None else body.token_ids
    if not prompt:
        return []
    is_ids = isinstance(prompt, list) and all(type(item) is int and item >= 0 for item in prompt)
    if not (isinstance(prompt, str) or is_ids):
        raise bad_request(
            f"{given[0]} must be a single text or a single list of token ids, got {shown(prompt)}.",
            given[0],
        )
    special = bool(body.add_special_tokens)
    try:
        return (await render_prompt(api, prompt, add_special_tokens=special)).token_ids
    except RequestError as error:
        raise error_in(given[0], error) from error


async def _of_request(api: ApiContext, request: fastapi.Request, request_id: str) -> ApiContext:
    """Return the context of the request's model, which must be searched among several models."""
    tenant = reader_of(request.scope, api.config.api_key)
    return await api.of_request(request_id, tenant) if api.models else api


async def _found(
    api: ApiContext, request: fastapi.Request, request_id: str, index: int
) -> RetainedRequest:
    """Return a sequence of the caller; index -1 means any of them. Raises ApiError 404."""
    tenant = reader_of(request.scope, api.config.api_key)
    found = await api.client.held(request_id, index, tenant)
    if found:
        return found[0]
    raise ApiError(
        404,
        f"there is no request {shown(request_id)} of yours that is running or"
        f" retained{f', with a choice {index}' if index > 0 else ''}. It ended without keep_s, was"
        " released, was replaced by `append`, or expired. GET /v1/requests lists retained"
        " requests.",
        param="request_id",
        code="not_found",
    )


def _check_retained(source: RetainedRequest, advice: str) -> None:
    if source.expires_in_s is None:
        raise ApiError(
            409, f"{shown(answer_id_of(source.id))} is still running; {advice}.",
            param="request_id", code="request_is_live",
        )  # fmt: skip


def _as_json(held: RetainedRequest) -> dict[str, Any]:
    expires_in_s = held.expires_in_s
    return {
        "id": answer_id_of(held.id),
        "object": "request.tokens",
        "index": held.index,
        "status": "live" if expires_in_s is None else "held",
        "num_prompt_tokens": held.num_prompt_tokens,
        "num_tokens": held.num_tokens,
        "num_blocks": held.num_blocks,
        "expires_in_s": None if expires_in_s is None else round(expires_in_s, 3),
    }
