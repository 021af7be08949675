"""Actions of hooks on a request of a server: priority, pause, and questions to other models."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from quire.base.errors import RequestError
from quire.base.requests.hooks import Prompt, checked_pause, checked_priority
from quire.serve.bodies.constraints import checked_grammar
from quire.serve.bodies.open_body import check_neutral
from quire.serve.bodies.protocol import ChatCompletionRequest, CompletionRequest
from quire.serve.bodies.validation_errors import parsed
from quire.serve.context import ApiContext, model_known
from quire.serve.errors import ApiError
from quire.serve.http.middleware import new_id
from quire.serve.pipeline.answer import collect
from quire.serve.pipeline.chat_choice import chat_choices
from quire.serve.pipeline.completion import completion_job
from quire.serve.pipeline.plan import CompletionPlan, Plan, chat_plan_of, check_model
from quire.serve.pipeline.prompts import images_of, render_chat, render_completion
from quire.serve.pipeline.requests import Origin, admit_chat

# Fields that the text of one response, which `ask` returns, has no room for.
REFUSED_FIELDS = {"n", "best_of", "stream", "stream_options", "suffix", "echo"}


class ServerActions:
    """The actions of one request, called from the threads of hooks."""

    def __init__(self, api: ApiContext, request_id: str, tenant: str) -> None:
        self.priority: int | None = None  # the last one that a hook set
        self._api, self._request_id, self._tenant = api, request_id, tenant
        self._loop = asyncio.get_running_loop()

    def set_priority(self, priority: int) -> None:
        """See HookActions."""
        self.priority = checked_priority(priority)
        self._soon(lambda: self._api.client.steer(self._request_id, priority=priority))

    def pause(self, seconds: float) -> None:
        """See HookActions."""
        pause_s = checked_pause(seconds)
        self._soon(lambda: self._api.client.steer(self._request_id, pause_s=pause_s))

    def resume(self) -> None:
        """See HookActions."""
        self._soon(lambda: self._api.client.steer(self._request_id, pause_s=0.0))

    async def ask(self, model: str, prompt: Prompt, **params: Any) -> str:
        """See HookActions."""
        for name in REFUSED_FIELDS & params.keys():
            raise RequestError(f"{name} cannot be set for a request of a hook; remove it.", name)
        work = self._answer(model, prompt, params)
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except ApiError as error:
            code = None if error.code is None else str(error.code)
            raise RequestError(error.message, error.param, code) from error

    def _soon(self, act: Callable[[], None]) -> None:
        """Run a function on the event loop of the server, unless the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)

    async def _answer(self, model: str, prompt: Prompt, params: dict[str, Any]) -> str:
        api = self._api.of_model(model)
        name = check_model(api, model)
        await model_known(api, model)
        if isinstance(prompt, str):
            body = parsed(CompletionRequest, params | {"prompt": prompt})
            check_neutral(body)
            return await self._completion(api, body, name)
        chat = parsed(ChatCompletionRequest, params | {"messages": list(map(dict, prompt))})
        check_neutral(chat)
        return await self._chat(api, chat, name)

    async def _chat(self, api: ApiContext, body: ChatCompletionRequest, name: str) -> str:
        plan = chat_plan_of(api, Plan(body, new_id("hook"), name, self._tenant))
        async with images_of(api, plan) as (plan, images):
            chat = await admit_chat(api, plan, await render_chat(api, plan, images))
        [choice] = chat_choices(api, chat)
        [output] = await collect(api.client, [chat.job])
        whole = choice.whole(output, output.outputs[0])
        return str(whole["choices"][0]["message"]["content"] or "")

    async def _completion(self, api: ApiContext, body: CompletionRequest, name: str) -> str:
        plan = CompletionPlan(body, new_id("hook"), name, self._tenant)
        grammar = await checked_grammar(api, body)
        prompt = await render_completion(api, plan, body.prompt)
        job = completion_job(api, plan, prompt, 0, grammar.text, Origin())
        [output] = await collect(api.client, [job])
        return output.outputs[0].text
