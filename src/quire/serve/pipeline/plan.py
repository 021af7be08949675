"""The plan of a response: what a body requests, decided before its prompt is rendered.

Input: a body, the headers of its request, and the server's settings. A plan is made without I/O,
and it refuses whatever needs neither the prompt nor the engine to be refused. Decisions that
depend on the tokens of the prompt (its room, the grammar, the parameters) follow in
`requests.py`.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.types import Scope

from quire.base.messages import Ready, RetainedRequest
from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.base.requests.validation import gives_no_text
from quire.base.settings.config import ServerConfig
from quire.render.templates.chat_template import ChatOptions
from quire.serve.bodies.constraints import (
    CONSTRAINT_FIELDS,
    UNCONSTRAINED,
    structured_outputs_of,
)
from quire.serve.bodies.length_limit import LengthLimit
from quire.serve.bodies.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    ServedBody,
)
from quire.serve.bodies.validation_errors import shown
from quire.serve.context import DEFAULT_MODEL, ApiContext
from quire.serve.errors import ApiError, bad_request
from quire.serve.http.auth import tenant_of_body

Body = TypeVar("Body", bound=ServedBody)

CORE_HEADER = b"x-data-parallel-rank"
MAX_CORE_DIGITS = 9
# Settings of a beam search, and their values that change nothing without one.
BEAM_FIELDS = {"beam_width": 1, "length_penalty": 1.0, "early_stopping": False}


@dataclass(frozen=True)
class UsageChunks:
    """Where a stream of chunks reports usage."""

    at_end: bool = False  # in one more chunk
    in_each: bool = False  # in every chunk, too


NO_USAGE_CHUNKS = UsageChunks()


@dataclass(frozen=True)
class Plan(Generic[Body]):
    """Plan of any body that reaches the engine."""

    body: Body
    id: str  # of the response
    model: str  # the name that the response shows
    tenant: str  # whose limits and share of the engine the request uses
    core_id: int | None = None  # the core that its header requests
    usage: UsageChunks = NO_USAGE_CHUNKS


@dataclass(frozen=True)
class Constraint:
    """Constraint on the text of a response."""

    content: StructuredOutputsParams | None  # None: anything
    strict: bool  # a part of a schema that cannot be enforced is an error
    field: str  # the field of the body that says so


@dataclass(frozen=True)
class ChatPlan(Plan[ChatCompletionRequest]):
    """The plan of a chat: one prompt, n choices."""

    options: ChatOptions = ChatOptions()  # inputs of the template besides the messages
    template: str | None = None  # the request's own template, which is allowed
    constraint: Constraint = Constraint(*UNCONSTRAINED)
    is_lenient: bool = False  # too large a max_tokens or reasoning budget is reduced
    continued: "Continued | None" = None
    limit: LengthLimit | None = None


@dataclass(frozen=True)
class CompletionPlan(Plan[CompletionRequest]):
    """The plan of a completion: several prompts, n choices each."""

    is_lenient: bool = False  # max_tokens is reduced to what fits, which is also its default
    limit: LengthLimit | None = None
    can_cut: bool = True  # whether its API has the field truncate_prompt_tokens


@dataclass(frozen=True)
class Continued:
    """A retained conversation up to an answer, and the messages that follow that answer."""

    source: RetainedRequest
    messages: list[dict[str, Any]]


def plan_chat(
    api: ApiContext,
    body: ChatCompletionRequest,
    scope: Scope,
    response_id: str,
    usage: UsageChunks = NO_USAGE_CHUNKS,
    *,
    is_lenient: bool = False,
    continued: Continued | None = None,
) -> ChatPlan:
    """Return the plan of a chat. Raise ApiError or RequestError for a body that cannot be served,
    whatever its prompt is."""
    base = plan_body(api, body, scope, response_id)
    return chat_plan_of(api, base, usage, is_lenient=is_lenient, continued=continued)


def chat_plan_of(
    api: ApiContext,
    base: Plan[ChatCompletionRequest],
    usage: UsageChunks = NO_USAGE_CHUNKS,
    *,
    is_lenient: bool = False,
    continued: Continued | None = None,
) -> ChatPlan:
    """Return the plan of a chat whose model and tenant are known. Raises as `plan_chat`."""
    body = base.body
    check_generates(api)
    _check_top_logprobs(body, api.client.ready)
    _check_beams(body)
    is_constrained = body.model_fields_set & CONSTRAINT_FIELDS
    constraint = structured_outputs_of(body) if is_constrained else UNCONSTRAINED
    return ChatPlan(
        body,
        base.id,
        base.model,
        base.tenant,
        base.core_id,
        usage,
        _template_options(api, body),
        checked_template(api, body.chat_template),
        Constraint(*constraint),
        is_lenient,
        continued,
    )


def plan_completion(
    api: ApiContext,
    body: CompletionRequest,
    scope: Scope,
    response_id: str,
    usage: UsageChunks = NO_USAGE_CHUNKS,
    *,
    is_lenient: bool = False,
) -> CompletionPlan:
    """Return the plan of a completion. Raise ApiError for a body that cannot be served, whatever
    its prompts are."""
    base = plan_body(api, body, scope, response_id)
    _check_beams(body)
    return CompletionPlan(body, base.id, base.model, base.tenant, base.core_id, usage, is_lenient)


def plan_body(api: ApiContext, body: Body, scope: Scope, response_id: str) -> Plan[Body]:
    """Return the plan of a body of any kind. Raise ApiError for an unknown model, a priority
    that the key may not use, or a wrong number of a core."""
    model = check_model(api, body.model)
    tenant = tenant_of_body(scope, api.config, body)
    return Plan(body, response_id, model, tenant, requested_core(scope))


def plan_prompt(api: ApiContext, body: ChatCompletionRequest) -> ChatPlan:
    """Return the plan of a chat that is rendered and not answered. Raises ApiError."""
    model, template = check_model(api, body.model), checked_template(api, body.chat_template)
    return ChatPlan(body, "", model, "", options=_template_options(api, body), template=template)


def usage_chunks(body: GenerationRequest, config: ServerConfig) -> UsageChunks:
    """Return where a stream of chunks reports usage. Raise ApiError for options of a stream in a
    body that requests none."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise bad_request("stream_options needs stream=true; set it, or remove stream_options.",
                          "stream_options")  # fmt: skip
    at_end = bool(options and options.include_usage)
    at_end |= bool(body.stream and config.enable_force_include_usage)
    return UsageChunks(at_end, bool(at_end and options and options.continuous_usage_stats))


