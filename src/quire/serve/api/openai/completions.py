"""POST /v1/completions: prompts as texts or token ids, continued.

With `suffix` the model writes the text between the prompt and the suffix (fill in the middle).
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fastapi
from starlette.responses import Response

from quire.base.errors import CONTEXT_LENGTH_EXCEEDED, EngineBusy, RequestError
from quire.base.requests.outputs import CompletionOutput, RequestOutput
from quire.render.grammars.grammars import Checked
from quire.render.infill import Infill
from quire.render.renderer import RenderedPrompt
from quire.serve.api.bodies.logprobs_json import (
    LegacyLogprobs,
    Position,
    TokenNames,
    prompt_logprobs_json,
)
from quire.serve.api.bodies.open_body import check_neutral
from quire.serve.api.bodies.params import (
    checked_stream_options,
    completion_params,
    room_beside,
    truncated,
)
from quire.serve.api.bodies.protocol import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_PROMPTS,
    MAX_WORD_CHARS,
    CompletionRequest,
)
from quire.serve.api.bodies.reading import BoundedRoute
from quire.serve.api.bodies.structured import checked_grammar, with_warnings
from quire.serve.api.context import Api, ApiContext, answer_id_of, new_id
from quire.serve.api.errors import bad_request
from quire.serve.api.http.auth import tenant_asking
from quire.serve.api.openai.answers import Answer, Json, UsageCounter
from quire.serve.api.openai.hooked_prompt import admitted_prompts
from quire.serve.api.openai.jobs import Origin, PromptJob, asked_core, make_job
from quire.serve.api.openai.rendering import check_model, decode, render_prompt, token_names
from quire.serve.hooks import RequestHooks

UNLIKE = {"echo": False, "truncate_prompt_tokens": None}


async def infilled(
    api: ApiContext, body: CompletionRequest, prompts: list[object]
) -> tuple[CompletionRequest, list[object]]:
    """Return prompts with their suffix, as token ids, and the body with what ends such answers; as
    they are without a suffix. Raises ApiError for a model that does not fill in."""
    if not body.suffix:
        return body, prompts
    tokenizer = api.renderer.tokenizer
    infill = None if tokenizer is None else Infill.of(tokenizer)
    if infill is None:
        raise bad_request(
            "suffix: this model has no fill-in-the-middle tokens; remove suffix.",
            "suffix",
            "unsupported_value",
        )
    for name, neutral in UNLIKE.items():
        if getattr(body, name) not in (None, neutral):
            raise bad_request(
                f"{name} cannot be used together with suffix; remove one of them.", name
            )
    found: list[object] = [await _joined(api, infill, body, prompt) for prompt in prompts]
    if infill.ends and not body.ignore_eos:
        stops = [*(body.stop_token_ids or ()), *infill.ends]
        body = body.model_copy(update={"stop_token_ids": stops})
    return body, found


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

    return await api.lanes.run(sum(map(len, texts)), joined)


def _check_length(infill: Infill, texts: list[str], most: int) -> None:
    """Raise ApiError for texts that certainly have more tokens, without tokenising them."""
    bound = infill.tokenizer.bound
    if bound is None or sum(map(len, texts)) <= most:
        return
    at_least = sum(bound.at_least(text) for text in texts)
    if at_least > most:
        raise bad_request(
            f"prompt and suffix have {at_least} tokens or more; at most {most} are possible here;"
            " shorten them.",
            "suffix",
            CONTEXT_LENGTH_EXCEEDED,
        )


router = fastapi.APIRouter(route_class=BoundedRoute)


@router.post("/v1/completions")
async def create_completion(
    body: CompletionRequest, request: fastapi.Request, api: Api
) -> Response:
    """Continue each prompt; choices in the order of the prompts, those of one side by side."""
    check_model(api, body.model)
    check_neutral(body)
    body = checked_stream_options(body, api.config)
    answer_id = new_id("cmpl")
    given = split_prompts(body.prompt)
    check_shared(body, len(given))
    check_kept_alone(body, len(given))
    grammar = await checked_grammar(api, body, len(given))
    body, given = await infilled(api, body, given)
    given, hooks = await admitted_prompts(api, body, request.scope, answer_id, given)
    prompts = [await _rendered_in_turn(api, body, prompt) for prompt in given]
    given_prompts = Prompts(answer_id, prompts, hooks, grammar)
    return await respond(api, body, request, given_prompts, Origin(asked_core(request.scope)))


@dataclass(frozen=True)
class Prompts:
    """What an answer continues: prompts, with the hooks of each; grammar: of the continuations."""

    answer_id: str
    rendered: list[RenderedPrompt]
    hooks: list[RequestHooks] | None
    grammar: Checked


async def respond(
    api: ApiContext,
    body: CompletionRequest,
    request: fastapi.Request,
    prompts: Prompts,
    origin: Origin,
) -> Response:
    """Answer with the continuations of prompts."""
    tenant = tenant_asking(request.scope, api.config, body)
    answer_id, grammar, fork = prompts.answer_id, prompts.grammar, origin.fork
    jobs = [
        _job(api, body, prompt, f"{answer_id}-{index}", tenant, grammar.text, origin)
        for index, prompt in enumerate(prompts.rendered)
    ]
    names = token_names(api, body.return_tokens_as_token_ids)
    choices = [await _choices(api, index, body, job, names) for index, job in enumerate(jobs)]
    head: dict[str, Any] = {
        "id": answer_id, "object": "text_completion", "created": int(time.time()),
        "model": check_model(api, body.model),
    }  # fmt: skip
    if fork is not None:
        told = {
            "id": answer_id_of(fork.request_id),
            "index": fork.index,
            "at_token": fork.num_tokens,
        }
        head["forked_from"] = told
    tells = api.config.enable_per_request_metrics
    answer = Answer(api.client, body, head, jobs, choices, prompts.hooks, tells)
    return with_warnings(await answer.respond(request), grammar)


def split_prompts(value: object) -> list[object]:
    """Return the prompts of the field `prompt`, each a text or a list of token ids. Raises
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


