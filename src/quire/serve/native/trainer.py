"""Orders of a trainer under vLLM's paths: pause an engine, and replace its weights.

    POST /pause?mode=keep         stop between two steps, until /resume
    POST /sleep?level=2           give memory back, until /wake_up
    POST /start_weight_update     begin an empty folder for chunks
    POST /update_weights/chunk    add one chunk; the body is a safetensors file
    POST /finish_weight_update    load all chunks, and use them from the next step on

`/update_weights` with a path loads at once and needs no start. Chunks are written to shared memory;
no pickle is read. On a server with keys, these routes need `admin_api_key`. Without keys, only
connections from the same machine may use them.
"""

import ipaddress
import math
from typing import Annotated, Any, Literal

import fastapi
from pydantic import Field

from quire.base.errors import RequestError
from quire.base.messages import SLEEPING_PARTS
from quire.engine.client.async_client import PAUSE_MODES, pause, sleep, wake_up
from quire.serve.bodies.open_body import StrictBody, at_most, becomes
from quire.serve.bodies.protocol import FilePath, Label
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.bodies.validation_errors import shown
from quire.serve.context import Api, ApiContext
from quire.serve.errors import ApiError, bad_request
from quire.serve.native.admin import check_admin

WAYS = "/update_weights with a path, or chunks of safetensors files"

MAX_INIT_FIELDS = 32
InitInfo = Annotated[dict[str, Any], Field(max_length=MAX_INIT_FIELDS), at_most(MAX_INIT_FIELDS)]

Tags = Annotated[list[str] | None, fastapi.Query(max_length=len(SLEEPING_PARTS))]

router = fastapi.APIRouter(route_class=BoundedRoute)
chunks = fastapi.APIRouter()  # its bodies are not JSON


class InitBody(StrictBody):
    """A body of /init_weight_transfer_engine. init_info: empty, or `backend` as `path` or
    `http`."""

    init_info: InitInfo | None = becomes("nothing: both transports need no preparation")


class StartBody(StrictBody):
    """A body of /start_weight_update."""

    is_checkpoint_format: Literal[True] = becomes(
        "nothing: names are the checkpoint's", default=True
    )


class UpdateInfo(StrictBody):
    """vLLM's envelope of an update."""

    path: FilePath = becomes("UpdateWeights.path", default=...)


class UpdateBody(StrictBody):
    """A body of /update_weights. path: folder or GGUF file on the engine's machine, either here or
    in update_info. partial: it has some of the tensors, or deltas; the rest stays."""

    path: FilePath | None = becomes("UpdateWeights.path")
    partial: bool = becomes("UpdateWeights.is_partial", default=False)
    update_info: UpdateInfo | None = becomes("UpdateWeights.path")
    weights_version: Label = becomes("UpdateWeights.version", default="")


class FinishBody(StrictBody):
    """A body of /finish_weight_update. partial: the chunks have some of the tensors."""

    partial: bool = becomes("UpdateWeights.is_partial", default=False)
    weights_version: Label = becomes("UpdateWeights.version", default="")


@router.get("/get_world_size")
async def world_size(api: Api) -> dict[str, int]:
    """Return the number of processes that hold weights, as vLLM counts them."""
    settings = api.client.ready.settings
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return {"world_size": math.prod(settings.get(name, 1) for name in names)}


def vllm_config(api: ApiContext) -> dict[str, Any]:
    """Return the parts of vLLM's configuration that trainers read from /server_info. Without a
    weight_transfer_config they do not wait for an NCCL group."""
    known = api.client.ready
    model = {
        "model": api.model_names[0],
        "dtype": f"torch.{known.numerics.get('formats', 'auto').partition(',')[0]}",
        "max_model_len": known.max_model_len,
    }
    return {"model_config": model, "weight_transfer_config": None}


@router.post("/pause")
async def pause_engine(
    request: fastapi.Request, api: Api, mode: str = "abort", clear_cache: bool = True
) -> dict[str, str]:
    """Pause between two steps. mode: `abort` ends running requests with their output so far,
    `wait` lets them finish, `keep` freezes them. Later requests wait for /resume."""
    client = _of_one_model(request, api).client
    if mode not in PAUSE_MODES:
        raise bad_request(f"mode={mode!r} is unknown; use {', '.join(PAUSE_MODES)}.", "mode")
    await pause(client, mode, clear_cache=clear_cache)
    return {"status": "paused"}


@router.post("/resume")
async def resume_engine(request: fastapi.Request, api: Api) -> dict[str, str]:
    """Continue after /pause."""
    await _of_one_model(request, api).client.pause(False)
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(request: fastapi.Request, api: Api) -> dict[str, bool]:
    """Return whether /pause is in effect."""
    return {"is_paused": await _of_one_model(request, api).client.pause(None)}


