"""`Renderer`: converts a prompt (a text, a conversation or token ids) to token ids.

The thesis calls this step render_prompt (T 4.3.2). The rest of the engine sees tokens only. The
renderer never truncates a prompt; the engine, which knows its limit, rejects long prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quire.base.errors import RequestError
from quire.base.requests.media_items import MediaItem
from quire.base.requests.structured_outputs import FIELD, StructuredOutputsParams
from quire.render.answers.detect import detect_format
from quire.render.answers.format import AnswerFormat
from quire.render.grammars.grammars import Grammars
from quire.render.grammars.structured import grammar_of, no_tokenizer
from quire.render.media.parts import media_kinds
from quire.render.templates.chat_template import ChatOptions, load_template, no_template
from quire.render.templates.template_job import TemplateJob, TemplateRunner
from quire.render.templates.template_worker import InThisProcess
from quire.render.tokens.tokenizer import Tokenizer
from quire.render.tokens.tokenizer_files import has_tokenizer

if TYPE_CHECKING:
    from quire.render.media.media_renderer import MediaRenderer
    from quire.render.media.prepared import PreparedMedia

Prompt = str | Mapping[str, Any] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Media = Sequence["PreparedMedia"]

TOOL_TEMPLATE = "tool_use"
MAX_KEPT_FORMATS = 16


@dataclass(frozen=True)
class RenderedPrompt:
    """The token ids of a prompt, with its text and media."""

    token_ids: list[int]
    text: str | None = None  # the text before tokenization; None for a prompt of token ids
    second: int | None = None  # index of a pair's second text in token_ids; None without a pair
    media: tuple[MediaItem, ...] = ()  # images and videos in order; the text has a mark for each


class Renderer:
    """Renders prompts for one model, and builds the grammars of answers.

    tokenizer: None for a model without one, which takes token ids only.
    template: replaces the model's own templates for every conversation.
    now: clock for templates that run in this process.
    templates: runs templates; by default in this process without limits, for trusted ones only.
    parsers: names of the parsers of tool calls and of reasoning (`detect_format`).
    template_kwargs: default variables of templates; a conversation's variables replace them.
    media: prepares images and videos; None for a model without them."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: str | None = None,
        now: Callable[[], datetime] = datetime.now,
        templates: TemplateRunner | None = None,
        parsers: tuple[str, str] = ("auto", "auto"),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        media: "MediaRenderer | None" = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.media = media
        self.grammars = Grammars()
        self._parsers = parsers
        self._template_kwargs = template_kwargs
        self._formats: dict[str, AnswerFormat] = {}
        self._template = None if template is None else load_template(template)
        self._templates = templates or InThisProcess(now)

    @classmethod
    def from_directory(cls, path: str | Path, template: str | None = None) -> "Renderer":
        """Return the renderer of a model directory, with or without a tokenizer."""
        tokenizer = Tokenizer.from_directory(path) if has_tokenizer(path) else None
        return cls(tokenizer, template)

    def prepare(self) -> None:
        """Start the processes for templates and grammars, and compute the tokenizer's text bound.

        Call this at most once, when such requests are likely."""
        if self.tokenizer is not None:
            self.tokenizer.bound  # noqa: B018  (computes the cached value)
            self.grammars.prepare()
        if self._template is not None or (self.tokenizer and self.tokenizer.chat_templates):
            self._templates.prepare()

    def answer_format(self, template: str | None = None, with_tools: bool = False) -> AnswerFormat:
        """Return the format of answers for a template, chosen as in `render`.

        Raises RequestError if there is no template."""
        source = self._source(template, with_tools)
        found = self._formats.get(source)
        if found is None:
            if len(self._formats) == MAX_KEPT_FORMATS:
                self._formats.clear()
            found = self._formats[source] = detect_format(source, self.tokenizer, *self._parsers)
        return found

    def grammar_of(
        self, structure: StructuredOutputsParams, *, strict: bool = False, field: str = FIELD
    ) -> str:
        """Return the unchecked grammar of an answer that consists of this content only.

        Raises RequestError, also for a model without a tokenizer."""
        return grammar_of(structure, self.added_ids(field), strict=strict, field=field)

    def added_ids(self, field: str) -> dict[str, int]:
        """Return the tokenizer's added tokens, from text to id.

        Raises RequestError with this field for a model without a tokenizer."""
        if self.tokenizer is None:
            raise no_tokenizer(field)
        return self.tokenizer.added_ids

    @property
    def has_template(self) -> bool:
        """Whether the renderer has a template for conversations that bring none."""
        own = None if self.tokenizer is None else self.tokenizer.chat_template
        return self._template is not None or own is not None

    def render_prompt(
        self, prompt: object, options: ChatOptions | None = None, template: str | None = None
    ) -> list[int]:
        """Return the token ids of a prompt; see `render`."""
        return self.render(prompt, options, template).token_ids

    def render(
        self,
        prompt: object,
        options: ChatOptions | None = None,
        template: str | None = None,
        add_special_tokens: bool = True,
        media: Media = (),
    ) -> RenderedPrompt:
        """Return the token ids and the text of a prompt. Raises RequestError for an invalid prompt.

        prompt: a text, a list of messages, a list of token ids, {"prompt": text} or
        {"prompt_token_ids": ids}.
        options, template: only for conversations.
        add_special_tokens: only for texts; a chat template writes the special tokens itself.
        media: images and videos in the prompt's order. Messages have a part for each
        (`parts.take_media`); texts and token ids have a mark (`Placeholders.mark`)."""
        if isinstance(prompt, str):
            return self._render_text(prompt, add_special_tokens, media)
        if isinstance(prompt, Mapping):
            return self._render_mapping(prompt, add_special_tokens, media)
        if is_conversation(prompt):
            text = self.chat_text(prompt, options, template)
            return self._render_text(text, add_special_tokens=False, media=media)
        if isinstance(prompt, Sequence):
            return self._render_ids(prompt, media)
        raise RequestError(
            "a prompt must be a text, a list of messages or token ids,"
            f" got {type(prompt).__name__}."
        )

    def chat_text(
        self, messages: object, options: ChatOptions | None = None, template: str | None = None
    ) -> str:
        """Return a conversation as text.

        template: a template's text or the name of one of the model's templates."""
        return self._templates.render(self._job(messages, options, template))

    async def chat_text_async(
        self, messages: object, options: ChatOptions | None = None, template: str | None = None
    ) -> str:
        """Do the same as `chat_text` without blocking the event loop."""
        return await self._templates.render_async(self._job(messages, options, template))

    def _job(
        self, messages: object, options: ChatOptions | None, template: str | None
    ) -> TemplateJob:
        self._check_media_parts(messages)
        options = options or ChatOptions()
        if self._template_kwargs:
            variables = {**self._template_kwargs, **options.template_kwargs}
            options = replace(options, template_kwargs=variables)
        source = self._source(template, bool(options.tools))
        named = {} if self.tokenizer is None else self.tokenizer.named_tokens
        return TemplateJob(source, named, messages, options, source == template)

    def _check_media_parts(self, messages: object) -> None:
        """Raise RequestError for media that the model does not take, and for marks in texts."""
        if self.media is None and not has_parts(messages):
            return
        if self.media is not None:
            self.media.placeholders.check_texts(messages)
            for kind in media_kinds(messages):
                self.media.placeholders.mark(kind)
        elif media_kinds(messages):
            raise no_media()

    def _render_mapping(
        self, prompt: Mapping[Any, Any], special: bool, media: Media
    ) -> RenderedPrompt:
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if prompt.get("multi_modal_data"):
            raise RequestError(
                "multi_modal_data is taken by generate and stream only; remove it.",
                "multi_modal_data",
            )
        if token_ids is not None:
            known = text if isinstance(text, str) else None
            return replace(self._render_ids(token_ids, media), text=known)
        if not isinstance(text, str):
            raise RequestError('a prompt object needs "prompt" (text) or "prompt_token_ids".')
        return self._render_text(text, special, media)

    def _render_ids(self, values: object, media: Media) -> RenderedPrompt:
        """Return token ids with media placed. Without media, placeholder tokens are ordinary."""
        token_ids = _checked_ids(values)
        if not media:
            return RenderedPrompt(token_ids)
        placeholders = self._needed_media().placeholders
        token_ids, items = placeholders.place(*placeholders.expand_ids(token_ids, media))
        return RenderedPrompt(token_ids, media=items)

    def _needed_media(self) -> "MediaRenderer":
        if self.media is None:
            raise no_media()
        return self.media

    def _render_text(
        self, text: str, add_special_tokens: bool, media: Media = ()
    ) -> RenderedPrompt:
        if self.tokenizer is None:
            raise RequestError(
                "this model has no tokenizer, so prompts must be token ids: a list of integers, or"
                " prompt_token_ids in Python."
            )
        expanded: str = text
        ordered: Media = ()
        if media or self.media is not None:
            expanded, ordered = self._needed_media().placeholders.expand(text, media)
        token_ids = self.tokenizer.encode(expanded, add_special_tokens)
        if not token_ids:
            raise RequestError("the prompt is empty: it gives no tokens.", "prompt")
        if not ordered:
            return RenderedPrompt(token_ids, text)
        token_ids, items = self._needed_media().placeholders.place(token_ids, ordered)
        return RenderedPrompt(token_ids, text, media=items)

    def _source(self, given: str | None, with_tools: bool) -> str:
        """Return the template to use: the request's, the configured one, or one of the model's."""
        named = {} if self.tokenizer is None else self.tokenizer.chat_templates
        if given is not None:
            return named.get(given) or load_template(given)
        if self._template is not None:
            return self._template
        if with_tools and TOOL_TEMPLATE in named:
            return named[TOOL_TEMPLATE]
        own = None if self.tokenizer is None else self.tokenizer.chat_template
        if own is None:
            raise no_template(named)
        return own


def no_media() -> RequestError:
    """Return the error for images in a prompt of a model without an image processor."""
    return RequestError("this model does not accept images; send text only.")


def is_conversation(prompt: object) -> bool:
    """Return whether a prompt is a list of messages."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return False
    return bool(prompt) and isinstance(prompt[0], Mapping)


def has_parts(messages: object) -> bool:
    """Return whether the content of a message is a list of parts."""
    return isinstance(messages, Sequence) and any(
        isinstance(each, Mapping) and isinstance(each.get("content"), list | tuple)
        for each in messages
    )


def _checked_ids(values: object) -> list[int]:
    """Return a list of token ids after a check of types; the engine checks the vocabulary."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)) or not values:
        raise RequestError(
            "prompt_token_ids must be a non-empty list of integers.", "prompt_token_ids"
        )
    if set(map(type, values)) == {int} and min(values) >= 0:  # the usual case, in C
        return list(values)
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            message = f"prompt_token_ids must hold integers from 0 on, got {value!r}."
            raise RequestError(message, "prompt_token_ids")
    return list(values)
