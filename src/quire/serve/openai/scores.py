"""POST /score and /rerank: similarity of texts.

A classifier with one class scores each pair. An embedding model embeds each text once, and a score
is the cosine of the angle between two embeddings.
"""

import time

import fastapi
from starlette.responses import Response

from quire.base.errors import RequestError
from quire.base.requests.pooling import CLASSIFY, EMBED
from quire.base.requests.pooling_params import cosine
from quire.serve.bodies.pooling_protocol import PoolingBody, RerankBody, ScoreBody
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.context import Api
from quire.serve.errors import bad_request
from quire.serve.openai.pooled import CutText, PoolingCall, params_of, split_texts
from quire.serve.pipeline.answer import Json
from quire.serve.python.pooling import check_scorer, paired

router = fastapi.APIRouter(route_class=BoundedRoute)

NAMES = (
    ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"),
)  # fmt: skip


@router.post("/score")
@router.post("/v1/score", operation_id="score_v1")
async def score(body: ScoreBody, request: fastapi.Request, api: Api) -> Response:
    """Score texts: one text with each of the others, or pairwise."""
    call = _call(api, body, request, "score")
    names = _given_names(body)
    first, second = (split_texts(getattr(body, name), name) for name in names)
    scores, usage = await _scores(call, first, second, names)
    data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)]
    head = {"id": call.id, "object": "list", "created": int(time.time()), "model": call.model}
    return await call.answer(head | {"data": data, "usage": usage})


@router.post("/rerank")
@router.post("/reranking")
@router.post("/v1/rerank", operation_id="rerank_v1")
@router.post("/v2/rerank", operation_id="rerank_v2")
async def rerank(body: RerankBody, request: fastapi.Request, api: Api) -> Response:
    """Sort documents by how well they match a query, best first."""
    call = _call(api, body, request, "rerank")
    documents = split_texts(body.documents, "documents")
    names, max_tokens = ("query", "documents"), max(0, body.max_tokens_per_doc or 0)
    scores, usage = await _scores(call, [body.query], documents, names, max_tokens)
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[Json] = [
        {"index": index, "relevance_score": scores[index]}
        for index in ranked[: body.top_n or len(ranked)]
    ]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    head = {"id": call.id, "model": call.model}
    return await call.answer(head | {"results": results, "usage": usage})


def _given_names(body: ScoreBody) -> tuple[str, str]:
    """Return the names of the two fields that a body sets. If it sets only the first field of a
    pair, return that pair; if it sets none, return the first pair."""
    given = [names for names in NAMES if getattr(body, names[0]) is not None]
    whole = [names for names in given if getattr(body, names[1]) is not None]
    return (*whole, *given, *NAMES)[0]


def _call(api: Api, body: PoolingBody, request: fastapi.Request, prefix: str) -> PoolingCall:
    return PoolingCall(api, body, request, prefix, params_of(body), EMBED, CLASSIFY)


async def _scores(
    call: PoolingCall,
    first: list[object],
    second: list[object],
    names: tuple[str, str],
    max_tokens: int = 0,
) -> tuple[list[float], Json]:
    """Return the score of each pair, and the usage. max_tokens: number of tokens to keep of each
    second text; 0 keeps all."""
    try:
        pairs = paired(first, second, names)
    except RequestError as error:
        raise bad_request(str(error), error.field) from error
    if call.spec.task == CLASSIFY:
        check_scorer(call.spec)
    seen = await call.admitted([*first, *second])
    first, second = seen[: len(first)], seen[len(first) :]
    if max_tokens:
        second = [CutText(str(text), max_tokens) for text in second]
    if call.spec.task == CLASSIFY:
        numbers, usage = await call.run(paired(first, second, names), names[1])
        return [float(each[0]) for each in numbers], usage
    numbers, usage = await call.run([[text] for text in (*first, *second)], names[1])
    ones, twos = numbers[: len(first)], numbers[len(first) :]
    ones *= len(pairs) // len(ones)
    return [cosine(one, two) for one, two in zip(ones, twos, strict=True)], usage
