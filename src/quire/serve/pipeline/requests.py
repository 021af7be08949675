"""The engine's requests: a plan and a rendered prompt become parameters and an admitted request.

A parameter is what the body sets, else what the model's files say, else the default of
`SamplingParams`. The length of an answer is always a number here: what fits after the prompt, if
the body does not request less.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from quire.base.errors import CONTEXT_LENGTH_EXCEEDED
from quire.base.messages import Fork, Request
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.base.settings.kv_transfer import FIELD as KV_TRANSFER
from quire.engine.client.admission import admit
from quire.render.answers.format import RequestedAnswer
from quire.render.answers.grammar import answer_grammar
from quire.render.generation import GenerationDefaults
from quire.render.grammars.grammars import Checked
from quire.render.renderer import RenderedPrompt
from quire.render.truncation import LEFT
from quire.render.truncation import truncated as truncated_to
from quire.serve.adapters import requests_of
from quire.serve.bodies.constraints import CallableTools, callable_tools, form_size
from quire.serve.bodies.length_limit import LengthLimit
from quire.serve.bodies.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from quire.serve.context import ApiContext
from quire.serve.errors import ApiError, bad_request
from quire.serve.hooks.hooks import RequestHooks
from quire.serve.pipeline.plan import ChatPlan, Continued, Plan
from quire.serve.pipeline.retention import Retention, retention_of

AnyPlan = TypeVar("AnyPlan", bound=Plan[Any])

DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI's

# Fields that SamplingParams has by the same name and with the same meaning.
OTHERS = {
    "max_tokens", "prompt_logprobs", "structured_outputs", "thinking_token_budget",
    "truncate_prompt_tokens", "truncation_side", "logprob_token_ids",
}  # fmt: skip
SAME = GenerationRequest.model_fields.keys() & set(SamplingParams.__struct_fields__) - OTHERS


@dataclass(frozen=True)
class PromptJob:
    """One prompt and its request to the engine."""

    prompt: RenderedPrompt
    request: Request
    retention: Retention | None = None  # requested by a caching hint


@dataclass(frozen=True)
class Origin:
    """Where a request must run, and the sequence that it continues."""

    core_id: int | None = None  # None: any core
    fork: Fork | None = None


@dataclass(frozen=True)
class Chat:
    """A chat that is ready for the engine."""

    plan: ChatPlan  # as hooks left it
    job: PromptJob
    form: RequestedAnswer  # what the answer is made of
    grammar: Checked  # of the answer
    hooks: list[RequestHooks] | None  # of its one request


async def admit_chat(
    api: ApiContext,
    plan: ChatPlan,
    prompt: RenderedPrompt,
    hooks: list[RequestHooks] | None = None,
) -> Chat:
    """Make and admit the request of a rendered chat. Raise ApiError, RequestError or EngineBusy for
    what cannot be served."""
    form = answer_form(api, plan, prompt.text or "")
    prompt, params = chat_inputs(api, plan, prompt, form)
    grammar = await chat_grammar(api, plan, form)
    origin = None
    if plan.continued is not None:
        origin = _origin_of(plan.continued, prompt.token_ids)
    plan = with_priority(plan, hooks[0] if hooks else None)
    job = make_job(api, plan, prompt, params, plan.id, grammar.text, origin or Origin(plan.core_id))
    return Chat(plan, job, form, grammar, hooks)


def chat_inputs(
    api: ApiContext, plan: ChatPlan, prompt: RenderedPrompt, form: RequestedAnswer
) -> tuple[RenderedPrompt, SamplingParams]:
    """Return the prompt of a chat, cut as its body requests, and the parameters. Raise ApiError or
    RequestError for a prompt or a length that does not fit."""
    body, max_model_len = plan.body, api.client.ready.max_model_len
    prompt = truncated(prompt, body, max_model_len)
    room = room_after(prompt, max_model_len, "messages", not plan.is_lenient, plan.limit)
    if plan.is_lenient and body.max_tokens is not None:
        body = body.model_copy(update={"max_tokens": min(body.max_tokens, room)})
    params = chat_params(body, api.requests.defaults, room)
    params.shown_special_token_ids = list(form.format.shown_special_token_ids) or None
    return prompt, params


def with_priority(plan: AnyPlan, hooks: RequestHooks | None) -> AnyPlan:
    """Return a plan with the priority that a hook set, if one did."""
    if hooks is None or hooks.priority is None:
        return plan
    return replace(plan, body=plan.body.model_copy(update={"priority": hooks.priority}))


def make_job(
    api: ApiContext,
    plan: Plan[Any],
    prompt: RenderedPrompt,
    params: SamplingParams,
    request_id: str,
    grammar: str,
    origin: Origin,
    *,
    is_open: bool = False,
) -> PromptJob:
    """Make the job of a prompt, and admit its request.

    grammar: what the answer must be, checked; empty for anything. is_open: more of the prompt
    follows. Raises RequestError for what the engine can never serve.
    """
    body: GenerationRequest = plan.body
    made = requests_of(api, body.lora).make(
        prompt,
        params,
        request_id,
        body.cache_salt or "",
        body.priority or 0,
        plan.tenant,
        body.timeout_s or 0.0,
        grammar,
    )
    request = admit(
        api.client,
        made,
        core_id=origin.core_id,
        fork=origin.fork,
        keep_s=body.keep_s or 0.0,
        pin_share=api.config.pin_share_of_key,
        is_open=is_open,
    )
    retention = None
    if not is_open and (body.prompt_cache_key, body.prompt_cache_retention) != (None, None):
        retention = retention_of(api.hinted, body, plan.model, plan.tenant, request_id)
    return PromptJob(prompt, request, retention)


def _origin_of(continued: Continued, token_ids: list[int]) -> Origin | None:
    """Return the origin of a prompt that begins with a retained conversation; None if it does not,
    since its beginning was cut off."""
    source = continued.source
    if token_ids[: source.num_tokens] != source.token_ids:
        return None
    num_items = len(source.media)
    fork = Fork(source.id, source.index, source.num_tokens, num_items=num_items)
    return Origin(source.core_id, fork)


# What fits


def truncated(
    prompt: RenderedPrompt, body: GenerationRequest, max_model_len: int
) -> RenderedPrompt:
    """Return a prompt cut to truncate_prompt_tokens tokens; -1 keeps what leaves room for the
    requested length of the answer. Raises ApiError."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == 0:
        raise bad_request(
            "truncate_prompt_tokens must be at least 1, or -1 for what fits, got 0.",
            "truncate_prompt_tokens",
        )
    room = max_model_len - max(1, _requested_length(body))
    return truncated_to(prompt, keep, room, body.truncation_side or LEFT)


