"""`AsyncRenderer`: prompts to token ids beside an event loop.

Templates run in processes of their own, long texts are tokenised in threads, and what is certainly
too long is refused before it is tokenised.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import CONTEXT_LENGTH_EXCEEDED, RequestError
from quire.render.renderer import Media, RenderedPrompt, Renderer, is_conversation
from quire.render.templates.chat_template import ChatOptions
from quire.serve.lanes import MAX_CHARS_ON_LOOP, Lanes

INT64 = 2**63


class AsyncRenderer:
    """renderer: what makes the tokens. lanes: where long work goes."""

    def __init__(self, renderer: Renderer, lanes: Lanes) -> None:
        self._renderer = renderer
        self._lanes = lanes

    async def render(
        self,
        prompt: object,
        options: ChatOptions | None = None,
        template: str | None = None,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        media: Media = (),
    ) -> RenderedPrompt:
        """`Renderer.render`. max_tokens: a text that certainly has more is refused unread, with
        CONTEXT_LENGTH_EXCEEDED; others may have more, too. Raises RequestError, and EngineBusy
        where too much waits already."""
        field = "prompt"
        if is_conversation(prompt):
            field = "messages"
            prompt = await self._renderer.chat_text_async(prompt, options, template)
            add_special_tokens = False
        num_chars = size_of(prompt, MAX_CHARS_ON_LOOP)
        if num_chars > MAX_CHARS_ON_LOOP:  # counting it all takes long for odd ones only
            num_chars = len(prompt) if isinstance(prompt, str | list) else size_of(prompt)

        def rendered() -> RenderedPrompt:
            if isinstance(prompt, str) and max_tokens is not None:
                self._check_length(prompt, max_tokens, field)
            return self._renderer.render(prompt, None, None, add_special_tokens, media)

        return await self._lanes.run(max(num_chars, 1), rendered)

    def _check_length(self, text: str, max_tokens: int, field: str) -> None:
        tokenizer = self._renderer.tokenizer
        if tokenizer is None or len(text) <= min(max_tokens, MAX_CHARS_ON_LOOP):
            return
        at_least = 0 if tokenizer.bound is None else tokenizer.bound.at_least(text)
        if at_least > max_tokens:
            raise RequestError(
                f"the prompt has {len(text)} characters, which are {at_least} tokens or more; at"
                f" most {max_tokens} are possible here; shorten it.",
                field,
                CONTEXT_LENGTH_EXCEEDED,
            )


def size_of(prompt: object, enough: float = float("inf")) -> int:
    """About how many characters a prompt has, the names in it included, at any nesting. Numbers of
    usual size in lists count as one. enough: where it may stop counting."""
    total, rest = 0, [prompt]
    while rest and total <= enough:
        value = rest.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            total += sum(map(len, value)) + len(value)
            rest.extend(value.values())
        elif isinstance(value, Sequence):
            total += len(value)
            if total <= enough and not _is_ids(value):
                rest.extend(value)
        elif isinstance(value, int):
            total += value.bit_length() // 3  # as a template writes it
    return total


def _is_ids(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {int} and max(map(abs, values)) <= INT64
