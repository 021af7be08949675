"""One completion whose prompt arrives in pieces. The first tokens start the engine's request."""

import time
from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from quire.base.errors import CONTEXT_LENGTH_EXCEEDED
from quire.base.requests.sampling_params import SamplingParams
from quire.render.renderer import RenderedPrompt
from quire.render.tokens.open_text import OpenText
from quire.serve.bodies.constraints import checked_grammar
from quire.serve.bodies.open_body import check_neutral, unsupported
from quire.serve.bodies.protocol import CompletionRequest, Count, Int32, OrUnlimited
from quire.serve.bodies.validation_errors import parsed, shown
from quire.serve.context import ApiContext
from quire.serve.errors import ApiError, bad_request
from quire.serve.hooks.hooks import RequestHooks
from quire.serve.openai.completions import CompletionChoice, logprob_names
from quire.serve.pipeline.answer import Answer, Json, UsageCounter
from quire.serve.pipeline.completion import completion_params
from quire.serve.pipeline.hooked_prompt import admitted_ids, opened
from quire.serve.pipeline.plan import CompletionPlan, UsageChunks, plan_completion
from quire.serve.pipeline.prompts import tokenizer_of
from quire.serve.pipeline.requests import Origin, PromptJob, make_job, room_after, with_priority

MAX_BUFFERED_CHARS = 1 << 24  # length of a text without blanks, which must be tokenised as a whole
ONE = "an open prompt has one continuation; remove it"


class OpenPromptRequest(CompletionRequest):
    """A completion whose prompt arrives in parts, as messages of /v1/stream."""

    n: Count | None = unsupported(ONE, 1)
    best_of: Count | None = unsupported(ONE, 1)
    use_beam_search: bool | None = unsupported(ONE, False)
    stream: bool | None = unsupported("the answer is always streamed; remove it", True)
    echo: bool | None = unsupported("an open prompt cannot be echoed; remove it", False)
    prompt_logprobs: Int32 | None = unsupported(
        "an open prompt does not return them; send the whole prompt to /v1/completions"
    )
    suffix: str | None = unsupported(
        "filling in the middle needs the whole prefix and suffix; remove it", ""
    )
    truncate_prompt_tokens: OrUnlimited | None = unsupported(
        "the parts of an open prompt are computed as they arrive; remove it"
    )


