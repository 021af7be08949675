"""POST /v1/embeddings and /classify: embeddings and class probabilities of inputs."""

import base64
import dataclasses
import time

import fastapi
import numpy as np
from starlette.responses import Response

from quire.base.plan import Float64
from quire.base.requests.pooling import CLASSIFY, EMBED
from quire.serve.bodies.pooling_protocol import ClassifyBody, EmbeddingBody
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.context import Api
from quire.serve.openai.pooled import PoolingCall, field_of, params_of

router = fastapi.APIRouter(route_class=BoundedRoute)


@router.post("/v1/embeddings")
async def create_embeddings(body: EmbeddingBody, request: fastapi.Request, api: Api) -> Response:
    """Return the embedding of each input, in order of the inputs."""
    params = dataclasses.replace(params_of(body), dimensions=body.dimensions)
    if params.use_activation is None:
        params = dataclasses.replace(params, use_activation=body.normalize)
    call = PoolingCall(api, body, request, "embd", params, EMBED)
    numbers, usage = await call.run([[each] for each in await call.prompts(body)], field_of(body))
    is_packed = body.encoding_format == "base64"
    data = [
        {
            "index": index,
            "object": "embedding",
            "embedding": _packed(each) if is_packed else each.tolist(),
        }
        for index, each in enumerate(numbers)
    ]
    head = {"id": call.id, "object": "list", "created": int(time.time()), "model": call.model}
    return await call.answer(head | {"data": data, "usage": usage})


@router.post("/classify")
async def classify(body: ClassifyBody, request: fastapi.Request, api: Api) -> Response:
    """Return the class probabilities of each input, and the name of its most probable class."""
    call = PoolingCall(api, body, request, "classify", params_of(body), CLASSIFY)
    numbers, usage = await call.run([[each] for each in await call.prompts(body)], field_of(body))
    data = [
        {
            "index": index,
            "label": call.spec.labels[int(np.argmax(each))],
            "probs": each.tolist(),
            "num_classes": len(each),
        }
        for index, each in enumerate(numbers)
    ]
    head = {"id": call.id, "object": "list", "created": int(time.time()), "model": call.model}
    return await call.answer(head | {"data": data, "usage": usage})


def _packed(numbers_K: Float64) -> str:
    """Return numbers `[K]` as float32, little endian, in base64."""
    return base64.b64encode(numbers_K.astype("<f4").tobytes()).decode()
