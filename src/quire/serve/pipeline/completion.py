"""A completion on its way through the pipeline: its plan, its prompts and their requests.

A completion has several prompts, each with n choices. Each prompt becomes one request.
"""

from dataclasses import dataclass

from starlette.types import Scope

from quire.base.errors import EngineBusy, RequestError
from quire.base.requests.sampling_params import SamplingParams
from quire.render.generation import GenerationDefaults
from quire.render.renderer import RenderedPrompt
from quire.serve.bodies.protocol import CompletionRequest
from quire.serve.context import ApiContext
from quire.serve.errors import bad_request
from quire.serve.hooks.hooks import RequestHooks
from quire.serve.pipeline.plan import NO_USAGE_CHUNKS, Plan, UsageChunks, check_beams, plan_body
from quire.serve.pipeline.prompts import render_prompt
from quire.serve.pipeline.requests import (
    DEFAULT_MAX_TOKENS,
    Origin,
    PromptJob,
    checked_length,
    make_job,
    make_params,
    room_after,
    truncated,
    with_priority,
)


@dataclass(frozen=True)
class CompletionPlan(Plan[CompletionRequest]):
    """The plan of a completion: several prompts, n choices each."""


def plan_completion(
    api: ApiContext,
    body: CompletionRequest,
    scope: Scope,
    response_id: str,
    usage: UsageChunks = NO_USAGE_CHUNKS,
) -> CompletionPlan:
    """Return the plan of a completion. Raise ApiError for a body that cannot be served, whatever
    its prompts are."""
    base = plan_body(api, body, scope, response_id)
    check_beams(body)
    return CompletionPlan(body, base.id, base.model, base.tenant, base.core_id, usage)


async def render_completion(
    api: ApiContext, plan: CompletionPlan, prompt: object
) -> RenderedPrompt:
    """Return one prompt of a completion as tokens. Raises ApiError and EngineBusy."""
    body = plan.body
    special = body.add_special_tokens is not False
    try:
        is_cut = body.truncate_prompt_tokens is not None
        return await render_prompt(api, prompt, add_special_tokens=special, is_cut=is_cut)
    except EngineBusy:  # no field is to blame
        raise
    except RequestError as error:
        raise bad_request(str(error), "prompt", error.code) from error


def completion_job(
    api: ApiContext,
    plan: CompletionPlan,
    prompt: RenderedPrompt,
    index: int,
    grammar: str,
    origin: Origin,
    hooks: RequestHooks | None = None,
) -> PromptJob:
    """Make and admit the request of one prompt of a completion, cut as its body requests.

    index: of the prompt. Raise ApiError or RequestError for what the engine can never serve.
    """
    body, max_model_len = plan.body, api.client.ready.max_model_len
    prompt = truncated(prompt, body, max_model_len)
    room = room_after(prompt, max_model_len, "prompt")
    params = completion_params(body, api.requests.defaults, room)
    plan = with_priority(plan, hooks)
    return make_job(api, plan, prompt, params, f"{plan.id}-{index}", grammar, origin)


def completion_params(
    body: CompletionRequest, defaults: GenerationDefaults, room: int
) -> SamplingParams:
    """Return the parameters of a completion. max_tokens 0 samples one token, which is not shown.
    room: tokens that fit after the prompt."""
    name, given = "max_tokens", body.max_tokens
    if given is None:
        length = min(DEFAULT_MAX_TOKENS, room)
    else:
        length = max(1, checked_length(name, given, 0, room))
    if given == 0 and body.min_tokens:
        raise bad_request(
            f"min_tokens={body.min_tokens} is more than max_tokens=0; raise max_tokens.",
            "min_tokens",
        )
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = _larger(body.logprobs, prompt_logprobs)
    return make_params(body, defaults, length, body.logprobs, prompt_logprobs, best_of=body.best_of)


def _larger(first: int, second: int | None) -> int:
    """Return the larger of two numbers of candidates; -1 is all."""
    return -1 if -1 in (first, second) else max(first, second or 0)