class OpenRequest:
    """A completion whose prompt is still open. is_complete: the last piece has arrived. answer:
    None before the first token; then the caller reads the answer from it."""

    def __init__(self, api: ApiContext, fields: Json, scope: Scope, request_id: str) -> None:
        """Begin a request. fields: body of a completion. scope: scope of its connection. Raises
        ApiError or RequestError for invalid fields."""
        body = parsed(OpenPromptRequest, fields)
        check_neutral(body)
        options = body.stream_options
        in_each = options and options.include_usage and options.continuous_usage_stats
        self.body = body.model_copy(update={"stream": True})
        usage = UsageChunks(at_end=True, in_each=bool(in_each))
        self.plan: CompletionPlan = plan_completion(api, self.body, scope, request_id, usage)
        self.is_complete = False
        self.answer: Answer | None = None
        self._api = api
        self._max_model_len = api.client.ready.max_model_len
        self._params = self._make_params()
        self._usage = UsageCounter(0)
        self._text: OpenText | None = None
        self._grammar: str | None = None  # None until it is checked
        self._min_tokens = 0  # lower bound of the tokens of all text so far
        self._hooks: RequestHooks | None = None
        self._unadmitted: list[int] = []  # tokens that wait until hooks have seen the whole prompt

    async def take(self, prompt: object, is_last: bool) -> None:
        """Process the next piece: a text, a list of token ids, or None. After an ApiError or
        QuireError the request is unusable."""
        token_ids = await self._token_ids(prompt, is_last)
        num_prompt = self._usage.num_prompt + len(token_ids)
        if self.answer is None and self._grammar is None:
            self._grammar = (await checked_grammar(self._api, self.body)).text
        if self._api.hooks is not None and self._hooks is None:
            self._hooks = opened(self._api, self._api.hooks, self.plan, self._job_id)
        if self._hooks is not None and self._hooks.see("before_admission"):
            token_ids = await self._admitted(self._hooks, token_ids, is_last)
            num_prompt = len(token_ids) if is_last else num_prompt
        if is_last:
            self._check_length(num_prompt)
        if self.answer is None and token_ids:
            self._usage.tenant = self.plan.tenant
            self._begin(token_ids, is_last)
        elif self.answer is not None and (token_ids or is_last):
            self._api.client.append(self._job_id, token_ids, is_last)
        self._usage.num_prompt = num_prompt
        self.is_complete = is_last

    async def _admitted(
        self, hooks: RequestHooks, token_ids: list[int], is_last: bool
    ) -> list[int]:
        """Return the tokens that may go to the engine: none before the last piece, then all. Hooks
        must see the whole prompt first."""
        self._unadmitted += token_ids
        if self._unadmitted:
            room_after(
                RenderedPrompt(self._unadmitted), self._max_model_len, "prompt", can_cut=False
            )
        if not is_last or not self._unadmitted:
            return []
        return await admitted_ids(self._api, self.body, hooks, self._unadmitted)

    @property
    def _job_id(self) -> str:
        return f"{self.plan.id}-0"

    def _make_params(self) -> SamplingParams:
        """Return the parameters. Without max_tokens, the answer may use the rest of the context."""
        body, room = self.body, self._max_model_len - 1
        if body.max_tokens is None:
            body = body.model_copy(update={"max_tokens": room})
        return completion_params(body, self._api.requests.defaults, room)

    def _check_length(self, num_prompt: int) -> None:
        """Check the parameters that depend on the length of the whole prompt."""
        if not num_prompt:
            raise bad_request("the prompt is empty: it gives no tokens.", "prompt")
        room = self._max_model_len - num_prompt
        if room >= 1:  # otherwise the engine refuses the request
            completion_params(self.body, self._api.requests.defaults, room)

    def _begin(self, token_ids: list[int], is_last: bool) -> None:
        api, prompt = self._api, RenderedPrompt(token_ids)
        room_after(prompt, self._max_model_len, "prompt", can_cut=False)
        plan = with_priority(self.plan, self._hooks)
        job = make_job(
            api, plan, prompt, self._params, self._job_id, self._grammar or "",
            Origin(plan.core_id), is_open=not is_last,
        )  # fmt: skip
        hooks = None if self._hooks is None else [self._hooks]
        self.answer = Answer(
            api.client, self.plan, self._head(), [job], [[self._choice(job)]], hooks,
            api.config.enable_per_request_metrics,
        )  # fmt: skip

    def _choice(self, job: PromptJob) -> CompletionChoice:
        return CompletionChoice(0, self.plan, job, logprob_names(self._api, self.plan), self._usage)

    def _head(self) -> Json:
        return {
            "type": "chunk", "id": self.plan.id, "object": "text_completion",
            "created": int(time.time()), "model": self.plan.model,
        }  # fmt: skip

    # ---- from pieces to tokens ---------------------------------------------------------------

    async def _token_ids(self, prompt: object, is_last: bool) -> list[int]:
        """Return the token ids that are final after a piece, whatever follows it."""
        token_ids: list[int] = []
        if isinstance(prompt, str):
            token_ids = await self._tokens_of(prompt)
        elif prompt is not None:
            token_ids = _checked_ids(prompt)
            if self._text is not None:
                token_ids = await self._in_time(self._text.add_ids, token_ids)
        if is_last and self._text is not None:
            token_ids = token_ids + await self._in_time(self._text.close)
        return token_ids

    async def _tokens_of(self, piece: str) -> list[int]:
        if self._text is None:
            special = self.body.add_special_tokens is not False
            adds_special = special and not self._usage.num_prompt
            self._text = OpenText(tokenizer_of(self._api), adds_special)
        self._check_piece(piece)
        return await self._in_time(self._text.add, piece)

    def _check_piece(self, piece: str) -> None:
        """Refuse text that certainly exceeds the context, before it is tokenised or held back."""
        assert self._text is not None
        bound = tokenizer_of(self._api).bound
        self._min_tokens += 0 if bound is None else bound.at_least(piece)
        is_too_long = self._text.num_held_chars + len(piece) > MAX_BUFFERED_CHARS
        if self._min_tokens > self._max_model_len or is_too_long:
            raise bad_request(
                f"the prompt has too many characters for max_model_len = {self._max_model_len}"
                " tokens; shorten it.",
                "prompt",
                code=CONTEXT_LENGTH_EXCEEDED,
            )

    async def _in_time(self, encode: Any, *piece: Any) -> list[int]:
        """Tokenise a piece of text, in a thread if it is long."""
        assert self._text is not None
        num_chars = self._text.num_held_chars + sum(map(len, piece))
        found: list[int] = await self._api.text_threads.run(num_chars, encode, *piece)
        return found


def _checked_ids(prompt: object) -> list[int]:
    """Return the token ids of a piece. The engine checks that they are in the vocabulary."""
    if not isinstance(prompt, list) or not prompt:
        raise _wrong_piece(shown(prompt))
    for value in prompt:
        if type(value) is not int:
            kind = "an object" if isinstance(value, Mapping) else shown(value)
            raise _wrong_piece(f"a list with {kind}")
    return prompt


def _wrong_piece(given: str) -> ApiError:
    text = f"prompt must be a text or a list of token ids, got {given}."
    return bad_request(text, "prompt")
