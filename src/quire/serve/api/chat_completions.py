"""POST /v1/chat/completions: a conversation, answered; reasoning and calls of tools are taken out
of the text."""

import time
from typing import Any

import fastapi
from starlette.responses import Response

from quire.base.errors import RequestError
from quire.render.answers.format import AskedAnswer, NamedTool
from quire.render.chat_template import ChatOptions
from quire.render.detokenizer import IncrementalDetokenizer
from quire.render.grammars import Checked
from quire.render.renderer import RenderedPrompt
from quire.serve.api.answers import Answer, UsageCounter
from quire.serve.api.asked_core import asked_core
from quire.serve.api.asked_tools import asked_tools, shown_tools
from quire.serve.api.auth import tenant_asking
from quire.serve.api.chat_choice import ChatChoice
from quire.serve.api.context import Api, ApiContext, new_id
from quire.serve.api.errors import error_in
from quire.serve.api.hooked_prompt import admitted_chat
from quire.serve.api.jobs import PromptJob, make_job
from quire.serve.api.logprobs_json import TokenNames
from quire.serve.api.params import (
    chat_params,
    check_top_logprobs,
    checked_stream_options,
    room_beside,
    truncated,
)
from quire.serve.api.protocol import ChatCompletionRequest
from quire.serve.api.reading import BoundedRoute
from quire.serve.api.reasoning_count import ReasoningCount
from quire.serve.api.rendering import check_model, render_prompt
from quire.serve.api.structured import form_size, structured_outputs_of, with_warnings
from quire.serve.api.unsupported_fields import check_neutral

router = fastapi.APIRouter(route_class=BoundedRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(
    body: ChatCompletionRequest, request: fastapi.Request, api: Api
) -> Response:
    """The next message of a conversation, or n of them to choose from."""
    model = check_model(api, body.model)
    check_neutral(body)
    body = checked_stream_options(body, api.config)
    check_top_logprobs(body, api.client.ready)
    answer_id = new_id("chatcmpl")
    body, hooks = await admitted_chat(api, body, request.scope, answer_id)
    whole = await _render(api, body)
    asked = _asked_answer(api, body, whole.text or "")
    prompt = truncated(whole, body, api.client.ready.max_model_len)
    room = room_beside(prompt, api.client.ready.max_model_len, "messages")
    params = chat_params(body, api.requests.defaults, room)
    params.shown_special_token_ids = list(asked.format.shown_special_token_ids) or None
    tenant = tenant_asking(request.scope, api.config, body)
    grammar = await _checked_grammar(api, body, asked)
    core = asked_core(request.scope)
    job = make_job(api, body, prompt, params, answer_id, tenant, grammar.text, core)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}
    choices = _choices(api, body, job, asked)
    tells = api.config.enable_per_request_metrics
    answer = Answer(api.client, body, head, [job], [choices], hooks, tells)
    return with_warnings(await answer.respond(request), grammar)


async def _render(api: ApiContext, body: ChatCompletionRequest) -> RenderedPrompt:
    """Return the conversation as tokens. tool_choice `none` leaves the tools out of it."""
    goes_on = bool(body.continue_final_message)
    begins = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    options = ChatOptions(
        add_generation_prompt=begins,
        continue_final_message=goes_on,
        tools=shown_tools(body),
        documents=body.documents,
        template_kwargs=variables,
    )
    try:
        is_cut = body.truncate_prompt_tokens is not None
        prompt = await render_prompt(api, body.messages, options, body.chat_template, is_cut=is_cut)
        if body.add_special_tokens and prompt.text is not None:
            prompt = await render_prompt(api, prompt.text, is_cut=is_cut)
    except RequestError as error:
        raise error_in("messages", error) from error
    return prompt


def _asked_answer(api: ApiContext, body: ChatCompletionRequest, prompt: str) -> AskedAnswer:
    """Return what the answer to a prompt is to be made of."""
    tools = asked_tools(body)
    answer_format = api.renderer.answer_format(body.chat_template, bool(shown_tools(body)))
    content, strict, field = structured_outputs_of(body)
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
    assert tokenizer is not None, "there is none without a prompt as text"
    size = form_size(body, body.tools)
    grammar = await api.lanes.run(size, asked.grammar, tokenizer.added_ids)
    return await api.renderer.grammars.check_async(grammar, field)


def _choices(
    api: ApiContext, body: ChatCompletionRequest, job: PromptJob, asked: AskedAnswer
) -> list[ChatChoice]:
    """Return the n choices, which have one usage."""
    params, tokenizer = job.request.params, api.renderer.tokenizer
    names = TokenNames(tokenizer, bool(body.return_tokens_as_token_ids))
    has_reasoning = asked.format.reasoning is not None
    usage = UsageCounter(
        len(job.token_ids), tenant=job.request.tenant, num_reasoning=0 if has_reasoning else None
    )

    def choice(index: int) -> ChatChoice:
        parser = asked.parser() if has_reasoning or asked.calls is not None else None
        counts = None
        if has_reasoning and tokenizer is not None:
            counts = ReasoningCount(IncrementalDetokenizer(tokenizer, params, job.token_ids))
        is_named = isinstance(asked.choice, NamedTool)
        made = ChatChoice(index, body, job, names, usage, parser, counts, is_named)
        made.role = api.config.response_role
        return made

    return [choice(index) for index in range(params.n)]
