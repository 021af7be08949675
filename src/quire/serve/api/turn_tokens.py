"""More messages of a conversation whose tokens are held: only what is new becomes tokens.

    held    ... <|im_start|>assistant\n Hello! <|im_end|>      as it was computed and sampled
    new     \n <|im_start|>user\n And you? <|im_end|>\n <|im_start|>assistant\n

What a template writes behind an answer is found by letting it write one that can be told: what
stands behind that is new. So no turn is tokenised twice, and what the model has seen does not
change, whatever the template would make of it later.
"""

import secrets
from typing import Any

from quire.base.errors import RequestError
from quire.render.chat_template import ChatOptions
from quire.render.renderer import RenderedPrompt
from quire.serve.api.context import ApiContext
from quire.serve.api.rendering import render_prompt, tokenizer_of

Json = dict[str, Any]


async def tokens_behind(
    api: ApiContext,
    held_ids: list[int],
    messages: list[Json],
    options: ChatOptions,
    template: str | None = None,
) -> RenderedPrompt:
    """Return what goes behind an answer so that these messages, and the begin of the next answer,
    follow. held_ids: up to that answer's end. Raises RequestError where the template does not write
    an answer as it is, in one place."""
    mark = f"mark{secrets.token_hex(8)}"
    told: list[Json] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
    if any(message.get("role") == "tool" for message in messages):
        told[1]["tool_calls"] = _calls_of(messages)
    whole = await render_prompt(api, [*told, *messages], options, template)
    before, found, tail = (whole.text or "").partition(mark)
    if not found or mark in tail:
        raise RequestError(
            "the chat template does not write an answer as it is, so nothing can be put behind the"
            " held one; send prompt or token_ids, or the whole conversation to"
            " /v1/chat/completions.",
            "messages",
        )
    if held_ids[-1] in api.requests.defaults.eos_token_ids:
        tail = tail.removeprefix(tokenizer_of(api).decode(held_ids[-1:]))
    return await render_prompt(api, tail, add_special_tokens=False)


def _calls_of(messages: list[Json]) -> list[Json]:
    """Return calls to which the results among these messages are the answers: templates want to
    have seen them."""
    return [
        {
            "id": str(message.get("tool_call_id") or "call"),
            "type": "function",
            "function": {"name": str(message.get("name") or "f"), "arguments": {}},
        }
        for message in messages
        if message.get("role") == "tool"
    ]
