"""Administration under vLLM's paths: reset the prefix cache, and abort requests.

On a server with keys, only `admin_api_key` may reset the cache, because all keys share it. A key
may abort its own requests, and an admin key all requests. Without keys every client may do both.
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
    """A body of /abort_requests. request_ids: ids of responses (cmpl-..., chatcmpl-..., msg-...);
    all requests if absent."""

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
    """Invalidate all cached blocks, in memory, directory and store, whatever `reset_external` is.
    Running requests keep their blocks."""
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
    """Abort requests. They return the output so far, with finish_reason `abort`. Return the
    engine's ids of the requests that were open."""
    reader = reader_of(request.scope, api.config.api_key)
    tenant = None if is_admin(request.scope, api.config) else reader
    ids = None if body is None else body.request_ids
    return {"request_ids": await api.engine.cancel(ids, tenant)}


def check_admin(scope: Scope, config: ServerConfig, why: str) -> None:
    """Raise ApiError 403, with the reason `why`, if a caller is not an admin."""
    if not is_admin(scope, config):
        text = f"{why}; ask the operator to name this key in admin_api_key."
        raise ApiError(403, text, "permission_error", code="not_an_admin")


def is_admin(scope: Scope, config: ServerConfig) -> bool:
    """Return whether a caller may act on the data of all clients."""
    if not config.api_key:
        return True
    return bool(config.admin_api_key) and has_key(scope, config.admin_api_key)