@router.post("/sleep")
async def sleep_engine(
    request: fastapi.Request, api: Api, level: int = 1, mode: str = "abort"
) -> dict[str, str]:
    """Free the KV memory, on level 2 also the weights. mode: as of /pause, without `keep`. Later
    requests wait for /wake_up."""
    client = _of_one_model(request, api).client
    try:
        await sleep(client, level, mode)
    except RequestError as error:
        raise bad_request(str(error), error.field) from error
    return {"status": "sleeping"}


@router.post("/wake_up")
async def wake_engine(request: fastapi.Request, api: Api, tags: Tags = None) -> dict[str, str]:
    """Wake the tagged parts of a sleeping engine, or all."""
    client = _of_one_model(request, api).client
    try:
        await wake_up(client, tags)
    except RequestError as error:
        raise bad_request(str(error), error.field) from error
    return {"status": "awake"}


@router.get("/is_sleeping")
async def is_sleeping(request: fastapi.Request, api: Api) -> dict[str, bool]:
    """Return whether the engine, or a part of it, sleeps."""
    return {"is_sleeping": await _of_one_model(request, api).client.set_sleep()}


@router.post("/init_weight_transfer_engine")
async def init_transfer(
    request: fastapi.Request, api: Api, body: InitBody | None = None
) -> dict[str, str]:
    """Accept the transports that quire has; refuse others."""
    _of_one_model(request, api)
    info = (body or InitBody()).init_info or {}
    if info.keys() - {"backend"} or info.get("backend", "path") not in ("path", "http"):
        names = ", ".join(map(shown, info))
        raise bad_request(f"init_info with {names} is not supported; use {WAYS}.", "init_info")
    return {"message": "Weight transfer initialized"}


@router.post("/start_weight_update")
async def start_update(
    request: fastapi.Request, api: Api, body: StartBody | None = None
) -> dict[str, str]:
    """Begin an empty set of chunks, in place of an unfinished one."""
    context = _of_one_model(request, api)
    if context.config.api_server_count > 1:
        raise bad_request(
            "chunks need one API process, because each connection may reach another one; use"
            " /update_weights with a path, or api_server_count=1."
        )
    context.uploads.begin()
    return {"message": "Weight update started"}


@chunks.post("/update_weights/chunk")
async def add_chunk(request: fastapi.Request) -> dict[str, int]:
    """Store one chunk, a safetensors file with some of the tensors."""
    context = _of_one_model(request, request.app.state.context)
    return {"chunks": await context.uploads.add(request)}


@router.post("/update_weights")
async def update_weights(request: fastapi.Request, api: Api, body: UpdateBody) -> dict[str, str]:
    """Load the weights of a path, and use them from the next step on."""
    context = _of_one_model(request, api)
    path = body.path or (body.update_info.path if body.update_info is not None else None)
    if path is None:
        raise bad_request(f"the body names no weights; use {WAYS}.", "path")
    return await _update(context, path, body.weights_version, body.partial)


@router.post("/finish_weight_update")
async def finish_update(
    request: fastapi.Request, api: Api, body: FinishBody | None = None
) -> dict[str, str]:
    """Load all chunks, and use them from the next step on."""
    context = _of_one_model(request, api)
    with context.uploads.take() as folder:
        given = body or FinishBody()
        return await _update(context, folder, given.weights_version, given.partial)


async def _update(context: ApiContext, path: str, version: str, is_partial: bool) -> dict[str, str]:
    try:
        made = await context.client.update_weights(path, version, is_partial=is_partial)
    except RequestError as error:
        raise bad_request(f"the old weights stay: {error}", "path") from error
    return {"message": "Weights updated", "weights_version": made}


def _of_one_model(request: fastapi.Request, api: ApiContext) -> ApiContext:
    """Return the context of the server's model. Raise ApiError without the right to change it, or
    with several models."""
    check_admin(request.scope, api.config, "the weights are shared by all keys")
    client = request.scope.get("client")
    if not api.config.api_key and client is not None and not _is_local(client[0]):
        raise ApiError(
            403,
            "without keys, only this machine may pause the engine or replace its weights; set"
            " api_key and admin_api_key.",
            "permission_error",
            code="not_an_admin",
        )
    if api.models:
        raise bad_request("a server of several models cannot replace weights; start one for each.")
    return api


def _is_local(host: str) -> bool:
    """Return whether a client's address is of this machine. A Unix socket has no address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return not host
