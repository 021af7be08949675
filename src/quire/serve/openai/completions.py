"""POST /v1/completions: continue prompts that are texts or token ids.

With `suffix` the model writes the text between the prompt and the suffix (fill in the middle).
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fastapi
from starlette.responses import Response

from quire.base.errors import CONTEXT_LENGTH_EXCEEDED
from quire.base.requests.outputs import CompletionOutput, RequestOutput
from quire.render.grammars.grammars import Checked
from quire.render.infill import Infill
from quire.render.renderer import RenderedPrompt
from quire.serve.bodies.constraints import checked_grammar, with_warnings
from quire.serve.bodies.logprobs_json import (
    LegacyLogprobs,
    Position,
    TokenNames,
    prompt_logprobs_json,
)
from quire.serve.bodies.open_body import check_neutral
from quire.serve.bodies.protocol import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_PROMPTS,
    MAX_WORD_CHARS,
    CompletionRequest,
    SampledBody,
)
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.context import Api, ApiContext
from quire.serve.errors import bad_request
from quire.serve.hooks.hooks import RequestHooks
from quire.serve.http.middleware import answer_id_of, new_id
from quire.serve.pipeline.answer import Answer, Json, UsageCounter, weights_fields, without_tokens
from quire.serve.pipeline.chat_choice import token_names
from quire.serve.pipeline.completion import completion_job
from quire.serve.pipeline.hooked_prompt import admitted_prompts
from quire.serve.pipeline.plan import CompletionPlan, plan_completion, usage_chunks
from quire.serve.pipeline.prompts import decode, render_completion, render_prompt
from quire.serve.pipeline.requests import Origin, PromptJob

# Fields that exclude a suffix, with their neutral values.
WITHOUT_SUFFIX = {"echo": False, "truncate_prompt_tokens": None}

router = fastapi.APIRouter(route_class=BoundedRoute)


@router.post("/v1/completions")
async def create_completion(
    body: CompletionRequest, request: fastapi.Request, api: Api
) -> Response:
    """Continue each prompt. The choices are in order of the prompts, n for each prompt."""
    answer, grammar = await completion_answer(body, request, api)
    return with_warnings(await answer.respond(request), grammar)


async def completion_answer(
    body: CompletionRequest, request: fastapi.Request, api: ApiContext, *, can_cut: bool = True
) -> tuple[Answer, Checked]:
    """Return the answer to a completion, and the constraint on it. can_cut: whether the API of the
    request has the field truncate_prompt_tokens. Raises ApiError, RequestError, HookFailed or
    EngineBusy for what cannot be served."""
    check_neutral(body)
    usage = usage_chunks(body, api.config)
    plan = plan_completion(api, body, request.scope, new_id("cmpl"), usage)
    prompts = split_prompts(body.prompt)
    check_shared(body, len(prompts))
    check_retained_alone(body, len(prompts))
    grammar = await checked_grammar(api, body, len(prompts))
    body, prompts = await with_suffix(api, body, prompts)
    plan = replace(plan, body=body, can_cut=can_cut)
    prompts, hooks = await admitted_prompts(api, plan, prompts)
    rendered = [await _rendered_in_turn(api, plan, prompt) for prompt in prompts]
    prepared = Prompts(rendered, hooks, grammar)
    return await _answer(api, plan, prepared, Origin(plan.core_id)), grammar


@dataclass(frozen=True)
class Prompts:
    """The prompts that a completion continues."""

    rendered: list[RenderedPrompt]
    hooks: list[RequestHooks] | None  # one for each prompt
    grammar: Checked  # constraint on the continuations


async def respond(
    api: ApiContext,
    plan: CompletionPlan,
    request: fastapi.Request,
    prompts: Prompts,
    origin: Origin,
) -> Response:
    """Return the response with the continuations of the prompts."""
    answer = await _answer(api, plan, prompts, origin)
    return with_warnings(await answer.respond(request), prompts.grammar)


async def _answer(
    api: ApiContext, plan: CompletionPlan, prompts: Prompts, origin: Origin
) -> Answer:
    grammar, fork = prompts.grammar, origin.fork
    hooks: Sequence[RequestHooks | None] = prompts.hooks or [None] * len(prompts.rendered)
    jobs = [
        completion_job(api, plan, prompt, index, grammar.text, origin, own)
        for index, (prompt, own) in enumerate(zip(prompts.rendered, hooks, strict=True))
    ]
    choices = [await _choices(api, index, plan, job) for index, job in enumerate(jobs)]
    head: dict[str, Any] = {
        "id": plan.id, "object": "text_completion", "created": int(time.time()),
        "model": plan.model,
    }  # fmt: skip
    if fork is not None:
        head["forked_from"] = {
            "id": answer_id_of(fork.request_id),
            "index": fork.index,
            "at_token": fork.num_tokens,
        }
    reports = api.config.enable_per_request_metrics
    return Answer(api.client, plan, head, jobs, choices, prompts.hooks, reports, True)


def split_prompts(value: object) -> list[object]:
    """Return the prompts in the field `prompt`, each a text or a list of token ids. Raises
    ApiError."""
    if value is None:
        raise bad_request("prompt is required; add a text or a list of token ids.", "prompt")
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        raise _wrong_prompt(type(value).__name__)
    if not value:
        raise bad_request("prompt must not be an empty list; give at least one prompt.", "prompt")
    if isinstance(value[0], int):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise bad_request(
            f"prompt has {len(value)} prompts; at most {MAX_PROMPTS} are possible in one request."
            " Send several requests.",
            "prompt",
        )
    for item in value:
        if not isinstance(item, str | list):
            raise _wrong_prompt(f"a list with {type(item).__name__}")
    return list(value)


def check_shared(body: SampledBody, num_prompts: int) -> None:
    """Raise ApiError if all copies of a long list exceed the limit of one list. Each prompt has an
    engine request, which holds a copy of its own."""
    num_chars = sum(map(len, body.bad_words or ()))
    num_ids = len(body.allowed_token_ids or ())
    for name, size, limit, kind in (
        ("bad_words", num_chars, MAX_BAD_WORDS * MAX_WORD_CHARS, "characters"),
        ("allowed_token_ids", num_ids, MAX_ALLOWED_TOKENS, "ids"),
    ):
        if size * num_prompts > limit:
            raise bad_request(
                f"{name} has {size} {kind}, for each of {num_prompts} prompts; at most {limit} are"
                " possible in all. Send fewer prompts in one request.",
                name,
            )


def check_retained_alone(body: CompletionRequest, num_prompts: int) -> None:
    """Raise ApiError if the answer cannot be retained under one id, or differs from its tokens."""
    if body.keep_s and num_prompts > 1:
        text = f"keep_s is for one prompt, got {num_prompts}; send several requests."
        raise bad_request(text, "keep_s")
    if body.keep_s and body.max_tokens == 0:
        text = (
            "keep_s with max_tokens=0 would retain a token that the answer does not show; use"
            " max_tokens=1."
        )
        raise bad_request(text, "keep_s")


class CompletionChoice:
    """One continuation of a prompt: the whole of it, or chunk by chunk."""

    def __init__(
        self,
        index: int,
        plan: CompletionPlan,
        job: PromptJob,
        names: TokenNames | None,
        usage: UsageCounter,
        echo: str | None = None,
    ) -> None:
        """Begin a choice.

        index: number among all choices. names: names of tokens in log-probabilities; None without
        them. usage: counter of the prompt. echo: the prompt's text, which the first chunk repeats.
        """
        body = plan.body
        self.usage = usage
        self._index = index
        self._body = body
        self._job = job
        self._echo = echo
        self._begun = False
        self._logprobs = None
        if names is not None:
            num_top = 0 if body.logprob_token_ids else body.logprobs or 0
            self._logprobs = LegacyLogprobs(names, num_top, bool(body.return_token_ids))
        # Whether to send chunks without text.
        self._always = names is not None or body.return_token_ids or plan.usage.in_each

    def chunks(self, output: RequestOutput, completion: CompletionOutput) -> list[Json]:
        begun, choice = self._begun, self._take(output, completion)
        if choice["text"] or choice["finish_reason"] or self._always or not begun:
            return [{"choices": [choice]}]
        return []

    def whole(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        return {"choices": [{"prompt_logprobs": None} | self._take(output, completion)]}

    def _take(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        if self._body.max_tokens == 0:
            completion = without_tokens(completion)
        self.usage.count(len(completion.token_ids), output)
        choice: Json = {
            "index": self._index,
            "text": completion.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        } | weights_fields(completion)
        if self._logprobs is not None:
            positions: list[Position] = list(completion.logprobs or ())
            choice["logprobs"] = self._block(output, completion.token_ids, positions)
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        if not self._begun:
            self._begun = True
            self._add_prompt(choice, output)
        return choice

    def _block(self, output: RequestOutput, token_ids: list[int], after: list[Position]) -> Json:
        assert self._logprobs is not None
        if self._begun or self._echo is None:
            return self._logprobs.block(token_ids, after)
        before = output.prompt_logprobs or [None]
        return self._logprobs.block(self._job.request.prompt_token_ids + token_ids, before + after)

    def _add_prompt(self, choice: Json, output: RequestOutput) -> None:
        """Add the fields of the first chunk, which describe the prompt."""
        if self._echo is not None:
            choice["text"] = self._echo + choice["text"]
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)


async def _rendered_in_turn(
    api: ApiContext, plan: CompletionPlan, prompt: object
) -> RenderedPrompt:
    """Render a prompt, then yield to other requests, because short prompts are tokenised on the
    event loop."""
    rendered = await render_completion(api, plan, prompt)
    await asyncio.sleep(0)
    return rendered


async def _choices(
    api: ApiContext, prompt_index: int, plan: CompletionPlan, job: PromptJob
) -> list[CompletionChoice]:
    """Return the choices of one prompt."""
    n, echo = job.request.params.n, await _echo(api, plan.body, job)
    usage, names = (
        UsageCounter(len(job.request.prompt_token_ids), tenant=plan.tenant),
        logprob_names(api, plan),
    )
    return [
        CompletionChoice(prompt_index * n + index, plan, job, names, usage, echo)
        for index in range(n)
    ]


def logprob_names(api: ApiContext, plan: CompletionPlan) -> TokenNames | None:
    """Return the names of tokens for log-probabilities; None if the body requests none."""
    body = plan.body
    has_logprobs = body.logprobs is not None or body.logprob_token_ids
    return token_names(api, body) if has_logprobs else None


async def _echo(api: ApiContext, body: CompletionRequest, job: PromptJob) -> str | None:
    """Return the prompt's text for `echo`, else None. Without a tokenizer the text is empty."""
    if not body.echo:
        return None
    if job.prompt.text is not None:
        return job.prompt.text
    return "" if api.renderer.tokenizer is None else await decode(api, job.request.prompt_token_ids)


