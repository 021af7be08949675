"""Routes of Ollama's API about models: which are served, what they can do, and embeddings."""

import contextlib
import hashlib
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import fastapi
from fastapi import Depends
from starlette.responses import Response

from quire.base.errors import EngineDead, RequestError
from quire.base.requests.pooling import EMBED
from quire.base.version import QUIRE_VERSION
from quire.render.infill import Infill
from quire.serve.bodies.any_type import AnyTypeRoute
from quire.serve.bodies.pooling_protocol import EmbeddingBody
from quire.serve.context import Api, ApiContext
from quire.serve.errors import ApiError
from quire.serve.http.limits import generating
from quire.serve.http.sse import encode
from quire.serve.ollama.as_chat import SAME
from quire.serve.ollama.checks import checked, served
from quire.serve.ollama.lines import NDJSON, line_bytes
from quire.serve.ollama.protocol import (
    EmbedBody,
    EmbeddingsBody,
    OllamaBody,
    PullBody,
    ShowBody,
)
from quire.serve.openai.pooled import PoolingCall, params_of

Json = dict[str, Any]

OLLAMA_VERSION = "0.13.0"  # the version whose API these routes follow; clients compare it
NEVER = "9999-12-31T23:59:59Z"
GGUF = ".gguf"
NO_CHANGES = (
    "quire serves the models that it was started with, and cannot create, copy, push or delete"
    " models; start it with the models that you need."
)
# Options of a model as a request's options name them, and as its defaults do.
PARAMETERS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
}  # fmt: skip

router = fastapi.APIRouter(route_class=AnyTypeRoute)


def as_json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


@router.get("/api/version")
async def version() -> Json:
    """Return the version of Ollama's API that is followed here, and quire's version."""
    return {"version": OLLAMA_VERSION, "quire": QUIRE_VERSION}


@router.get("/api/tags")
async def tags(api: Api) -> Response:
    """List the served models, once under each name."""
    return as_json({"models": [_card(each, name) for each, name in _all_names(api)]})


@router.get("/api/ps")
async def loaded_models(api: Api) -> Response:
    """List the models that are loaded."""
    found = []
    for each, name in _all_names(api):
        if not each.is_loaded:
            continue
        known = each.client.ready
        on_gpu = known.settings.get("device") == "cuda"
        card = _card(each, name) | {"expires_at": NEVER, "context_length": known.max_model_len}
        found.append(card | {"size_vram": known.weights_bytes if on_gpu else 0})
    return as_json({"models": found})


@router.post("/api/show")
async def show(body: ShowBody, api: Api) -> Response:
    """Describe a model: its template, its length and what it can do."""
    api, name = await served(api, body.requested)
    known, card, tokenizer = api.client.ready, _card(api, name), api.renderer.tokenizer
    defaults = api.requests.defaults.default_sampling_params()
    parameters = [f"{own:<30} {getattr(defaults, ours)}" for own, ours in PARAMETERS.items()]
    kind = known.architecture or "unknown"
    info = {
        "general.architecture": kind,
        "general.basename": name,
        f"{kind}.context_length": known.max_model_len,
        f"{kind}.vocab_size": known.vocab_size,
    }
    return as_json(
        {
            "modelfile": f"# {name}, served by quire\n",
            "parameters": "\n".join(parameters),
            "template": (tokenizer.chat_template if tokenizer else None) or "",
            "details": card["details"],
            "model_info": info,
            "capabilities": _capabilities(api),
            "modified_at": card["modified_at"],
        }
    )


@router.post("/api/pull")
async def pull(body: PullBody, api: Api) -> Response:
    """Report success for a served model, and refuse any other."""
    try:
        await served(api, body.requested)
    except ApiError as error:
        error.message += (
            " It downloads no models while it runs: start it with a model's Hugging Face id or GGUF"
            " file (quire serve MODEL)."
        )
        raise
    done = {"status": "success"}
    return as_json(done) if body.stream is False else Response(line_bytes(done), media_type=NDJSON)


