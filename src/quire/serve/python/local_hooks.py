"""Hooks of an `LLM`, which process prompts and outputs of a program without an event loop."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from quire.base.errors import HookFailed, RequestError
from quire.base.requests.hooks import (
    CONTENT_FILTER,
    EndRequest,
    HookContext,
    HookRequest,
    NoActions,
    checked_pause,
    checked_priority,
)
from quire.base.requests.outputs import CompletionOutput, RequestOutput, SampleLogprobs
from quire.base.requests.sampling_params import SamplingParams
from quire.base.step_outputs import Failure
from quire.engine.client.client import InProcessClient
from quire.engine.start.build import Engine
from quire.render.renderer import is_conversation
from quire.render.templates.chat_template import ChatOptions
from quire.serve.hooks.hook_calls import OwnLoop
from quire.serve.hooks.hooks import Hooks, RequestHooks, requested_params
from quire.serve.processes.core_processes import CoreProcesses, ProcessEngine

NO_CONTEXT = HookContext("", "", "")


class LocalHooks:
    """Hooks that run on an event loop of their own. engine: the engine whose prompts they see."""

    def __init__(self, hooks: Hooks, engine: Engine | ProcessEngine) -> None:
        self._hooks = hooks
        self._engine = engine
        self._loop = OwnLoop("llm-hooks")
        self._numbers = count()

    def admit(
        self, prompts: list[Any], params: list[SamplingParams], options: ChatOptions | None = None
    ) -> "tuple[list[Any], list[LocalRequest]]":
        """Return prompts as changed by hooks, and their requests. Raises RequestError for a request
        that a hook ends, and HookFailed."""
        found, requests = [], []
        for prompt, own in zip(prompts, params, strict=True):
            name = f"hooked-{next(self._numbers)}"
            actions = LocalActions()
            hooks = self._hooks.open(name, "", self._engine.config.model.model, actions)
            hook_request = self._hook_request(prompt, own, options or ChatOptions())
            changed = self._loop.run(hooks.before_admission(hook_request))
            found.append(self._changed(prompt, hook_request, changed))
            requests.append(LocalRequest(name, hooks, actions, own.n, self._loop))
        return found, requests

    def close(self) -> None:
        self._hooks.close()
        self._loop.stop()

    def _hook_request(
        self, prompt: Any, params: SamplingParams, options: ChatOptions
    ) -> HookRequest:
        """Return a prompt of any form as hooks see it."""
        hook_request = requested_params(params)
        if is_conversation(prompt):
            given = {
                "tools": options.tools,
                "documents": options.documents,
                "chat_template_kwargs": options.template_kwargs,
            }
            template = {name: value for name, value in given.items() if value}
            return HookRequest(NO_CONTEXT, prompt, template=template, params=hook_request)
        token_ids = prompt
        if isinstance(prompt, Mapping):
            token_ids = prompt.get("prompt_token_ids") or prompt.get("prompt")
        if isinstance(token_ids, str):
            return HookRequest(NO_CONTEXT, prompt=token_ids, params=hook_request)
        return HookRequest(
            NO_CONTEXT, None, self._text_of(token_ids), token_ids, params=hook_request
        )

    def _text_of(self, token_ids: Any) -> str | None:
        size, tokenizer = self._engine.spec.vocab_size, self._engine.renderer.tokenizer
        for each in token_ids or ():
            if type(each) is not int or not 0 <= each < size:
                raise RequestError(f"a prompt must hold token ids from 0 to {size - 1}.", "prompt")
        return None if tokenizer is None else tokenizer.decode(token_ids or ())

    def _changed(self, prompt: Any, hook_request: HookRequest, changed: HookRequest) -> Any:
        """Return a prompt in its original form, with the changes of hooks."""
        if hook_request.messages is not None:
            return changed.messages
        if changed.prompt is None or changed.prompt == hook_request.prompt:
            return prompt
        new: dict[str, Any] = {"prompt": changed.prompt}
        if hook_request.prompt_token_ids is not None:
            tokenizer = self._engine.renderer.tokenizer
            assert tokenizer is not None
            new = {"prompt_token_ids": tokenizer.encode(changed.prompt, False)}
        return {**prompt, **new} if isinstance(prompt, Mapping) else new


class LocalActions(NoActions):
    """Actions of hooks on one request of an `LLM`, which executes them between steps."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int | None, float | None]] = deque()  # arguments of `steer`

    def set_priority(self, priority: int) -> None:
        """See HookActions."""
        self.priority = checked_priority(priority)
        self.waiting.append((priority, None))

    def pause(self, seconds: float) -> None:
        """See HookActions."""
        self.waiting.append((None, checked_pause(seconds)))

    def resume(self) -> None:
        """See HookActions."""
        self.waiting.append((None, 0.0))