def _wrong_prompt(kind: str) -> Exception:
    return bad_request(
        "prompt must be a text, a list of texts, a list of token ids or a list of such lists,"
        f" got {kind}.",
        "prompt",
    )


# Prompts with a suffix


async def with_suffix(
    api: ApiContext, body: CompletionRequest, prompts: list[object]
) -> tuple[CompletionRequest, list[object]]:
    """Join each prompt and the suffix to token ids, and add the model's fill-in end tokens to the
    body's stop tokens. Without a suffix, change nothing. Raises ApiError for a model that cannot
    fill in."""
    return await filled(api, body, prompts) if body.suffix else (body, prompts)


async def filled(
    api: ApiContext, body: CompletionRequest, prompts: list[object]
) -> tuple[CompletionRequest, list[object]]:
    """Do the same for a suffix that may be empty."""
    tokenizer = api.renderer.tokenizer
    infill = None if tokenizer is None else Infill.of(tokenizer)
    if infill is None:
        raise bad_request(
            "suffix: this model has no fill-in-the-middle tokens; remove suffix.",
            "suffix",
            "unsupported_value",
        )
    for name, neutral in WITHOUT_SUFFIX.items():
        if getattr(body, name) not in (None, neutral):
            raise bad_request(
                f"{name} cannot be used together with suffix; remove one of them.", name
            )
    joined: list[object] = [await _joined(api, infill, body, prompt) for prompt in prompts]
    if infill.ends and not body.ignore_eos:
        stops = [*(body.stop_token_ids or ()), *infill.ends]
        body = body.model_copy(update={"stop_token_ids": stops})
    return body, joined


async def _joined(
    api: ApiContext, infill: Infill, body: CompletionRequest, prompt: object
) -> list[int]:
    suffix = body.suffix or ""
    special = body.add_special_tokens is not False
    before = prompt if isinstance(prompt, str) else (await render_prompt(api, prompt)).token_ids
    texts = [text for text in (before, suffix) if isinstance(text, str)]

    def joined() -> list[int]:
        _check_length(infill, texts, api.client.ready.max_model_len)
        return infill.prompt(before, suffix, special)

    return await api.text_threads.run(sum(map(len, texts)), joined)


def _check_length(infill: Infill, texts: list[str], max_tokens: int) -> None:
    """Raise ApiError for texts that certainly have too many tokens, without tokenising them."""
    bound = infill.tokenizer.bound
    if bound is None or sum(map(len, texts)) <= max_tokens:
        return
    at_least = sum(bound.at_least(text) for text in texts)
    if at_least > max_tokens:
        raise bad_request(
            f"prompt and suffix have {at_least} tokens or more; at most {max_tokens} are possible"
            " here; shorten them.",
            "suffix",
            CONTEXT_LENGTH_EXCEEDED,
        )