@router.post("/api/create", include_in_schema=False)
@router.post("/api/copy", include_in_schema=False)
@router.post("/api/push", include_in_schema=False)
@router.delete("/api/delete", include_in_schema=False)
async def change_models() -> None:
    """Refuse to change models."""
    raise ApiError(501, NO_CHANGES, code="unsupported_endpoint")


@router.post("/api/embed", dependencies=[Depends(generating)])
async def embed(body: EmbedBody, request: fastapi.Request, api: Api) -> Response:
    """Return the embedding of each text, normalised to unit length."""
    started_ns = time.perf_counter_ns()
    if not body.input:
        _, name = await served(api, body.model)
        return as_json({"model": name, "embeddings": []})
    fields = {"input": body.input, "dimensions": body.dimensions, "use_activation": True}
    can_cut = body.truncate is not False
    call, numbers, num_tokens = await _embedded(body, request, api, fields, can_cut)
    times = {"total_duration": time.perf_counter_ns() - started_ns, "load_duration": 0}
    return await call.answer(
        {"model": call.model, "embeddings": numbers, **times, "prompt_eval_count": num_tokens}
    )


@router.post("/api/embeddings", dependencies=[Depends(generating)])
async def embeddings(body: EmbeddingsBody, request: fastapi.Request, api: Api) -> Response:
    """Return the embedding of one text, as the older endpoint does: not normalised."""
    if not body.prompt:
        return as_json({"embedding": []})
    fields = {"input": body.prompt, "use_activation": False}
    call, [numbers], _ = await _embedded(body, request, api, fields)
    return await call.answer({"embedding": numbers})


def _max_tokens(body: OllamaBody, api: ApiContext) -> int:
    """Return where an input is cut: at num_ctx, or at what fits (-1)."""
    limit = body.limit
    is_less = limit is not None and limit.num_tokens < api.client.ready.max_model_len
    return limit.num_tokens if limit is not None and is_less else -1


async def _embedded(
    body: OllamaBody,
    request: fastapi.Request,
    api: ApiContext,
    fields: Json,
    can_cut: bool = True,
) -> tuple[PoolingCall, list[list[float]], int]:
    """Return the call, the embeddings, and the number of tokens of all texts."""
    api, body = await checked(api, body, request)
    if can_cut:
        fields["truncate_prompt_tokens"] = _max_tokens(body, api)
    fields |= {name: getattr(body, name) for name in SAME} | {"model": body.model}
    embedding_body = EmbeddingBody.model_construct(**fields)
    params = replace(params_of(embedding_body), dimensions=fields.get("dimensions"))
    call = PoolingCall(api, embedding_body, request, "embd", params, EMBED)
    prompts = await call.prompts(embedding_body)
    numbers, usage = await call.run([[each] for each in prompts], "input")
    return call, [each.tolist() for each in numbers], usage["prompt_tokens"]


def _all_names(api: ApiContext) -> list[tuple[ApiContext, str]]:
    return [(each, name) for each in api.models or (api,) for name in each.model_names]


def _card(api: ApiContext, name: str) -> Json:
    """Describe a model, which may never have been loaded. The digest is made of its name."""
    kind, size, path = "", 0, ""
    with contextlib.suppress(EngineDead):
        known = api.client.ready
        kind, size, path = known.architecture, known.weights_bytes, known.settings.get("model", "")
    details = {
        "parent_model": "",
        "format": "gguf" if str(path).endswith(GGUF) else "safetensors",
        "family": kind,
        "families": [kind] if kind else [],
        "parameter_size": "",
        "quantization_level": "",
    }
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(api.started_s, UTC).isoformat(),
        "size": size,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": details,
    }


def _capabilities(api: ApiContext) -> list[str]:
    if api.client.ready.pooling is not None:
        return ["embedding"]
    found, tokenizer = ["completion"], api.renderer.tokenizer
    if tokenizer is not None and Infill.of(tokenizer) is not None:
        found.append("insert")
    if api.takes_images:
        found.append("vision")
    with contextlib.suppress(RequestError):  # a model without a chat template
        form = api.renderer.answer_format(None, with_tools=True)
        found += ["tools"] if form.calls is not None else []
        found += ["thinking"] if form.reasoning is not None else []
    return found
