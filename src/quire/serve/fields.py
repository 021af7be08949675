"""The table of fields: how each API handles each field of its body.

The rows are derived from the routes and from the declarations at the fields of their bodies
(`bodies/open_body.py`). Validation reads the same declarations.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel

from quire.base.requests.sampling_params import SamplingParams
from quire.serve.anthropic import routes as messages
from quire.serve.batches import batches_routes
from quire.serve.bodies.foreign_fields import Refused
from quire.serve.bodies.open_body import NO_EFFECT, Becomes, body_class
from quire.serve.llamacpp import routes as llamacpp
from quire.serve.llamacpp import server as llamacpp_server
from quire.serve.lmstudio import routes as lmstudio
from quire.serve.native import admin, prefixes, sessions, trainer, utility
from quire.serve.native.open_request import OpenPromptRequest
from quire.serve.ollama import models as ollama_models
from quire.serve.ollama import routes as ollama
from quire.serve.ollama.protocol import Options
from quire.serve.openai import chat_completions, completions, embeddings, scores
from quire.serve.responses import routes as responses
from quire.serve.rollouts import tokens, trl
from quire.serve.rollouts.protocol import VllmSampling
from quire.serve.sglang import routes as sglang
from quire.serve.sglang.protocol import Sampling

# Fields of fields
OPTIONS = "api/... options"  # of Ollama's bodies
SAMPLING = "generate sampling_params"  # of SGLang's
OF_VLLM = "inference/v1/generate sampling_params"  # and generation_kwargs of TRL's bodies
STREAM = "/v1/stream"  # a WebSocket, whose route declares no body
ROUTERS = (
    chat_completions.router, completions.router, responses.router, messages.generating_router,
    messages.counting_router, embeddings.router, scores.router, utility.router, prefixes.router,
    sessions.router, admin.router, batches_routes.router,
)  # fmt: skip
# Endpoints of other engines.
OTHER_ENGINES = (
    ollama.router, ollama_models.router, llamacpp.router, llamacpp_server.router, sglang.router,
    lmstudio.generating_router, trainer.router, tokens.router, trl.generating_router,
)  # fmt: skip
PARTS: dict[str, type[BaseModel]] = {
    OPTIONS: Options, SAMPLING: Sampling, OF_VLLM: VllmSampling,
}  # fmt: skip
TAKEN, IGNORED, REFUSED = "taken", "ignored", "refused"
KINDS = {
    "integer": "whole number", "number": "number", "string": "text", "boolean": "true or false",
    "array": "list", "object": "object",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A field of an API. becomes: what a used field sets; advice: help for a refused field."""

    api: str  # the path, without /v1
    field: str
    type: str
    fate: str
    becomes: tuple[str, ...] = ()
    advice: str = ""
    values: tuple[object, ...] = ()  # neutral values, which are accepted in a refused field


def bodies() -> dict[str, type[BaseModel]]:
    """Return the class of each API's body, keyed by the API's shortest path without /v1/."""
    own = _bodies_of(ROUTERS) | {_name_of(STREAM): OpenPromptRequest}
    return own | _bodies_of(OTHER_ENGINES) | PARTS


def is_of_other_engine(api: str) -> bool:
    """Return whether an API is one of another engine's own endpoints."""
    return api in PARTS or api in _bodies_of(OTHER_ENGINES)


def _bodies_of(routers: Iterable[APIRouter]) -> dict[str, type[BaseModel]]:
    paths: dict[type[BaseModel], list[str]] = {}
    for router in routers:
        for route in router.routes:
            kind = body_class(route.endpoint) if isinstance(route, APIRoute) else None
            if kind is not None and isinstance(route, APIRoute):
                paths.setdefault(kind, []).append(route.path)
    return {_name_of(min(same, key=len)): kind for kind, same in paths.items()}


def _name_of(path: str) -> str:
    return path.removeprefix("/v1").removeprefix("/").replace("{request_id}", "ID")


@cache
def rows() -> tuple[Row, ...]:
    """Return the rows of all APIs."""
    return tuple(row for name, kind in bodies().items() for row in rows_of(name, kind))


def rows_of(name: str, kind: type[BaseModel]) -> Iterator[Row]:
    """Yield the rows of one API."""
    properties = kind.model_json_schema()["properties"]
    for field, info in kind.model_fields.items():
        shown = info.alias or field
        type_ = _type_of(properties[shown])
        declared = [each for each in info.metadata if isinstance(each, Becomes | Refused)]
        if NO_EFFECT in info.metadata:
            yield Row(name, shown, type_, IGNORED)
        elif not declared:
            assert field in SamplingParams.__struct_fields__, f"{kind.__name__}.{field} has no fate"
            yield Row(name, shown, type_, TAKEN, (f"SamplingParams.{field}",))
        elif isinstance(declared[-1], Refused):
            refused = declared[-1]
            yield Row(name, shown, type_, REFUSED, (), refused.advice, refused.values)
        else:
            yield Row(name, shown, type_, TAKEN, declared[-1].parts)


def _type_of(schema: dict[str, Any]) -> str:
    """Describe the type of a field, given its JSON schema, in words."""
    kinds = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    words: list[str] = []
    for each in kinds:
        if "enum" in each or "const" in each:
            choices = [value for value in each.get("enum", [each.get("const")]) if value]
            words.append(", ".join(f"`{choice}`" for choice in choices))
        elif "type" in each or "$ref" in each:
            words.append(KINDS[each.get("type", "object")])
    return " or ".join(dict.fromkeys(words)) or "any"
