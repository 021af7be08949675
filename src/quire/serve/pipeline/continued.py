"""Chats that continue a retained conversation: its tokens, then the tokens of the new messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import RequestError
from quire.render.renderer import RenderedPrompt
from quire.render.templates.chat_template import ChatOptions
from quire.render.templates.turns import after_answer, text_after
from quire.serve.context import ApiContext
from quire.serve.pipeline.plan import ChatPlan, Continued
from quire.serve.pipeline.prompts import render_prompt, tokenizer_of


async def render_continued(
    api: ApiContext, plan: ChatPlan, continued: Continued
) -> RenderedPrompt | None:
    """Return a retained conversation followed by the new messages; None if the template makes that
    impossible."""
    source = continued.source
    if source.media and plan.body.truncate_prompt_tokens is not None:
        return None  # without its beginning it would have the tokens of images, but no images
    try:
        tail = await tokens_after(
            api, source.token_ids, continued.messages, plan.options, plan.template
        )
    except RequestError:
        return None
    return RenderedPrompt(source.token_ids + tail.token_ids, tail.text)


async def tokens_after(
    api: ApiContext,
    token_ids: list[int],
    messages: Sequence[Mapping[str, Any]],
    options: ChatOptions,
    template: str | None = None,
) -> RenderedPrompt:
    """Return the tokens that continue a conversation after an answer: its end, these messages, and
    the beginning of the next answer.

    token_ids: the conversation up to the answer's last token. Raises RequestError where the
    template makes this impossible.
    """
    conversation, mark = after_answer(messages)
    whole = await render_prompt(api, conversation, options, template)
    has_ended = token_ids[-1] in api.requests.defaults.eos_token_ids
    end = tokenizer_of(api).decode(token_ids[-1:]) if has_ended else ""
    tail = text_after(whole.text or "", mark, end)
    return await render_prompt(api, tail, add_special_tokens=False)