def room_after(
    prompt: RenderedPrompt,
    max_model_len: int,
    param: str,
    can_cut: bool = True,
    limit: LengthLimit | None = None,
) -> int:
    """Return how many tokens fit after a prompt. Raise ApiError if there is no room.

    param: the field that the error names. can_cut: the request may set truncate_prompt_tokens.
    limit: the request's own.
    """
    max_len, name = max_model_len, "max_model_len"
    if limit is not None and limit.num_tokens < max_len:
        max_len, name = limit.num_tokens, limit.field
    room = max_len - len(prompt.token_ids)
    if room >= 1:
        return room
    or_cut = ", or set truncate_prompt_tokens=-1" if can_cut else ""
    or_raise = f", or raise {name}" if max_len < max_model_len else ""
    raise ApiError(
        400,
        f"{param}: the prompt has {len(prompt.token_ids)} tokens, and {name} is"
        f" {max_len}, which must hold the answer as well. Shorten the prompt{or_cut}{or_raise}.",
        param=param,
        code=CONTEXT_LENGTH_EXCEEDED,
    )


def _requested_length(body: GenerationRequest) -> int:
    """Return how many tokens a body requests at most, before its room is known."""
    if isinstance(body, ChatCompletionRequest) and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    if body.max_tokens is not None:
        return body.max_tokens
    return DEFAULT_MAX_TOKENS if isinstance(body, CompletionRequest) else 1


