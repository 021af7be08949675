"""Messages behind an answer whose tokens are held, as tokens (`render/turns.py`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.render.chat_template import ChatOptions
from quire.render.renderer import RenderedPrompt
from quire.render.turns import behind_an_answer, text_behind
from quire.serve.api.context import ApiContext
from quire.serve.api.rendering import render_prompt, tokenizer_of


async def tokens_behind(
    api: ApiContext,
    held_ids: list[int],
    messages: Sequence[Mapping[str, Any]],
    options: ChatOptions,
    template: str | None = None,
) -> RenderedPrompt:
    """Return what goes behind an answer so that these messages, and the begin of the next answer,
    follow. held_ids: up to that answer's end. Raises RequestError where the template makes this
    impossible."""
    told, mark = behind_an_answer(messages)
    whole = await render_prompt(api, told, options, template)
    has_ended = held_ids[-1] in api.requests.defaults.eos_token_ids
    end = tokenizer_of(api).decode(held_ids[-1:]) if has_ended else ""
    tail = text_behind(whole.text or "", mark, end)
    return await render_prompt(api, tail, add_special_tokens=False)
