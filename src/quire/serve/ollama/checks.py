"""The first steps with each of Ollama's bodies: find its model, and check its fields.

The name of a model may end in `:latest`, which Ollama's clients add.
"""

from typing import TypeVar

import fastapi

from quire.serve.bodies.inner_fields import check_inner
from quire.serve.bodies.open_body import check_neutral, name_ignored
from quire.serve.context import ApiContext, model_known
from quire.serve.ollama.protocol import OllamaBody
from quire.serve.pipeline.plan import check_model

Body = TypeVar("Body", bound=OllamaBody)

LATEST = ":latest"
NUM_CTX = "options.num_ctx"


def own_name(api: ApiContext, name: str | None) -> str | None:
    """Return a model's name as it is known here: without `:latest`, unless it is known with it."""
    short = (name or "").removesuffix(LATEST)
    return short if name not in api.all_names and short in api.all_names else name


async def checked(api: ApiContext, body: Body, request: fastapi.Request) -> tuple[ApiContext, Body]:
    """Return the context of the model that a body names, and the body with the model's name here.
    Name a num_ctx above the model's limit in the response's header. Raise ApiError for fields and
    options that would change the text."""
    _check_fields(body, request)
    name, found = own_name(api, body.model), api
    if name != body.model:
        found, body = api.of_model(name), body.model_copy(update={"model": name})
        await model_known(found, name)
    num_ctx = None if body.options is None else body.options.num_ctx
    if num_ctx is not None:
        check_model(found, name)
        if num_ctx > found.client.ready.max_model_len:  # which holds
            name_ignored(request.scope, NUM_CTX)
    return found, body


async def served(api: ApiContext, requested: str | None) -> tuple[ApiContext, str]:
    """Return the context and the name of a model. Raise ApiError 404 for an unknown one."""
    name = own_name(api, requested)
    found = api.of_model(name)
    await model_known(found, name)
    return found, check_model(found, name)


def _check_fields(body: OllamaBody, request: fastapi.Request) -> None:
    """Refuse fields and options that would change the text, and name the unknown options in the
    response's header. Raises ApiError."""
    check_neutral(body)
    check_inner(body.options, "options", "option", request)
