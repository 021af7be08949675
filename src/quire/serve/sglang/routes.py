"""POST /generate: continue texts or token ids, as SGLang's server."""

import time
from dataclasses import replace

import fastapi
from starlette.responses import Response

from quire.serve.bodies.constraints import with_warnings
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.context import Api
from quire.serve.errors import own_fields
from quire.serve.http.middleware import new_id
from quire.serve.http.sse import encode, start_stream, unless_disconnected
from quire.serve.pipeline.answer import Answer
from quire.serve.pipeline.plan import plan_completion
from quire.serve.pipeline.text import start_texts
from quire.serve.sglang.as_completion import RENAMED, completion_of, prompts_of
from quire.serve.sglang.checks import check_sampling
from quire.serve.sglang.protocol import TextsBody
from quire.serve.sglang.writer import Continuation, Options, Writer

# Fields of a completion -> SGLang's, in errors.
OWN = {
    "max_tokens": "max_new_tokens", "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num", **{ours: own for own, ours in RENAMED.items()},
}  # fmt: skip

router = fastapi.APIRouter(route_class=BoundedRoute)


@router.post("/generate")
async def generate(body: TextsBody, request: fastapi.Request, api: Api) -> Response:
    """Continue each prompt. Several prompts or continuations give a list."""
    started_s = time.monotonic()
    check_sampling(body, request)
    completion, (prompts, is_list) = completion_of(body), prompts_of(body)
    # The default length is reduced to what fits; a requested one is not.
    is_default = body.sampling_params is None or body.sampling_params.max_new_tokens is None
    with own_fields(OWN | {"prompt": "input_ids" if body.text is None else "text"}):
        plan = plan_completion(api, completion, request.scope, new_id("gen"), is_lenient=is_default)
        core_id = plan.core_id if body.data_parallel_rank is None else body.data_parallel_rank
        plan = replace(plan, core_id=core_id, can_cut=False)
        texts = await start_texts(api, plan, prompts)
    answer = Answer(api.client, texts.plan, {}, texts.jobs, texts.choices, texts.hooks)
    start_len = -1 if body.logprob_start_len is None else body.logprob_start_len
    options = Options(completion.logprobs, start_len, bool(body.return_text_in_logprobs))
    n = completion.n or 1
    continuations = [
        Continuation(job.request.request_id, choice.usage, options, is_alone=n == 1)
        for job, choices in zip(texts.jobs, texts.choices, strict=True)
        for choice in choices
    ]
    writer = Writer(continuations, is_list or n > 1, started_s)
    if body.stream:
        response = await start_stream(request, writer.stream(answer))
    else:
        found = await unless_disconnected(request.receive, writer.whole(answer))
        response = Response(encode(found), media_type="application/json")
    return with_warnings(response, texts.grammar)