def check_model(api: ApiContext, name: str | None) -> str:
    """Return the name of the model that a response shows. None, an empty name and `default` mean
    the served model. Raise ApiError 404 for an unknown one."""
    if name in api.model_names:
        return str(name)
    if not name or (name == DEFAULT_MODEL and name not in api.all_names):
        return api.model_names[0]
    known = ", ".join(api.all_names)
    raise ApiError(
        404,
        f"there is no model {shown(name)} here; this server has: {known}.",
        param="model",
        code="model_not_found",
    )


def check_generates(api: ApiContext) -> None:
    """Raise RequestError if the engine's model pools."""
    if api.client.ready.pooling is not None:
        raise gives_no_text()


def checked_template(api: ApiContext, template: str | None) -> str | None:
    """Return a request's own template: the name of one of the model's, or a text where the server
    allows that.

    It is never the name of a file, as it may be in the server's settings. Raises ApiError.
    """
    if template is None:
        return None
    tokenizer = api.renderer.tokenizer
    if tokenizer is not None and template in tokenizer.chat_templates:
        return template
    if not api.config.trust_request_chat_template:
        raise bad_request(
            "chat_template: templates from requests are disabled on this server; remove the field,"
            " or start the server with --trust-request-chat-template.",
            "chat_template",
        )
    if not any(char in template for char in "{}\n"):
        raise bad_request(
            f"chat_template must be the text of a template, got {shown(template)}.",
            "chat_template",
        )
    return template


def requested_core(scope: Scope) -> int | None:
    """Return the core that a header requests; None without the header. Admission checks that the
    core exists. Raises ApiError for a value that is not a number."""
    given = [value for name, value in scope["headers"] if name == CORE_HEADER]
    if not given:
        return None
    if len(given) > 1 or not given[0].isdigit() or len(given[0]) > MAX_CORE_DIGITS:
        value_text = shown(b", ".join(given).decode("latin-1"))
        raise bad_request(
            f"the header X-data-parallel-rank must be the number of a core, got {value_text};"
            " remove it"
            " to let the server choose the core.",
            "data_parallel_rank",
        )
    return int(given[0])


def _template_options(api: ApiContext, body: ChatCompletionRequest) -> ChatOptions:
    """Return what the template gets besides the messages. It gets all tools for every tool_choice,
    which keeps prefixes equal, unless the server removes them for `none`."""
    continues = bool(body.continue_final_message)
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    removes_tools = api.config.exclude_tools_when_tool_choice_none
    has_no_tools = removes_tools and body.tool_choice == "none"
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return ChatOptions(
        add_generation_prompt=begins,
        continue_final_message=continues,
        tools=None if has_no_tools else body.tools or None,
        documents=body.documents,
        template_kwargs=variables,
    )


def _check_top_logprobs(body: ChatCompletionRequest, ready: Ready) -> None:
    """Check top_logprobs, which the engine knows by another name."""
    top = body.top_logprobs
    if top is None:
        return
    if not body.logprobs and top > 0:
        raise bad_request(f"top_logprobs={top} needs logprobs=true; set it.", "top_logprobs")
    if 0 <= ready.max_logprobs < top:
        raise bad_request(
            f"top_logprobs={top} is more than max_logprobs={ready.max_logprobs}; request fewer or"
            " raise max_logprobs.",
            "top_logprobs",
        )


def _check_beams(body: GenerationRequest) -> None:
    """Refuse settings of a beam search without one."""
    if body.use_beam_search:
        return
    for name, neutral in BEAM_FIELDS.items():
        value = getattr(body, name)
        if value not in (None, neutral):
            raise bad_request(f"{name}={value!r} needs use_beam_search=true; add it.", name)
