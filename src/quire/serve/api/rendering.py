"""Prompts to token ids without holding up the event loop, and which model a request means."""

import asyncio
from collections.abc import Mapping, Sequence

from quire.render.chat import ChatOptions
from quire.render.renderer import RenderedPrompt
from quire.render.tokenizer import Tokenizer
from quire.serve.api.context import ApiContext
from quire.serve.api.errors import ApiError, bad_request
from quire.serve.api.invalid import shown

# Longer prompts are tokenised in a thread: below this it takes about a millisecond.
MAX_CHARS_ON_LOOP = 8192
# A prompt that no tokenizer could bring under the model's length is refused unread.
MAX_CHARS_PER_TOKEN = 256
INT64 = 2**63


async def render_prompt(
    context: ApiContext,
    prompt: object,
    options: ChatOptions | None = None,
    template: str | None = None,
    add_special_tokens: bool = True,
) -> RenderedPrompt:
    """`Renderer.render`, in a thread if the prompt is long. Raises RequestError or ApiError.

    The length in tokens is judged by `client.check`. template: see `checked_template`.
    """
    num_chars, with_what = size_of(prompt), ""
    if options is not None:  # all of it passes through the template
        with_what = ", with tools, documents and chat_template_kwargs,"
        num_chars += size_of([options.tools, options.documents, options.template_kwargs])
    most = MAX_CHARS_PER_TOKEN * context.client.ready.max_model_len
    if num_chars > most:
        raise bad_request(
            f"the prompt{with_what} has more than {most} characters, too many for max_model_len ="
            f" {context.client.ready.max_model_len} tokens; shorten it.",
            "prompt" if options is None else "messages",
            code="context_length_exceeded",
        )
    arguments = (prompt, options, checked_template(context, template), add_special_tokens)
    if num_chars <= MAX_CHARS_ON_LOOP:
        return context.renderer.render(*arguments)
    return await asyncio.to_thread(context.renderer.render, *arguments)


def size_of(prompt: object) -> int:
    """About how many characters a prompt has, the names in it included, at any nesting. Numbers of
    usual size in lists count as one."""
    total, rest = 0, [prompt]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            total += sum(map(len, value)) + len(value)
            rest.extend(value.values())
        elif isinstance(value, Sequence):
            total += len(value)
            if set(map(type, value)) != {int} or max(map(abs, value)) > INT64:
                rest.extend(value)
        elif isinstance(value, int):
            total += value.bit_length() // 3  # as a template writes it
    return total


def checked_template(context: ApiContext, template: str | None) -> str | None:
    """A request's own template: a name of one of the model's, or a text where that is allowed.

    Never the name of a file, which a setting may be. Raises ApiError.
    """
    if template is None:
        return None
    tokenizer = context.renderer.tokenizer
    if tokenizer is not None and template in tokenizer.chat_templates:
        return template
    if not context.config.trust_request_chat_template:
        raise bad_request(
            "chat_template: this server takes no templates from requests; remove the field, or"
            " start the server with --trust-request-chat-template.",
            "chat_template",
        )
    if not any(char in template for char in "{}\n"):
        raise bad_request(
            f"chat_template must be the text of a template, got {shown(template)}.",
            "chat_template",
        )
    return template


def check_model(context: ApiContext, name: str | None) -> str:
    """The name to show in the answer. None, and an empty one, is the served model; ApiError 404."""
    if not name:
        return context.model_names[0]
    if name in context.model_names:
        return name
    known = ", ".join(context.model_names)
    raise ApiError(
        404,
        f"there is no model {shown(name)} here; this server has: {known}.",
        param="model",
        code="model_not_found",
    )


def tokenizer_of(context: ApiContext) -> Tokenizer:
    """Raises ApiError for a model without one."""
    if context.renderer.tokenizer is None:
        raise bad_request("this model has no tokenizer, so there is no text to and from its ids.")
    return context.renderer.tokenizer


async def decode(context: ApiContext, token_ids: list[int]) -> str:
    """The text of token ids, in a thread if there are many."""
    tokenizer = tokenizer_of(context)
    if len(token_ids) <= MAX_CHARS_ON_LOOP:
        return tokenizer.decode(token_ids)
    return await asyncio.to_thread(tokenizer.decode, token_ids)
