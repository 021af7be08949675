"""The requests of a completion: each of its prompts becomes one request with n choices."""

from quire.base.requests.sampling_params import SamplingParams
from quire.render.generation import GenerationDefaults
from quire.render.renderer import RenderedPrompt
from quire.serve.bodies.protocol import CompletionRequest
from quire.serve.context import ApiContext
from quire.serve.errors import bad_request
from quire.serve.hooks.hooks import RequestHooks
from quire.serve.pipeline.plan import CompletionPlan
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
    can_cut = plan.can_cut and not plan.is_lenient
    room = room_after(prompt, max_model_len, "prompt", can_cut, plan.limit)
    if plan.is_lenient:
        length = room if body.max_tokens is None else min(body.max_tokens, room)
        body = body.model_copy(update={"max_tokens": length})
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