@dataclass
class _Choice:
    """State of one continuation. Token ids and log-probabilities are collected until its end."""

    has_ended: bool = False
    is_changed: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: SampleLogprobs = field(default_factory=list)


class LocalRequest:
    """One request of an `LLM` as hooks see it."""

    def __init__(
        self, request_id: str, hooks: RequestHooks, actions: LocalActions, n: int, loop: OwnLoop
    ) -> None:
        self.request_id = request_id
        self.has_ended = False  # whether a hook has ended it
        self._actions = actions
        self._hooks = hooks
        self._loop = loop
        self._choices = {index: _Choice() for index in range(n)}

    def priority(self, own: int) -> int:
        """Return the priority of a new request. own: used unless a hook set a priority."""
        self._actions.waiting.clear()  # the request does not run yet
        return own if self._actions.priority is None else self._actions.priority

    def act(self, client: InProcessClient | CoreProcesses) -> None:
        """Execute the hooks' actions since the last call."""
        while self._actions.waiting:
            client.steer(self.request_id, *self._actions.waiting.popleft())

    def take(self, output: RequestOutput) -> RequestOutput:
        """Return an output as changed by hooks: only new tokens, or all in one piece. Raises
        HookFailed."""
        if self._hooks.see("on_output"):
            self._loop.run(self._pass(output))
        return output

    def finish(self, output: RequestOutput) -> RequestOutput:
        """Return a request's only output as changed by hooks, or an error if a hook failed."""
        try:
            return self.take(output)
        except HookFailed as error:
            failure = Failure(error.code, str(error))
            output.outputs = [
                CompletionOutput(each.index, "", [], finish_reason="error", error=failure)
                for each in output.outputs
            ]
            return output

    async def _pass(self, output: RequestOutput) -> None:
        passed: list[CompletionOutput] = []
        for completion in output.outputs:
            mine = self._choices.setdefault(completion.index, _Choice())
            try:
                await self._pass_one(mine, completion)
            except EndRequest as end:
                self.has_ended = output.finished = True
                later = {each.index for each in output.outputs} - {each.index for each in passed}
                open_ones = {index for index, each in self._choices.items() if not each.has_ended}
                passed += [_end(index, end.reason) for index in sorted(later | open_ones)]
                break
            passed.append(completion)
        output.outputs = passed

    async def _pass_one(self, mine: _Choice, completion: CompletionOutput) -> None:
        is_last = completion.finished()
        text = completion.text
        if text or is_last:
            completion.text = await self._hooks.on_output(
                completion.index, "content", text, is_last
            )
        mine.has_ended = is_last
        mine.is_changed |= completion.text != text
        mine.token_ids += completion.token_ids
        mine.logprobs += completion.logprobs or []
        is_complete = is_last and not mine.is_changed
        completion.token_ids = mine.token_ids if is_complete else []
        if completion.logprobs is not None:
            completion.logprobs = mine.logprobs if is_complete else None
        if not is_complete:
            completion.cumulative_logprob = None


def _end(index: int, reason: str) -> CompletionOutput:
    return CompletionOutput(index, "", [], finish_reason=CONTENT_FILTER, stop_reason=reason)
