"""A chat on its way through the pipeline, for all APIs that answer conversations.

Each API parses its body into a ChatCompletionRequest and writes the choices in its own form:

    plan = plan_chat(api, body, scope, response_id)     what is requested (plan.py)
    chat = await start_chat(api, plan)                  images, hooks, prompt, request
    choices = chat_choices(api, chat)                   writers of an `Answer` (chat_choice.py)

Images, hooks, tools and constraints cost nothing in a request without them.
"""

import dataclasses

from quire.serve.context import ApiContext
from quire.serve.pipeline.continued import render_continued
from quire.serve.pipeline.hooked_prompt import admitted_chat
from quire.serve.pipeline.plan import ChatPlan
from quire.serve.pipeline.prompts import images_of, render_chat
from quire.serve.pipeline.requests import Chat, admit_chat


async def start_chat(api: ApiContext, plan: ChatPlan) -> Chat:
    """Make a chat ready for the engine. Raises ApiError, RequestError, HookFailed or EngineBusy
    for what cannot be served."""
    async with images_of(api, plan) as (plan, images):
        hooks = None
        if api.hooks is not None:
            plan, hooks = await admitted_chat(api, api.hooks, plan)
        prompt = None
        if plan.continued is not None:
            prompt = await render_continued(api, plan, plan.continued)
        if prompt is None:
            plan = dataclasses.replace(plan, continued=None)
            prompt = await render_chat(api, plan, images)
        return await admit_chat(api, plan, prompt, hooks)


async def count_chat(api: ApiContext, plan: ChatPlan) -> int:
    """Return how many tokens a conversation has; they may be more than can be answered."""
    async with images_of(api, plan) as (plan, images):
        return len((await render_chat(api, plan, images, is_counted=True)).token_ids)
