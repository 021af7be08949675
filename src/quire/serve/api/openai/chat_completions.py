"""POST /v1/chat/completions, and the job of a conversation, which other endpoints make too.

Hooks, images, tools and constraints are only called for a request that has them.
"""

import time
from dataclasses import dataclass
from typing import Any

import fastapi
from starlette.responses import Response
from starlette.types import Scope

from quire.base.errors import RequestError
from quire.base.messages import Fork, HeldRequest
from quire.render.answers.format import AskedAnswer, NamedTool
from quire.render.grammars.grammars import Checked
from quire.render.renderer import Media, RenderedPrompt
from quire.render.templates.chat_template import ChatOptions
from quire.render.tokens.detokenizer import IncrementalDetokenizer
from quire.serve.api.bodies.asked_tools import AskedTools, asked_tools
from quire.serve.api.bodies.open_body import check_neutral
from quire.serve.api.bodies.params import (
    chat_params,
    check_top_logprobs,
    checked_stream_options,
    room_beside,
    truncated,
)
from quire.serve.api.bodies.protocol import ChatCompletionRequest
from quire.serve.api.bodies.reading import BoundedRoute
from quire.serve.api.bodies.structured import (
    CONSTRAINT_FIELDS,
    UNCONSTRAINED,
    form_size,
    structured_outputs_of,
    with_warnings,
)
from quire.serve.api.context import Api, ApiContext, new_id
from quire.serve.api.errors import error_in
from quire.serve.api.http.auth import tenant_asking
from quire.serve.api.openai.answers import Answer, UsageCounter
from quire.serve.api.openai.chat_choice import ChatChoice, ReasoningCount
from quire.serve.api.openai.hooked_prompt import admitted_chat
from quire.serve.api.openai.jobs import Origin, PromptJob, asked_core, make_job
from quire.serve.api.openai.rendering import (
    MAX_CUT,
    check_generates,
    check_model,
    render_prompt,
    token_names,
    tokens_behind,
)
from quire.serve.hooks import RequestHooks
from quire.serve.media.request_images import Messages, RequestImages

