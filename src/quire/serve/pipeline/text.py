"""Texts on their way through the pipeline: prompts, and continuations with a writer of an API.

`start_texts` does for a completion what `start_chat` does for a chat; `start_text` is for a
completion of one prompt.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.base.requests.outputs import CompletionOutput, Logprob, RequestOutput
from quire.render.grammars.grammars import Checked
from quire.serve.bodies.constraints import checked_grammar
from quire.serve.bodies.logprobs_json import TokenNames, chat_logprobs
from quire.serve.bodies.protocol import CompletionRequest
from quire.serve.context import ApiContext
from quire.serve.hooks.hooks import RequestHooks
from quire.serve.pipeline.answer import UsageCounter, without_tokens
from quire.serve.pipeline.chat_choice import token_names
from quire.serve.pipeline.completion import completion_job
from quire.serve.pipeline.hooked_prompt import admitted_prompts
from quire.serve.pipeline.plan import CompletionPlan
from quire.serve.pipeline.prompts import render_completion
from quire.serve.pipeline.requests import Origin, PromptJob

Json = dict[str, Any]


class TextChoice:
    """The continuation of a text, with log-probabilities as in chats, and the tokens' ids."""

    def __init__(
        self,
        usage: UsageCounter,
        names: TokenNames | None,
        body: CompletionRequest,
        index: int = 0,
    ) -> None:
        """Begin a continuation. names: how tokens are shown; None without log-probabilities. index:
        number among all continuations."""
        self.usage = usage
        self._index = index
        self._names = names
        self._num_top = body.logprobs or 0
        self._num_prompt_top = body.prompt_logprobs
        self._is_dropped = body.max_tokens == 0  # the engine samples a token even then

    def chunks(self, output: RequestOutput, completion: CompletionOutput) -> list[Json]:
        return [self.whole(output, completion)]

    def whole(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        if self._is_dropped:
            completion = without_tokens(completion)
        self.usage.count(len(completion.token_ids), output)
        choice: Json = {
            "index": self._index,
            "text": completion.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids,
        }
        if self._names is not None:
            positions = completion.logprobs or ()
            choice["logprobs"] = chat_logprobs(
                self._names, completion.token_ids, positions, self._num_top
            )
            _add_ids(choice["logprobs"]["content"], completion)
            if self._num_prompt_top is not None and output.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._of_prompt(output, self._num_prompt_top)
        return {"choices": [choice]}

    def _of_prompt(self, output: RequestOutput, num_top: int) -> list[Json]:
        """Return the log-probabilities of the prompt's tokens; null for the first."""
        assert self._names is not None, "log-probabilities have names of tokens"
        found: list[Json] = []
        token_ids = output.prompt_token_ids or ()
        for token_id, position in zip(token_ids, output.prompt_logprobs or (), strict=False):
            if position is None:
                text = self._names.text(token_id, None)
                entry = {"token": text, "logprob": None, "id": token_id, "top_logprobs": None}
                found.append(entry)
                continue
            content = chat_logprobs(self._names, [token_id], [position], num_top)["content"]
            _add_position_ids(content[0], token_id, position)
            found += content
        return found


def _add_ids(entries: list[Json], completion: CompletionOutput) -> None:
    """Add the ids of tokens to their log-probabilities."""
    positions = completion.logprobs or ()
    for entry, token_id, position in zip(entries, completion.token_ids, positions, strict=False):
        _add_position_ids(entry, token_id, position)


def _add_position_ids(entry: Json, token_id: int, position: dict[int, Logprob]) -> None:
    entry["id"] = token_id
    best = sorted(position, key=lambda each: position[each].rank or 0)
    for top, top_id in zip(entry["top_logprobs"], best, strict=False):
        top["id"] = top_id


@dataclass(frozen=True)
class Texts:
    """Texts that are ready for the engine. choices: n for each prompt."""

    plan: CompletionPlan
    jobs: list[PromptJob]
    grammar: Checked  # of the continuations
    hooks: list[RequestHooks] | None
    choices: list[list[TextChoice]]


async def start_text(api: ApiContext, plan: CompletionPlan, prompt: object) -> Texts:
    """Make one text ready for the engine. Raises as `start_texts`."""
    return await start_texts(api, plan, [prompt])


async def start_texts(api: ApiContext, plan: CompletionPlan, prompts: Sequence[object]) -> Texts:
    """Make texts ready for the engine. Raises ApiError, RequestError, HookFailed or EngineBusy for
    what cannot be served."""
    body, n = plan.body, plan.body.n or 1
    grammar = await checked_grammar(api, body, len(prompts))
    prompts, hooks = await admitted_prompts(api, plan, list(prompts))
    names = None if body.logprobs is None else token_names(api, body)
    jobs: list[PromptJob] = []
    choices: list[list[TextChoice]] = []
    for index, prompt in enumerate(prompts):
        rendered = await render_completion(api, plan, prompt)
        own, origin = None if hooks is None else hooks[index], Origin(plan.core_id)
        job = completion_job(api, plan, rendered, index, grammar.text, origin, own)
        usage = UsageCounter(len(job.request.prompt_token_ids), tenant=plan.tenant)
        jobs.append(job)
        choices.append([])
        for number in range(index * n, (index + 1) * n):
            choices[-1].append(TextChoice(usage, names, body, number))
        await asyncio.sleep(0)  # short prompts are tokenised on the event loop
    return Texts(plan, jobs, grammar, hooks, choices)
