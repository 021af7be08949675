"""Routes of TRL's server (`trl vllm-serve` up to TRL 1.10), below paths that end with a slash.

    POST /generate/                continue texts or token ids
    POST /chat/                    answer several conversations
    POST /get_sequence_logprobs/   score whole sequences

Later versions of TRL use vLLM's own routes. New weights come by `/update_weights`, from a folder or
as chunks of safetensors files. The routes of an NCCL group are refused and name that way.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import fastapi
from starlette.responses import Response

from quire.serve.bodies.constraints import checked_grammar
from quire.serve.bodies.inner_fields import check_inner
from quire.serve.bodies.open_body import check_neutral
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.context import Api
from quire.serve.errors import ApiError, own_fields
from quire.serve.http.sse import encode, unless_disconnected
from quire.serve.native import admin, trainer
from quire.serve.openai.chat_completions import chat_answer
from quire.serve.openai.completions import check_shared, completion_answer
from quire.serve.pipeline.answer import Answer
from quire.serve.rollouts.as_requests import (
    rollout_chats,
    rollout_completion,
    sequences_completion,
)
from quire.serve.rollouts.protocol import (
    RolloutBody,
    RolloutChatBody,
    RolloutFields,
    SequencesBody,
)
from quire.serve.rollouts.trl_writer import rollouts_json, scores_binary, scores_json

Json = dict[str, Any]

NO_GROUP = (
    "weights do not come through an NCCL group. Save the model with save_pretrained, or send its"
    f" tensors, and call {trainer.WAYS}"
)

public = fastapi.APIRouter()
router = fastapi.APIRouter()
generating_router = fastapi.APIRouter(route_class=BoundedRoute)


@generating_router.post("/generate/")
async def generate(body: RolloutBody, request: fastapi.Request, api: Api) -> Response:
    """Continue each prompt n times. The answer has token ids and log-probabilities, no text."""
    _check(body, request)
    with own_fields({"prompt": "prompts"}):
        answer, _ = await completion_answer(rollout_completion(body), request, api, can_cut=False)
    [found] = await unless_disconnected(request.receive, _wholes([answer]))
    prompt_ids = [list(job.request.prompt_token_ids) for job in answer.jobs]
    return _json(rollouts_json(prompt_ids, found["choices"]))


@generating_router.post("/chat/")
async def chat(body: RolloutChatBody, request: fastapi.Request, api: Api) -> Response:
    """Answer each conversation n times, in the same form."""
    _check(body, request)
    chats = rollout_chats(body)
    check_shared(chats[0], len(chats))
    await checked_grammar(api, chats[0], len(chats))
    answers = [(await chat_answer(each, request, api))[0] for each in chats]
    found = await unless_disconnected(request.receive, _wholes(answers))
    prompt_ids = [list(answer.jobs[0].request.prompt_token_ids) for answer in answers]
    return _json(rollouts_json(prompt_ids, [each for one in found for each in one["choices"]]))


@generating_router.post("/get_sequence_logprobs/")
async def score(body: SequencesBody, request: fastapi.Request, api: Api) -> Response:
    """Return the log-probabilities of the tokens of each sequence, after its prompt."""
    check_neutral(body)
    completion = sequences_completion(body, api.client.ready)
    with own_fields({"prompt": "sequences"}):
        answer, _ = await completion_answer(completion, request, api, can_cut=False)
    [found] = await unless_disconnected(request.receive, _wholes([answer]))
    choices, lengths = found["choices"], body.prompt_lengths
    if body.response_format == "binary":
        num_top = completion.prompt_logprobs or 0
        return _json(scores_binary(choices, body.sequences, lengths, num_top))
    return _json(scores_json(choices, lengths))


@public.get("/health/")
async def health(api: Api) -> Response:
    """Answer 200 while the engine is alive."""
    if not api.engine.is_alive:
        return Response(status_code=503)
    return _json({"status": "ok"})


@router.get("/get_world_size/")
async def world_size(api: Api) -> dict[str, int]:
    """Do the same as /get_world_size."""
    return await trainer.world_size(api)


@router.post("/reset_prefix_cache/")
async def reset_prefix_cache(request: fastapi.Request, api: Api) -> dict[str, bool]:
    """Do the same as /reset_prefix_cache."""
    return await admin.reset_prefix_cache(request, api)


@router.post("/close_communicator/")
async def close_communicator() -> dict[str, str]:
    """Do nothing, because no communicator is ever open."""
    return {"message": "no communicator is open"}


def _refusal(path: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        """Refuse the request without reading its body."""
        headers = {"x-should-retry": "false"}
        text = f"{path} is not supported: {NO_GROUP}."
        raise ApiError(501, text, code="unsupported_endpoint", headers=headers)

    return refuse


for _path in ("/init_communicator/", "/update_named_param/", "/batch_update_named_params/"):
    router.add_api_route(_path, _refusal(_path), methods=["POST"], include_in_schema=False)


def _check(body: RolloutFields, request: fastapi.Request) -> None:
    check_neutral(body)
    check_inner(body.generation_kwargs, "generation_kwargs", "sampling parameter", request)


async def _wholes(answers: Sequence[Answer]) -> list[Json]:
    """Return all whole answers. If one fails, the others end, too. Raises ApiError if one was
    aborted, since answers of these routes cannot say so."""
    tasks = [asyncio.create_task(answer.whole()) for answer in answers]
    try:
        found = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if any(each["finish_reason"] == "abort" for one in found for each in one["choices"]):
        text = "the request was aborted before its answer was complete; send it again."
        raise ApiError(503, text, "server_error", code="aborted")
    return found


def _json(value: Json) -> Response:
    return Response(encode(value), media_type="application/json")
