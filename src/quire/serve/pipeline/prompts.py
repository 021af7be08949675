"""Prompts: from conversations, texts and token ids to the tokens that the engine gets.

Long texts are tokenised in threads and templates run in processes, so the event loop stays free.
A long text that certainly has too many tokens is refused before it is tokenised. Admission checks
the exact length.
"""

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quire.base.errors import CONTEXT_LENGTH_EXCEEDED, EngineBusy, RequestError
from quire.render.renderer import Media, RenderedPrompt, has_parts, is_conversation
from quire.render.templates.chat_template import ChatOptions
from quire.render.tokens.tokenizer import Tokenizer
from quire.serve.async_renderer import (
    MAX_CHARS_SHORT,
    MAX_VALUES_ON_LOOP,
    size_of,
    size_within,
)
from quire.serve.context import ApiContext
from quire.serve.errors import bad_request, error_in
from quire.serve.media.request_images import Messages, RequestImages
from quire.serve.pipeline.plan import ChatPlan, CompletionPlan

# A prompt that will be cut, or is only counted, may have this many times max_model_len tokens.
MAX_CUT = 16
# Characters of a conversation per token of max_model_len, with tools and all other inputs of the
# template. The template reads all of them, even what it does not show.
MAX_CHARS_PER_TOKEN = 256


@asynccontextmanager
async def images_of(
    api: ApiContext, plan: ChatPlan
) -> AsyncIterator[tuple[ChatPlan, RequestImages | None]]:
    """Read the images of a conversation and hold them while the context is open. Return the plan
    with a digest in place of each image; None for a conversation without parts."""
    messages = plan.body.messages
    if not has_parts(messages):
        yield plan, None
        return
    async with api.images.open(messages, api.takes_images) as images:
        if images.files:
            body = plan.body.model_copy(update={"messages": images.messages})
            plan = dataclasses.replace(plan, body=body, continued=None)
        yield plan, images


async def render_chat(
    api: ApiContext, plan: ChatPlan, images: RequestImages | None, is_counted: bool = False
) -> RenderedPrompt:
    """Return a conversation as tokens. is_counted: it may be longer than what can be answered.
    Raises ApiError, RequestError and EngineBusy."""
    body = plan.body
    is_cut = is_counted or body.truncate_prompt_tokens is not None
    messages: Messages = body.messages
    media: Media = ()
    if images is not None:
        token_limit = api.client.ready.max_model_len * (MAX_CUT if is_cut else 1)
        messages, media = await images.prepared(messages, api.renderer.media, token_limit)
    try:
        prompt = await render_prompt(
            api, messages, plan.options, plan.template, is_cut=is_cut, media=media
        )
        if body.add_special_tokens and prompt.text is not None:
            prompt = await render_prompt(api, prompt.text, is_cut=is_cut, media=media)
    except RequestError as error:
        raise error_in("messages", error) from error
    return prompt


async def render_completion(
    api: ApiContext, plan: CompletionPlan, prompt: object
) -> RenderedPrompt:
    """Return one prompt of a completion as tokens. Raises ApiError and EngineBusy."""
    body = plan.body
    special = body.add_special_tokens is not False
    try:
        is_cut = body.truncate_prompt_tokens is not None
        return await render_prompt(api, prompt, add_special_tokens=special, is_cut=is_cut)
    except EngineBusy:  # no field is to blame
        raise
    except RequestError as error:
        raise bad_request(str(error), "prompt", error.code) from error


async def render_prompt(
    api: ApiContext,
    prompt: object,
    options: ChatOptions | None = None,
    template: str | None = None,
    add_special_tokens: bool = True,
    is_cut: bool = False,
    media: Media = (),
) -> RenderedPrompt:
    """Return the token ids and the text of a prompt.

    options, template: for conversations; the template is a checked one. is_cut: only some of the
    tokens will count, so the prompt may have MAX_CUT times as many. media: the images of the
    prompt, as `Renderer.render` takes them. Raises RequestError, ApiError and EngineBusy.
    """
    max_tokens = api.client.ready.max_model_len
    if options is not None and is_conversation(prompt):
        await _check_size(api, prompt, options)
    return await api.async_renderer.render(
        prompt,
        options,
        template,
        add_special_tokens,
        max_tokens * MAX_CUT if is_cut else max_tokens,
        media,
    )


async def _check_size(api: ApiContext, messages: object, options: ChatOptions) -> None:
    """Refuse a conversation that is far too long with everything that the template gets. Raises
    ApiError."""
    given = [messages, options.tools, options.documents, options.template_kwargs]
    max_chars = MAX_CHARS_PER_TOKEN * api.client.ready.max_model_len
    num_chars = size_within(given, max_chars, MAX_VALUES_ON_LOOP)
    if num_chars is None:
        num_chars = await api.text_threads.run(MAX_CHARS_SHORT, size_of, given, max_chars)
    if num_chars > max_chars:
        raise bad_request(
            "the prompt, with tools, documents and chat_template_kwargs, has more than"
            f" {max_chars} characters, too many for max_model_len ="
            f" {api.client.ready.max_model_len} tokens; shorten it.",
            "messages",
            code=CONTEXT_LENGTH_EXCEEDED,
        )


def tokenizer_of(api: ApiContext) -> Tokenizer:
    """Return the tokenizer. Raise ApiError for a model without one."""
    if api.renderer.tokenizer is None:
        raise bad_request(
            "this model has no tokenizer, so text cannot be converted to or from token ids."
        )
    return api.renderer.tokenizer


async def decode(api: ApiContext, token_ids: list[int]) -> str:
    """Return the text of token ids, in a thread if there are many."""
    return await api.text_threads.run(len(token_ids), tokenizer_of(api).decode, token_ids)
