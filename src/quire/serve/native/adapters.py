"""Loading and unloading of adapters under vLLM's paths, and their scales under llama.cpp's.

On a server with keys, an admin key may load any adapter of the server's machine, and any key one
below `--lora-roots`. On a server without keys, only those below `--lora-roots` are loaded.
"""

from pathlib import Path
from typing import Any

import fastapi
from starlette.responses import PlainTextResponse

from quire.base.settings.config import ServerConfig
from quire.serve.adapters import NAME, PATH, add_adapter, by_number, remove_adapter, set_scales
from quire.serve.bodies.open_body import MODEL, Ignored, StrictBody, becomes
from quire.serve.bodies.protocol import FilePath, Label, Loras
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.bodies.validation_errors import shown
from quire.serve.context import Api, ApiContext
from quire.serve.errors import ApiError
from quire.serve.http.auth import reader_of
from quire.serve.native.admin import check_admin, is_admin

router = fastapi.APIRouter(route_class=BoundedRoute)

SHARED = "adapters are shared by all keys"


class LoadAdapterBody(StrictBody):
    """An adapter to load. load_inplace: replace an adapter of this name."""

    lora_name: Label = becomes(MODEL, default=...)
    lora_path: FilePath = becomes("Request.adapter_path", default=...)
    load_inplace: bool = becomes(MODEL, default=False)


class UnloadAdapterBody(StrictBody):
    """An adapter to unload."""

    lora_name: Label = becomes(MODEL, default=...)
    lora_int_id: Ignored


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(
    body: LoadAdapterBody, request: fastapi.Request, api: Api
) -> PlainTextResponse:
    """Load an adapter of the model. Afterwards `model` may name it. The response follows when the
    engine has loaded it; files that are not a suitable adapter get status 400."""
    check_processes(api)
    path = _allowed(body.lora_path, request, api.config)
    if body.load_inplace:
        check_admin(request.scope, api.config, SHARED)
    tenant = reader_of(request.scope, api.config.api_key) or ""
    await add_adapter(api, body.lora_name, path, replaces=body.load_inplace, tenant=tenant)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(
    body: UnloadAdapterBody, request: fastapi.Request, api: Api
) -> PlainTextResponse:
    """Unload an adapter. Its open requests are answered."""
    check_processes(api)
    if not api.config.api_key and not api.config.lora_roots:
        raise _not_allowed()
    check_admin(request.scope, api.config, SHARED)
    if body.lora_name not in api.adapters:
        raise ApiError(
            404,
            f"there is no adapter {shown(body.lora_name)}; GET /v1/models lists them.",
            param=NAME,
            code="not_found",
        )
    remove_adapter(api, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.get("/lora-adapters")
async def list_adapters(request: fastapi.Request, api: Api) -> list[dict[str, Any]]:
    """List the adapters and their scales in requests to the base model. On a server with keys, only
    admin keys see the paths; others see names."""
    shows_path = is_admin(request.scope, api.config)
    found = []
    for number, each in by_number(api).items():
        name = each.model_names[0]
        assert each.adapter is not None, "the context of an adapter"
        path = each.adapter.path if shows_path else name
        scale = api.scales.get(name, 0.0)
        entry = {"id": number, "path": path, "scale": scale, "name": name}
        found.append(entry | {"task_name": "", "prompt_prefix": ""})
    return found


@router.post("/lora-adapters")
async def scale_adapters(body: Loras, request: fastapi.Request, api: Api) -> dict[str, bool]:
    """Set the scales of adapters in requests to the base model; an adapter that the body does not
    name gets the scale 0. The response follows when the engine has loaded their sum."""
    check_processes(api)
    check_admin(request.scope, api.config, SHARED)
    await set_scales(api, body, reader_of(request.scope, api.config.api_key) or "")
    return {"success": True}


def _allowed(given: str, request: fastapi.Request, config: ServerConfig) -> str:
    """Return the path that a caller may load. Raises ApiError 403."""
    if config.api_key and is_admin(request.scope, config):
        return given
    for root in config.lora_roots:
        whole = Path(root).resolve()
        path = (whole / given).resolve()  # links are followed before the comparison
        if path.is_relative_to(whole) and path != whole:
            return str(path)
    raise _not_allowed()


def _not_allowed() -> ApiError:
    text = (
        f"{PATH} must be below one of this server's --lora-roots, unless an admin key is used; ask"
        " the operator to add its directory."
    )
    return ApiError(403, text, "permission_error", PATH, "not_allowed")


def check_processes(api: ApiContext) -> None:
    """Raise ApiError if other API processes would not see the change."""
    if api.peers.count > 1:
        raise ApiError(
            400,
            f"this server has {api.peers.count} API processes (--api-server-count), which cannot"
            " change their adapters together; name the adapters in --lora-modules.",
            code="unsupported_value",
        )


def card_of(api: ApiContext, card: dict[str, Any], *, shows_root: bool) -> dict[str, Any]:
    """Return the card of an adapter in a list of models, from its base model's card."""
    assert api.base is not None and api.adapter is not None
    own = {"id": api.model_names[0], "parent": api.base.model_names[0]}
    return card | own | {"root": api.adapter.path if shows_root else api.model_names[0]}
