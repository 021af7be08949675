"""POST /inference/v1/generate: tokens in and tokens out, in the form of vLLM's route.

Choices have token ids and log-probabilities whose tokens are named by their ids, and no text. Hooks
of the server read the text first; a choice that a hook has changed loses its tokens.
"""

import base64
import io
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import fastapi
import numpy as np
from starlette.responses import Response

from quire.base.plan import Int16
from quire.base.requests.outputs import CompletionOutput, RequestOutput
from quire.serve.bodies.constraints import with_warnings
from quire.serve.bodies.inner_fields import check_inner
from quire.serve.bodies.logprobs_json import TokenNames, chat_logprobs, prompt_logprobs_json
from quire.serve.bodies.open_body import check_neutral
from quire.serve.bodies.protocol import CompletionRequest
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.context import Api
from quire.serve.errors import own_fields
from quire.serve.http.middleware import new_id
from quire.serve.http.sse import DONE, encode, event, start_stream, unless_disconnected
from quire.serve.pipeline.answer import Answer, UsageCounter, weights_fields, without_tokens
from quire.serve.pipeline.plan import plan_completion, usage_chunks
from quire.serve.pipeline.text import start_text
from quire.serve.rollouts.as_requests import tokens_completion
from quire.serve.rollouts.protocol import TokensBody

Json = dict[str, Any]

router = fastapi.APIRouter(route_class=BoundedRoute)


@router.post("/inference/v1/generate")
async def generate(body: TokensBody, request: fastapi.Request, api: Api) -> Response:
    """Continue token ids, n times."""
    check_neutral(body)
    check_inner(body.sampling_params, "sampling_params", "sampling parameter", request)
    completion = tokens_completion(body)
    usage = usage_chunks(completion, api.config)
    plan = plan_completion(api, completion, request.scope, new_id("gen"), usage)
    plan = replace(plan, can_cut=False)
    with own_fields({"prompt": "token_ids"}):
        texts = await start_text(api, plan, body.token_ids)
    counter = texts.choices[0][0].usage
    names = TokenNames(None, as_ids=True)
    choices = [TokensChoice(index, plan.body, counter, names) for index in range(completion.n or 1)]
    head = {
        "request_id": plan.id, "created": int(time.time()), "model": plan.model,
    }  # fmt: skip
    jobs, hooks = texts.jobs, texts.hooks
    answer = Answer(api.client, plan, head, jobs, [choices], hooks, names_numerics=True)
    if body.stream:
        response = await start_stream(request, _events(answer))
    else:
        found = await unless_disconnected(request.receive, answer.whole())
        response = Response(encode(_without_text(found)), media_type="application/json")
    return with_warnings(response, texts.grammar)


class TokensChoice:
    """One continuation: all of its tokens, or the new ones of each chunk."""

    def __init__(
        self, index: int, body: CompletionRequest, usage: UsageCounter, names: TokenNames
    ) -> None:
        """Begin a continuation. usage: counter of the prompt."""
        self.usage = usage
        self._index, self._body, self._names = index, body, names
        self._is_begun = False

    def chunks(self, output: RequestOutput, completion: CompletionOutput) -> list[Json]:
        return [self.whole(output, completion)]

    def whole(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        if self._body.max_tokens == 0:  # the engine samples a token even then
            completion = without_tokens(completion)
        self.usage.count(len(completion.token_ids), output)
        choice: Json = {
            "index": self._index,
            "text": completion.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids,
        } | weights_fields(completion)
        if completion.routed_experts is not None:
            choice["routed_experts"] = _npy(completion.routed_experts)
        if self._body.logprobs is not None or self._body.logprob_token_ids:
            num_top = len(self._body.logprob_token_ids or ()) or self._body.logprobs or 0
            positions = completion.logprobs or ()
            ids = completion.token_ids
            choice["logprobs"] = chat_logprobs(self._names, ids, positions, num_top)
        found: Json = {"choices": [choice]}
        if self._index == 0 and not self._is_begun and self._body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs or [])
        self._is_begun = True
        return found


async def _events(answer: Answer) -> AsyncGenerator[bytes, None]:
    async with aclosing(answer.chunks()) as pieces:
        async for chunks in pieces:
            yield b"".join(event(_without_text(chunk)) for chunk in chunks)
    yield DONE


def _npy(values: Int16) -> str:
    """Return an array in the format of `.npy` files, as base64."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _without_text(response: Json) -> Json:
    for choice in response["choices"]:
        choice.pop("text", None)
    return response