# What the answer must be


def answer_form(api: ApiContext, plan: ChatPlan, prompt: str) -> RequestedAnswer:
    """Return what the answer to a rendered chat must be made of. Raises ApiError and
    RequestError."""
    body, constraint = plan.body, plan.constraint
    has_tools = body.tools or body.tool_choice is not None
    tools = callable_tools(body) if has_tools else CallableTools()
    answer_format = api.renderer.answer_format(body.chat_template, bool(plan.options.tools))
    budget = body.thinking_token_budget
    if plan.is_lenient and answer_format.reasoning is None:
        budget = None
    # A continued message is within its content, where the grammar of a text without calls cannot
    # begin.
    is_free = tools.choice == "none" and plan.options.continue_final_message
    return RequestedAnswer(
        answer_format,
        tools.tools if plan.options.tools and not is_free else (),
        tools.choice,
        parallel=body.parallel_tool_calls is not False,
        content=constraint.content,
        content_field=constraint.field,
        strict=constraint.strict,
        begins_in_reasoning=answer_format.begins_in_reasoning(prompt),
        has_reasoned=answer_format.has_reasoned(prompt),
        thinking_token_budget=None if budget is None or budget < 0 else budget,
    )


async def chat_grammar(api: ApiContext, plan: ChatPlan, form: RequestedAnswer) -> Checked:
    """Return the checked grammar of an answer; empty for an answer that may be anything. Raises
    RequestError for an invalid grammar, and EngineBusy."""
    if not form.is_constrained:
        return Checked("")
    field = "tools" if form.content is None else form.content_field
    tokenizer = api.renderer.tokenizer
    assert tokenizer is not None, "it needs a prompt as text"
    size = form_size(plan.body, plan.body.tools)
    grammar = await api.text_threads.run(size, answer_grammar, form, tokenizer.added_ids)
    return await api.renderer.grammars.check_async(grammar, field)


# Parameters


def chat_params(
    body: ChatCompletionRequest, defaults: GenerationDefaults, room: int
) -> SamplingParams:
    """Return the parameters of a chat. room: tokens that fit after the prompt, all of which an
    answer without a limit may take."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    given = getattr(body, name)
    length = room if given is None else checked_length(name, given, 1, room)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return make_params(body, defaults, length, logprobs, body.prompt_logprobs)


def make_params(
    body: GenerationRequest,
    defaults: GenerationDefaults,
    length: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    best_of: int | None = None,
) -> SamplingParams:
    """Return the parameters. Raise RequestError that names the field."""
    values: dict[str, Any] = {} if body.use_beam_search else dict(defaults.sampling)
    for name in SAME:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    values["max_tokens"] = length
    values["best_of"] = best_of
    values["logprob_token_ids"] = body.logprob_token_ids or None
    values["logprobs"] = None if body.logprob_token_ids else logprobs
    values["prompt_logprobs"] = prompt_logprobs
    if body.kv_transfer_params:
        values["extra_args"] = {KV_TRANSFER: body.kv_transfer_params}
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**values, output_kind=kind)


def checked_length(name: str, value: int, minimum: int, room: int) -> int:
    if value < minimum:
        raise bad_request(f"{name} must be at least {minimum}, got {value}.", name)
    if value <= room:
        return value
    raise ApiError(
        400,
        f"{name}={value} is too large: max_model_len minus the tokens of the prompt leaves {room}."
        f" Request at most {room}, shorten the prompt, or remove {name}.",
        param=name,
        code=CONTEXT_LENGTH_EXCEEDED,
    )
