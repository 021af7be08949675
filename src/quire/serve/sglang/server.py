"""Routes of SGLang's server about the server: the model, the state, the cache and its health."""

from typing import Any

import fastapi
from fastapi import APIRouter, Depends
from starlette.responses import PlainTextResponse, Response

from quire.base.requests.pooling import EMBED
from quire.base.version import QUIRE_VERSION
from quire.serve.bodies.protocol import CompletionRequest
from quire.serve.context import Api, require_known_model
from quire.serve.errors import ApiError
from quire.serve.http.limits import generating
from quire.serve.http.middleware import new_id
from quire.serve.http.sse import unless_disconnected
from quire.serve.native.admin import check_admin
from quire.serve.native.trainer import vllm_config
from quire.serve.pipeline.answer import collect
from quire.serve.pipeline.completion import completion_job
from quire.serve.pipeline.plan import plan_completion
from quire.serve.pipeline.prompts import render_completion
from quire.serve.pipeline.requests import Origin
from quire.serve.sglang.writer import WEIGHT_VERSION

Json = dict[str, Any]

HEALTH_S = 20.0  # timeout of the request that tests the engine

router = APIRouter()
generating_router = APIRouter(dependencies=[Depends(generating)])


@router.get("/model_info", dependencies=[Depends(require_known_model)])
@router.get("/get_model_info", dependencies=[Depends(require_known_model)])
async def model_info(api: Api) -> Json:
    """Describe the model. The location of its files is not shown."""
    name, known = api.model_names[0], api.client.ready
    return {
        "model_path": name,
        "tokenizer_path": name,
        "is_generation": known.pooling is None,
        "preferred_sampling_params": None,
        "weight_version": WEIGHT_VERSION,
        "has_image_understanding": api.takes_images,
        "has_audio_understanding": False,
        "model_type": known.architecture,
    }


@router.get("/server_info", dependencies=[Depends(require_known_model)])
@router.get("/get_server_info", dependencies=[Depends(require_known_model)])
async def server_info(api: Api) -> Json:
    """Describe the server: its limits, its version, and its open requests. Trainers read
    `vllm_config`, which vLLM's server has under the same path."""
    name, known = api.model_names[0], api.client.ready
    return {
        "model_path": name,
        "tokenizer_path": name,
        "served_model_name": name,
        "is_embedding": known.pooling is not None and known.pooling.task == EMBED,
        "context_length": known.max_model_len,
        "max_running_requests": known.max_num_seqs,
        "internal_states": [{"num_open_requests": api.num_open}],
        "version": f"quire {QUIRE_VERSION}",
        "status": "ready" if api.client.is_alive and not api.draining else "not ready",
        "numerics": known.numerics,
        "vllm_config": vllm_config(api),
    }


@router.post("/flush_cache")
async def flush_cache(request: fastapi.Request, api: Api) -> Response:
    """Invalidate all cached blocks, as /reset_prefix_cache does. Running requests keep theirs."""
    check_admin(request.scope, api.config, "the prefix cache is shared by all keys")
    await api.engine.reset_prefix_cache()
    return PlainTextResponse("Cache flushed.\n")


@generating_router.get("/health_generate")
async def health_generate(request: fastapi.Request, api: Api) -> Response:
    """Answer 200 if the engine generates a token in time. A model that pools is only asked whether
    its engine is alive."""
    if api.client.ready.pooling is not None:
        return Response(status_code=200 if api.client.is_alive else 503)
    body = CompletionRequest.model_construct(
        prompt=[0], max_tokens=1, temperature=0.0, timeout_s=HEALTH_S
    )
    plan = plan_completion(api, body, request.scope, new_id("health"))
    prompt = await render_completion(api, plan, body.prompt)
    job = completion_job(api, plan, prompt, 0, "", Origin(plan.core_id))
    try:
        await unless_disconnected(request.receive, collect(api.client, [job]))
    except ApiError as error:
        if error.code != "request_timeout":
            raise
        text = f"the engine has generated nothing in {HEALTH_S:g} s; see its log."
        raise ApiError(503, text, "server_error", code="engine_busy") from error
    return Response(status_code=200)
