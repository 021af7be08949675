"""A chat on its way through the pipeline, for all APIs that answer conversations.

Each API parses its body into a ChatCompletionRequest and writes the choices in its own form:

    plan = plan_chat(api, body, scope, response_id)     what is requested (plan.py)
    chat = await start_chat(api, plan)                  images, hooks, prompt, request
    choices = chat_choices(api, chat)                   the writers of an `Answer`

Images, hooks, tools and constraints cost nothing in a request without them.
"""

import dataclasses
from dataclasses import dataclass

from quire.render.answers.format import AskedAnswer, NamedTool
from quire.render.grammars.grammars import Checked
from quire.render.tokens.detokenizer import IncrementalDetokenizer
from quire.serve.api.bodies.logprobs_json import TokenNames
from quire.serve.api.bodies.protocol import GenerationRequest
from quire.serve.api.context import ApiContext
from quire.serve.api.pipeline.answer import UsageCounter
from quire.serve.api.pipeline.chat_choice import ChatChoice, ReasoningCount
from quire.serve.api.pipeline.hooked_prompt import admitted_chat
from quire.serve.api.pipeline.plan import ChatPlan
from quire.serve.api.pipeline.prompts import images_of, render_chat, render_continued
from quire.serve.api.pipeline.requests import (
    PromptJob,
    answer_form,
    chat_grammar,
    chat_inputs,
    chat_job,
)
from quire.serve.hooks import RequestHooks


@dataclass(frozen=True)
class Chat:
    """A chat that is ready for the engine."""

    plan: ChatPlan  # as hooks left it
    job: PromptJob
    form: AskedAnswer  # what the answer is made of
    grammar: Checked  # of the answer
    hooks: list[RequestHooks] | None  # of its one request


async def start_chat(api: ApiContext, plan: ChatPlan) -> Chat:
    """Make a chat ready for the engine. Raises ApiError, RequestError, HookFailed or EngineBusy
    for what cannot be served."""
    async with images_of(api, plan) as (plan, images):
        hooks = None
        if api.hooks is not None:
            plan, hooks = await admitted_chat(api, api.hooks, plan)
        prompt = await render_continued(api, plan)
        if prompt is None:
            plan = dataclasses.replace(plan, continued=None)
            prompt = await render_chat(api, plan, images)
        form = answer_form(api, plan, prompt.text or "")
        prompt, params = chat_inputs(api, plan, prompt, form)
        grammar = await chat_grammar(api, plan, form)
        job = chat_job(api, plan, prompt, params, grammar.text)
    return Chat(plan, job, form, grammar, hooks)


async def count_chat(api: ApiContext, plan: ChatPlan) -> int:
    """Return how many tokens a conversation has; they may be more than can be answered."""
    async with images_of(api, plan) as (plan, images):
        return len((await render_chat(api, plan, images, is_counted=True)).token_ids)


def chat_choices(api: ApiContext, chat: Chat, named_call_stops: bool = True) -> list[ChatChoice]:
    """Return the n choices, which share one usage. named_call_stops: an answer that calls the tool
    named by its request ends with `stop`, as OpenAI's does."""
    plan, job, form = chat.plan, chat.job, chat.form
    body, params, tokenizer = plan.body, job.request.params, api.renderer.tokenizer
    names = token_names(api, body) if body.logprobs or body.logprob_token_ids else None
    has_reasoning = form.format.reasoning is not None
    num_reasoning = 0 if has_reasoning else None
    usage = UsageCounter(len(job.token_ids), tenant=plan.tenant, num_reasoning=num_reasoning)
    stops = named_call_stops and isinstance(form.choice, NamedTool)
    choices = []
    for index in range(params.n):
        parser = form.parser() if has_reasoning or form.calls is not None else None
        counts = None
        if has_reasoning and tokenizer is not None:
            counts = ReasoningCount(IncrementalDetokenizer(tokenizer, params, job.token_ids))
        role = api.config.response_role
        choices.append(ChatChoice(index, plan, job, names, usage, parser, counts, stops, role))
    return choices


def token_names(api: ApiContext, body: GenerationRequest) -> TokenNames:
    """Return how the tokens of log-probabilities are shown."""
    as_ids = body.return_tokens_as_token_ids
    shows_ids = api.config.return_tokens_as_token_ids if as_ids is None else as_ids
    return TokenNames(api.renderer.tokenizer, shows_ids)
