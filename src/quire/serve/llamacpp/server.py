"""Routes of llama.cpp's server that generate nothing: properties, slots, templates, embeddings."""

from dataclasses import replace
from typing import Any

import fastapi
from fastapi import Depends
from starlette.responses import Response

from quire.base.requests.pooling import EMBED
from quire.base.version import QUIRE_VERSION
from quire.serve.bodies.any_type import AnyTypeRoute
from quire.serve.bodies.open_body import check_neutral
from quire.serve.bodies.pooling_protocol import EmbeddingBody
from quire.serve.bodies.protocol import ChatCompletionRequest
from quire.serve.context import Api, require_known_model
from quire.serve.errors import ApiError, bad_request
from quire.serve.http.limits import generating
from quire.serve.http.sse import encode
from quire.serve.llamacpp.protocol import NativeEmbeddingBody, TemplateBody
from quire.serve.openai.pooled import PoolingCall, params_of, split_inputs
from quire.serve.pipeline.plan import plan_prompt
from quire.serve.pipeline.prompts import images_of, render_chat

Json = dict[str, Any]

NOT_NORMALISED = -1
SAME = ("model", "priority", "timeout_s", "cache_salt")

router = fastapi.APIRouter(route_class=AnyTypeRoute)


def as_json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


@router.get("/props", dependencies=[Depends(require_known_model)])
async def props(api: Api) -> Response:
    """Describe the server: its defaults, its number of slots, its template. The location of the
    model's files is not shown."""
    known, tokenizer = api.client.ready, api.renderer.tokenizer
    defaults = api.requests.defaults.default_sampling_params()
    params = {
        "temperature": defaults.temperature, "top_k": defaults.top_k, "top_p": defaults.top_p,
        "min_p": defaults.min_p, "repeat_penalty": defaults.repetition_penalty,
        "n_predict": -1, "seed": -1,
    }  # fmt: skip
    name, named = api.model_names[0], {} if tokenizer is None else tokenizer.named_tokens
    return as_json(
        {
            "default_generation_settings": {"n_ctx": known.max_model_len, "params": params},
            "total_slots": known.max_num_seqs,
            "model_alias": name,
            "model_path": name,
            "modalities": {"vision": api.takes_images, "audio": False},
            "chat_template": (tokenizer.chat_template if tokenizer else None) or "",
            "bos_token": named.get("bos_token") or "",
            "eos_token": named.get("eos_token") or "",
            "build_info": f"quire {QUIRE_VERSION}",
        }
    )


@router.get("/slots", dependencies=[Depends(require_known_model)])
async def slots(api: Api, fail_on_no_slot: bool = False) -> Response:
    """List the rows of the engine as slots. As many are processing as requests are open."""
    known, num_open = api.client.ready, api.num_open
    if fail_on_no_slot and num_open >= known.max_num_seqs:
        raise ApiError(503, "all slots are busy; try again later.", "server_error", code="no_slot")
    return as_json(
        [
            {"id": row, "n_ctx": known.max_model_len, "is_processing": row < num_open}
            for row in range(known.max_num_seqs)
        ]
    )


@router.post("/props", include_in_schema=False)
@router.post("/slots/{slot_id}", include_in_schema=False)
async def change_server() -> None:
    """Refuse to change properties, and to save or restore the cache of a slot."""
    raise ApiError(
        501,
        "quire stores no slots in files; use /v1/requests for sessions, and --kv-disk-dir for a"
        " cache on disk. Properties are settings of the command line.",
        code="unsupported_endpoint",
    )


@router.post("/apply-template", dependencies=[Depends(require_known_model)])
async def apply_template(body: TemplateBody, api: Api) -> Response:
    """Return the text of a conversation, as the model gets it."""
    check_neutral(body)
    fields = {name: getattr(body, name) for name in body.model_fields_set - {"reasoning_format"}}
    plan = plan_prompt(api, ChatCompletionRequest.model_construct(**fields))
    async with images_of(api, plan) as (plan, images):
        prompt = await render_chat(api, plan, images, is_counted=True)
    return as_json({"prompt": prompt.text or ""})


@router.post("/embedding", dependencies=[Depends(generating)])
async def embedding(body: NativeEmbeddingBody, request: fastapi.Request, api: Api) -> Response:
    """Return the embedding of each text, as lists of one row each."""
    check_neutral(body)
    if (body.content is None) == (body.input is None):
        raise bad_request("give either content or input.", "content")
    given = body.input if body.content is None else body.content
    fields: Json = {name: getattr(body, name) for name in SAME} | {"input": given}
    pooled = EmbeddingBody.model_construct(**fields)
    is_unit = body.embd_normalize != NOT_NORMALISED
    params = replace(params_of(pooled), use_activation=is_unit)
    call = PoolingCall(api, pooled, request, "embd", params, EMBED)
    field = "input" if body.content is None else "content"
    prompts = await call.admitted(split_inputs(given, field))
    numbers, _ = await call.run([[each] for each in prompts], field)
    return await call.answer(
        [{"index": index, "embedding": [each.tolist()]} for index, each in enumerate(numbers)]
    )
