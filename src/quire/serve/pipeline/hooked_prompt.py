"""`before_admission` of the endpoints: hooks see bodies and prompts before they are rendered.

A hook sees what the model will get. Of a prompt in token ids it also sees the text.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.base.requests.hooks import HookContext, HookRequest
from quire.serve.bodies.protocol import ServedBody
from quire.serve.context import ApiContext
from quire.serve.errors import bad_request
from quire.serve.hooks.hooks import Hooks, RequestHooks, requested_params
from quire.serve.pipeline.hook_actions import ServerActions
from quire.serve.pipeline.plan import ChatPlan, Plan
from quire.serve.pipeline.prompts import decode, render_prompt

NO_CONTEXT = HookContext("", "", "")
TEMPLATE = ("tools", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort")


async def admitted_chat(
    api: ApiContext, all_hooks: Hooks, plan: ChatPlan
) -> tuple[ChatPlan, list[RequestHooks]]:
    """Return the plan as hooks leave it, and the hooks of its one request. Raises RequestError for
    a request that a hook ends, and HookFailed."""
    body, hooks = plan.body, opened(api, all_hooks, plan, plan.id)
    template = {name: value for name in TEMPLATE if (value := getattr(body, name)) is not None}
    requested = HookRequest(
        NO_CONTEXT, body.messages, template=template, params=requested_params(body)
    )
    messages = (await hooks.before_admission(requested)).messages
    if messages is not body.messages:  # perhaps also messages of a retained conversation
        body = body.model_copy(update={"messages": [dict(each) for each in messages or ()]})
        plan = replace(plan, body=body, continued=None)
    return plan, [hooks]


async def admitted_prompts(
    api: ApiContext, plan: Plan[Any], prompts: list[object]
) -> tuple[list[object], list[RequestHooks] | None]:
    """Do the same for the prompts of a completion, each a text or token ids, which are requests of
    their own."""
    if api.hooks is None:
        return prompts, None
    ids = [f"{plan.id}-{index}" for index in range(len(prompts))]
    each = [opened(api, api.hooks, plan, request_id) for request_id in ids]
    found: list[object] = []
    for hooks, prompt in zip(each, prompts, strict=True):
        if isinstance(prompt, str):
            requested = HookRequest(NO_CONTEXT, prompt=prompt, params=requested_params(plan.body))
            found.append((await hooks.before_admission(requested)).prompt)
        else:
            found.append(await admitted_ids(api, plan.body, hooks, prompt))
    return found, each


async def admitted_ids(
    api: ApiContext, body: ServedBody, hooks: RequestHooks, token_ids: Any
) -> list[int]:
    """Return token ids as hooks leave them; the ids of the new text if a hook changed it."""
    text = await _text_of(api, token_ids)
    requested = HookRequest(NO_CONTEXT, None, text, token_ids, params=requested_params(body))
    changed = (await hooks.before_admission(requested)).prompt
    if changed is None or changed == text:
        found: list[int] = token_ids
        return found
    return (await render_prompt(api, changed, add_special_tokens=False)).token_ids


def opened(api: ApiContext, hooks: Hooks, plan: Plan[Any], request_id: str) -> RequestHooks:
    """Return the hooks of one of the engine's requests."""
    actions = ServerActions(api, request_id, plan.tenant)
    return hooks.open(request_id, plan.tenant, plan.model, actions)


async def _text_of(api: ApiContext, token_ids: Sequence[Any]) -> str | None:
    """Return the text of token ids; None without a tokenizer. Raise ApiError for an unknown id:
    no later check sees the ids that truncation drops."""
    size = api.client.ready.vocab_size
    for each in token_ids:
        if type(each) is not int or not 0 <= each < size:
            raise bad_request(f"prompt must hold token ids from 0 to {size - 1}.", "prompt")
    return None if api.renderer.tokenizer is None else await decode(api, list(token_ids))
