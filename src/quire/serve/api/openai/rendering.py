"""Prompts to token ids without holding up the event loop, and which model a request means."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import CONTEXT_LENGTH_EXCEEDED
from quire.base.requests.validation import gives_no_text
from quire.render.renderer import Media, RenderedPrompt, is_conversation
from quire.render.templates.chat_template import ChatOptions
from quire.render.templates.turns import behind_an_answer, text_behind
from quire.render.tokens.tokenizer import Tokenizer
from quire.serve.api.bodies.logprobs_json import TokenNames
from quire.serve.api.bodies.validation_errors import shown
from quire.serve.api.context import ApiContext
from quire.serve.api.errors import ApiError, bad_request
from quire.serve.async_renderer import size_of
from quire.serve.lanes import MAX_CHARS_ON_LOOP, MAX_CHARS_SHORT

# Where a prompt is cut or only counted, so many times max_model_len are tokenised.
MAX_CUT = 16
# What a chat template gets beside what it shows may be so long: it has to be gone through.
MAX_CHARS_PER_TOKEN = 256


async def render_prompt(
    context: ApiContext,
    prompt: object,
    options: ChatOptions | None = None,
    template: str | None = None,
    add_special_tokens: bool = True,
    is_cut: bool = False,
    media: Media = (),
) -> RenderedPrompt:
    """Token ids and text of a prompt. Raises RequestError or ApiError.

    What certainly has more tokens than the model takes is refused before it is tokenised; the
    length in tokens is judged by `client.check`. is_cut: only some of the tokens count, so that a
    prompt may have MAX_CUT times as many. template: see `checked_template`. media: the images of
    the prompt, as `Renderer.render` takes them.
    """
    most = context.client.ready.max_model_len
    own = checked_template(context, template)
    if options is not None and is_conversation(prompt):
        await _check_size(context, prompt, options)
    return await context.async_renderer.render(
        prompt, options, own, add_special_tokens, most * MAX_CUT if is_cut else most, media
    )


async def _check_size(context: ApiContext, messages: object, options: ChatOptions) -> None:
    """Refuse a conversation that is far too long with all that the template gets. Raises
    ApiError."""
    given = [messages, options.tools, options.documents, options.template_kwargs]
    if size_of(given, MAX_CHARS_ON_LOOP) <= MAX_CHARS_ON_LOOP:
        return
    most = MAX_CHARS_PER_TOKEN * context.client.ready.max_model_len
    if await context.lanes.run(MAX_CHARS_SHORT, size_of, given, most) > most:
        raise bad_request(
            "the prompt, with tools, documents and chat_template_kwargs, has more than"
            f" {most} characters, too many for max_model_len ="
            f" {context.client.ready.max_model_len} tokens; shorten it.",
            "messages",
            code=CONTEXT_LENGTH_EXCEEDED,
        )


def checked_template(context: ApiContext, template: str | None) -> str | None:
    """Check a request's own template: a name of one of the model's, or a text where that is
    allowed.

    Never the name of a file, which a setting may be. Raises ApiError.
    """
    if template is None:
        return None
    tokenizer = context.renderer.tokenizer
    if tokenizer is not None and template in tokenizer.chat_templates:
        return template
    if not context.config.trust_request_chat_template:
        raise bad_request(
            "chat_template: templates from requests are disabled on this server; remove the field,"
            " or start the server with --trust-request-chat-template.",
            "chat_template",
        )
    if not any(char in template for char in "{}\n"):
        raise bad_request(
            f"chat_template must be the text of a template, got {shown(template)}.",
            "chat_template",
        )
    return template


def check_model(context: ApiContext, name: str | None) -> str:
    """Return the name to show in the answer. None, and an empty one, is the served model; ApiError
    404."""
    if not name:
        return context.model_names[0]
    if name in context.model_names:
        return name
    known = ", ".join(context.all_names)
    raise ApiError(
        404,
        f"there is no model {shown(name)} here; this server has: {known}.",
        param="model",
        code="model_not_found",
    )


def check_generates(context: ApiContext) -> None:
    """Raise RequestError for an engine that pools."""
    if context.client.ready.pooling is not None:
        raise gives_no_text()


def tokenizer_of(context: ApiContext) -> Tokenizer:
    """Return the tokenizer. Raise ApiError for a model without one."""
    if context.renderer.tokenizer is None:
        raise bad_request(
            "this model has no tokenizer, so text cannot be converted to or from token ids."
        )
    return context.renderer.tokenizer


def token_names(context: ApiContext, as_ids: bool | None) -> TokenNames:
    """Return how tokens are shown; as_ids: what a request says of it, or nothing."""
    shows_ids = context.config.return_tokens_as_token_ids if as_ids is None else as_ids
    return TokenNames(context.renderer.tokenizer, shows_ids)


async def decode(context: ApiContext, token_ids: list[int]) -> str:
    """Return the text of token ids, in a thread if there are many."""
    return await context.lanes.run(len(token_ids), tokenizer_of(context).decode, token_ids)


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