def check_shared(body: CompletionRequest, num_prompts: int) -> None:
    """Raise ApiError for long lists that many prompts share: the engine's request of each prompt
    holds them once more. All together they may be as long as those of one prompt."""
    num_chars = sum(map(len, body.bad_words or ()))
    num_ids = len(body.allowed_token_ids or ())
    for name, size, most, kind in (
        ("bad_words", num_chars, MAX_BAD_WORDS * MAX_WORD_CHARS, "characters"),
        ("allowed_token_ids", num_ids, MAX_ALLOWED_TOKENS, "ids"),
    ):
        if size * num_prompts > most:
            raise bad_request(
                f"{name} has {size} {kind}, for each of {num_prompts} prompts; at most {most} are"
                " possible in all. Send fewer prompts in one request.",
                name,
            )


def check_kept_alone(body: CompletionRequest, num_prompts: int) -> None:
    """Raise ApiError for an answer that cannot be kept under one id, or not as it is shown."""
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
    """One continuation of a prompt, in one piece or in several.

    index: among all choices. echo: the prompt's text, which the first piece begins with; None if it
    is not shown. usage: the prompt's.
    """

    def __init__(
        self,
        index: int,
        body: CompletionRequest,
        job: PromptJob,
        echo: str | None,
        names: TokenNames,
        usage: UsageCounter,
    ) -> None:
        self.usage = usage
        self._index = index
        self._body = body
        self._job = job
        self._echo = echo
        self._begun = False
        self._logprobs = None
        if body.logprobs is not None or body.num_named:
            num_top = 0 if body.num_named else body.logprobs or 0
            self._logprobs = LegacyLogprobs(names, num_top, bool(body.return_token_ids))
        # Everything that makes a chunk worth sending although it has no text
        self._always = (
            self._logprobs is not None or body.return_token_ids or body.wants_running_usage
        )

    def chunks(self, output: RequestOutput, completion: CompletionOutput) -> list[Json]:
        begun, choice = self._begun, self._take(output, completion)
        if choice["text"] or choice["finish_reason"] or self._always or not begun:
            return [{"choices": [choice]}]
        return []

    def whole(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        return {"choices": [{"prompt_logprobs": None} | self._take(output, completion)]}

    def _take(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        if self._body.max_tokens == 0:
            completion = _without_tokens(completion)
        self.usage.count(len(completion.token_ids), output)
        choice: Json = {
            "index": self._index,
            "text": completion.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
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
        return self._logprobs.block(self._job.token_ids + token_ids, before + after)

    def _add_prompt(self, choice: Json, output: RequestOutput) -> None:
        """Add what only the first piece holds."""
        if self._echo is not None:
            choice["text"] = self._echo + choice["text"]
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)


def _without_tokens(completion: CompletionOutput) -> CompletionOutput:
    """Drop the token of max_tokens 0, which nobody asked for."""
    reason = completion.finish_reason
    reason = "length" if reason == "stop" else reason
    return CompletionOutput(completion.index, "", [], None, None, reason)


async def _rendered_in_turn(
    api: ApiContext, body: CompletionRequest, prompt: object
) -> RenderedPrompt:
    """Render a prompt and let others have their turn: short ones are tokenised on the event
    loop."""
    rendered = await _render(api, body, prompt)
    await asyncio.sleep(0)
    return rendered


async def _render(api: ApiContext, body: CompletionRequest, prompt: object) -> RenderedPrompt:
    special = body.add_special_tokens is not False
    try:
        is_cut = body.truncate_prompt_tokens is not None
        rendered = await render_prompt(api, prompt, add_special_tokens=special, is_cut=is_cut)
    except EngineBusy:  # no field is to blame
        raise
    except RequestError as error:
        raise bad_request(str(error), "prompt", error.code) from error
    return truncated(rendered, body, api.client.ready.max_model_len)


def _job(
    api: ApiContext,
    body: CompletionRequest,
    prompt: RenderedPrompt,
    job_id: str,
    tenant: str,
    grammar: str,
    origin: Origin,
) -> PromptJob:
    room = room_beside(prompt, api.client.ready.max_model_len, "prompt")
    params = completion_params(body, api.requests.defaults, room)
    return make_job(api, body, prompt, params, job_id, tenant, grammar, origin)


async def _choices(
    api: ApiContext, prompt_index: int, body: CompletionRequest, job: PromptJob, names: TokenNames
) -> list[CompletionChoice]:
    """Return the choices of one prompt."""
    n, echo = job.request.params.n, await _echo(api, body, job)
    usage = UsageCounter(len(job.token_ids), tenant=job.request.tenant)
    return [
        CompletionChoice(prompt_index * n + index, body, job, echo, names, usage)
        for index in range(n)
    ]


async def _echo(api: ApiContext, body: CompletionRequest, job: PromptJob) -> str | None:
    """Return the prompt's text if it is to be shown; without a tokenizer there is none."""
    if not body.echo:
        return None
    if job.prompt.text is not None:
        return job.prompt.text
    return "" if api.renderer.tokenizer is None else await decode(api, job.token_ids)


def _wrong_prompt(kind: str) -> Exception:
    return bad_request(
        "prompt must be a text, a list of texts, a list of token ids or a list of such lists,"
        f" got {kind}.",
        "prompt",
    )