router = fastapi.APIRouter(route_class=BoundedRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(
    body: ChatCompletionRequest, request: fastapi.Request, api: Api
) -> Response:
    """The next message of a conversation, or n of them to choose from."""
    answer_id = new_id("chatcmpl")
    body = checked_stream_options(body, api.config)
    chat = await make_chat_job(api, body, request.scope, answer_id)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = {"id": answer_id, "object": kind, "created": int(time.time()), "model": chat.model}
    choices = chat_choices(api, chat)
    tells = api.config.enable_per_request_metrics
    answer = Answer(api.client, chat.body, head, [chat.job], [choices], chat.hooks, tells)
    response = await answer.respond(request)
    return with_warnings(response, chat.grammar) if chat.grammar.warnings else response


@dataclass(frozen=True)
class ChatJob:
    """model: the name to show. body: as hooks left it. asked: what the answer is made of. grammar:
    that of the answer, checked. hooks: of its one request; None without any."""

    model: str
    body: ChatCompletionRequest
    job: PromptJob
    asked: AskedAnswer
    grammar: Checked
    hooks: list[RequestHooks] | None


async def make_chat_job(
    api: ApiContext,
    body: ChatCompletionRequest,
    scope: Scope,
    answer_id: str,
    cuts_length: bool = False,
    continued: "Continued | None" = None,
) -> ChatJob:
    """Make the job of a conversation. cuts_length: of max_tokens beyond what fits beside the prompt
    only this is kept. continued: what its last messages follow, if that is held; where they cannot,
    or where there are images, all is rendered. Raises ApiError, RequestError or HookFailed for what
    cannot be served."""
    check_model(api, body.model)
    check_generates(api)
    check_neutral(body)
    check_top_logprobs(body, api.client.ready)
    if not any(isinstance(each.get("content"), list) for each in body.messages):
        return await _made_job(api, body, scope, answer_id, cuts_length, continued)
    async with api.images.open(body.messages, api.takes_images) as images:
        if images.files:
            continued = None
            body = body.model_copy(update={"messages": images.messages})
        return await _made_job(api, body, scope, answer_id, cuts_length, continued, images)


async def _made_job(
    api: ApiContext,
    body: ChatCompletionRequest,
    scope: Scope,
    answer_id: str,
    cuts_length: bool,
    continued: "Continued | None",
    images: RequestImages | None = None,
) -> ChatJob:
    """Make the job of a conversation whose images were read; None if it has no parts."""
    messages, hooks = body.messages, None
    if api.hooks is not None:
        body, hooks = await admitted_chat(api, body, scope, answer_id)
    if body.messages is not messages:
        continued = None  # a hook has changed them, perhaps also those before
    behind = None if continued is None else await _behind(api, body, continued)
    whole = behind or await render_chat(api, body, images)
    asked = _asked_answer(api, body, whole.text or "")
    max_model_len = api.client.ready.max_model_len
    prompt = truncated(whole, body, max_model_len)
    room = room_beside(prompt, max_model_len, "messages", can_cut=not cuts_length)
    if cuts_length and body.max_tokens is not None:
        body = body.model_copy(update={"max_tokens": min(body.max_tokens, room)})
    params = chat_params(body, api.requests.defaults, room)
    params.shown_special_token_ids = list(asked.format.shown_special_token_ids) or None
    tenant = tenant_asking(scope, api.config, body)
    grammar = await _checked_grammar(api, body, asked)
    origin = Origin(asked_core(scope))
    if continued is not None and behind is not None:
        origin = continued.origin(prompt.token_ids) or origin
    job = make_job(api, body, prompt, params, answer_id, tenant, grammar.text, origin)
    return ChatJob(check_model(api, body.model), body, job, asked, grammar, hooks)


@dataclass(frozen=True)
class Continued:
    """A held conversation, up to an answer, and the messages that follow it."""

    source: HeldRequest
    messages: list[dict[str, Any]]

    def origin(self, token_ids: list[int]) -> Origin | None:
        """Return what a prompt goes on from, unless its beginning was cut off."""
        source = self.source
        if token_ids[: source.num_tokens] != source.token_ids:
            return None
        num_items = len(source.media)
        made = Fork(source.id, source.index, source.num_tokens, num_items=num_items)
        return Origin(source.core_id, made)


async def _behind(
    api: ApiContext, body: ChatCompletionRequest, continued: Continued
) -> RenderedPrompt | None:
    """Return the prompt that a held conversation becomes by its next messages; None if the template
    makes that impossible."""
    held_ids = continued.source.token_ids
    if continued.source.media and body.truncate_prompt_tokens is not None:
        return None  # without its beginning it would have the tokens of images, but no images
    try:
        tail = await tokens_behind(
            api, held_ids, continued.messages, _options_of(body), body.chat_template
        )
    except RequestError:
        return None
    return RenderedPrompt(held_ids + tail.token_ids, tail.text)


async def count_chat(api: ApiContext, body: ChatCompletionRequest) -> int:
    """Return how many tokens a conversation has, which may be more than can be answered."""
    async with api.images.open(body.messages, api.takes_images) as images:
        body = body.model_copy(update={"messages": images.messages})
        return len((await render_chat(api, body, images, is_counted=True)).token_ids)


async def render_chat(
    api: ApiContext,
    body: ChatCompletionRequest,
    images: RequestImages | None,
    is_counted: bool = False,
) -> RenderedPrompt:
    """Return the conversation as tokens. tool_choice `none` leaves the tools out of it. is_counted:
    it may be longer than what can be answered."""
    is_cut = is_counted or body.truncate_prompt_tokens is not None
    messages: Messages = body.messages
    media: Media = ()
    if images is not None:
        most = api.client.ready.max_model_len * (MAX_CUT if is_cut else 1)
        messages, media = await images.prepared(messages, api.renderer.media, most)
    try:
        prompt = await render_prompt(
            api, messages, _options_of(body), body.chat_template, is_cut=is_cut, media=media
        )
        if body.add_special_tokens and prompt.text is not None:
            prompt = await render_prompt(api, prompt.text, is_cut=is_cut, media=media)
    except RequestError as error:
        raise error_in("messages", error) from error
    return prompt


def _options_of(body: ChatCompletionRequest) -> ChatOptions:
    """Return what the template gets beside the messages."""
    goes_on = bool(body.continue_final_message)
    begins = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return ChatOptions(
        add_generation_prompt=begins,
        continue_final_message=goes_on,
        tools=_shown_tools(body),
        documents=body.documents,
        template_kwargs=variables,
    )


def _shown_tools(body: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    """Return the tools that the chat template gets: all of them, which keeps prefixes equal, or
    none with tool_choice `none`."""
    return None if body.tool_choice == "none" else body.tools or None


def _asked_answer(api: ApiContext, body: ChatCompletionRequest, prompt: str) -> AskedAnswer:
    """Return what the answer to a prompt is to be made of."""
    has_tools = body.tools or body.tool_choice is not None
    tools = asked_tools(body) if has_tools else AskedTools()
    answer_format = api.renderer.answer_format(body.chat_template, bool(_shown_tools(body)))
    has_constraint = body.model_fields_set & CONSTRAINT_FIELDS
    content, strict, field = structured_outputs_of(body) if has_constraint else UNCONSTRAINED
    budget = body.thinking_token_budget
    return AskedAnswer(
        answer_format,
        tools.callable,
        tools.choice,
        parallel=body.parallel_tool_calls is not False,
        content=content,
        content_field=field,
        strict=strict,
        begins_in_reasoning=answer_format.begins_in_reasoning(prompt),
        has_reasoned=answer_format.has_reasoned(prompt),
        thinking_token_budget=None if budget is None or budget < 0 else budget,
    )


async def _checked_grammar(
    api: ApiContext, body: ChatCompletionRequest, asked: AskedAnswer
) -> Checked:
    """Return the grammar of an answer, empty for one that may be anything. Raises RequestError for
    one that makes no sense."""
    if not asked.is_constrained:
        return Checked("")
    field = "tools" if asked.content is None else asked.content_field
    tokenizer = api.renderer.tokenizer
    assert tokenizer is not None, "it needs a prompt as text"
    size = form_size(body, body.tools)
    grammar = await api.lanes.run(size, asked.grammar, tokenizer.added_ids)
    return await api.renderer.grammars.check_async(grammar, field)


def chat_choices(api: ApiContext, chat: ChatJob, named_call_stops: bool = True) -> list[ChatChoice]:
    """Return the n choices, which have one usage. named_call_stops: an answer that calls the tool
    which its request names ends with `stop`, as OpenAI's does."""
    body, job, asked = chat.body, chat.job, chat.asked
    params, tokenizer = job.request.params, api.renderer.tokenizer
    names = token_names(api, body.return_tokens_as_token_ids)
    has_reasoning = asked.format.reasoning is not None
    usage = UsageCounter(
        len(job.token_ids), tenant=job.request.tenant, num_reasoning=0 if has_reasoning else None
    )

    def choice(index: int) -> ChatChoice:
        parser = asked.parser() if has_reasoning or asked.calls is not None else None
        counts = None
        if has_reasoning and tokenizer is not None:
            counts = ReasoningCount(IncrementalDetokenizer(tokenizer, params, job.token_ids))
        is_named = named_call_stops and isinstance(asked.choice, NamedTool)
        made = ChatChoice(index, body, job, names, usage, parser, counts, is_named)
        made.role = api.config.response_role
        return made

    return [choice(index) for index in range(params.n)]
