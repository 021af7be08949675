"""What an operator may do: forget what is cached, and end requests, with vLLM's paths.

On a server with keys the cache is for `admin_api_key` alone to reset, as it is everybody's; a key
ends its own requests, one of those the requests of all. Without keys everybody may do both.
"""

from typing import Annotated, Any

import fastapi
from pydantic import Field
from starlette.types import Scope

from quire.base.settings.config import ServerConfig
from quire.serve.bodies.open_body import StrictBody, at_most, becomes
from quire.serve.bodies.protocol import Label
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.context import Api
from quire.serve.errors import ApiError, bad_request
from quire.serve.http.auth import has_key, reader_of

MAX_IDS = 1024

router = fastapi.APIRouter(route_class=BoundedRoute)


class CancelBody(StrictBody):
    """request_ids: ids of answers (cmpl-..., chatcmpl-..., msg-...); all requests if absent."""

    request_ids: (
        Annotated[list[Label], Field(max_length=MAX_IDS, fail_fast=True), at_most(MAX_IDS)] | None
    ) = becomes("Cancel.request_id")


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    request: fastapi.Request,
    api: Api,
    reset_running_requests: bool = False,
    reset_external: bool = False,
) -> dict[str, bool]:
    """Use nothing any more that was cached before, in memory, directory or store, whatever
    reset_external says. Requests that run keep their blocks."""
    check_admin(request.scope, api.config, "the prefix cache is shared by all keys")
    if reset_running_requests:
        raise bad_request(
            "reset_running_requests=true: running requests cannot release their blocks; remove the"
            " field, or end the requests with /abort_requests.",
            "reset_running_requests",
        )
    await api.engine.reset_prefix_cache()
    return {"reset": True}


@router.post("/abort_requests")
async def abort_requests(
    request: fastapi.Request, api: Api, body: CancelBody | None = None
) -> dict[str, Any]:
    """End requests, which answer with what they have and finish_reason `abort`; the ids of those
    that were open, as the engine calls them."""
    whose = reader_of(request.scope, api.config.api_key)
    tenant = None if is_admin(request.scope, api.config) else whose
    ids = None if body is None else body.request_ids
    return {"request_ids": await api.engine.cancel(ids, tenant)}


def check_admin(scope: Scope, config: ServerConfig, why: str) -> None:
    """Raise ApiError 403 if a caller may not do what concerns all others, and say why."""
    if not is_admin(scope, config):
        text = f"{why}; ask the operator to name this key in admin_api_key."
        raise ApiError(403, text, "permission_error", code="not_an_admin")


def is_admin(scope: Scope, config: ServerConfig) -> bool:
    """Tell whether a caller may do what concerns all others."""
    if not config.api_key:
        return True
    return bool(config.admin_api_key) and has_key(scope, config.admin_api_key)
