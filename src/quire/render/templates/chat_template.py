"""Chat templates: convert a conversation to the text that the model was trained on (T 4.3.2).

jinja2 is imported when the first template is compiled. Every failure of a template becomes a
RequestError, whether the conversation or the template is at fault.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError, RequestError
from quire.render.templates.conversation import Message, plain_data, prepare_messages, prepare_tools
from quire.render.templates.template_forms import TemplateForms
from quire.spec.config_fields import shown

MAX_CHARS = 1 << 24
CONTENT_FORMATS = ("auto", "string", "openai")
FINAL_MARK = "\u241fcontinue from here\u241f "  # the space shows whether the end is trimmed
OWN_NAMES = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True)
class ChatOptions:
    """Options for rendering a conversation, with the field names of chat completions."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    # `string` joins text parts; `openai` gives the template a list of parts; `auto` tests which of
    # the two the template supports, for each role
    content_format: str = "auto"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables


class ChatTemplate:
    """A compiled template. `variables` are its default variables, such as bos_token."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile the template. Raises RequestError if it is invalid."""
        from jinja2.exceptions import TemplateError

        from quire.render.templates.template_env import template_environment

        self.source = source
        self._variables = dict(variables or {})
        environment = template_environment(now)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise RequestError(f"the chat template cannot be compiled: {error}") from error
        self._forms = TemplateForms(tree, self._probe)

    def render(self, messages: object, options: ChatOptions | None = None) -> str:
        """Return a conversation's text, with the header of the model's turn if requested."""
        options = options or ChatOptions()
        _check_content_format(options.content_format)
        prepared = prepare_messages(messages, self._forms, options.content_format)
        final = _mark_final(prepared, options) if options.continue_final_message else ""
        text = self._run(
            self._variables | _checked_kwargs(options.template_kwargs),
            messages=prepared,
            tools=prepare_tools(options.tools),
            documents=plain_data(options.documents, "documents"),
            add_generation_prompt=options.add_generation_prompt,
        )
        return _cut_final(text, final) if options.continue_final_message else text

    def _probe(self, messages: list[Message], tools: list[Message] | None) -> str:
        """Return the text of a short conversation that tests a property of the template."""
        own = {"messages": messages, "tools": tools, "documents": None}
        return self._run(self._variables, **own, add_generation_prompt=False)

    def _run(self, variables: Mapping[str, Any], **own: Any) -> str:
        from jinja2.exceptions import TemplateError

        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(**{**variables, **own}):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_CHARS:
                    raise RequestError(f"the chat template made more than {MAX_CHARS} characters.")
        except TemplateError as error:
            raise RequestError(f"the chat template refuses this conversation: {error}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(
                f"the chat template fails on this conversation ({type(error).__name__}: {error});"
                " check roles, contents and tools, or give another chat_template."
            ) from error
        except RecursionError as error:
            raise RequestError("the chat template recurses without end.") from error
        return "".join(pieces)


def load_template(value: str) -> str:
    """Return a template's text. The setting is the text itself or the name of a file."""
    if any(char in value for char in "{}\n"):
        return value
    if not _is_file(value):
        raise ConfigError(
            f"chat_template {shown(value)} is neither a file nor the text of a template. Give the"
            " path of a file, or a text with {{ }} or {% %} in it."
        )
    try:
        return Path(value).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template {shown(value)} cannot be read ({error}); give a file of text in UTF-8."
        ) from error


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long for a name, or with a null in it
        return False


def no_template(names: Collection[str]) -> RequestError:
    """Return the error for a model without a default template. names: its other templates."""
    others = f" It has these named templates: {', '.join(names)}." if names else ""
    return RequestError(
        "this model has no chat template. Send a text prompt (/v1/completions; on the command line"
        f" --raw), or give a template as chat_template.{others}"
    )


def _check_content_format(content_format: str) -> None:
    if content_format not in CONTENT_FORMATS:
        raise RequestError(
            f"chat_template_content_format must be one of {', '.join(CONTENT_FORMATS)},"
            f" got {content_format!r}.",
            "chat_template_content_format",
        )


def _checked_kwargs(values: object) -> dict[str, Any]:
    """Return a request's variables without the reserved names. Raises RequestError."""
    if not isinstance(values, Mapping):
        message = f"chat_template_kwargs must be an object, got {type(values).__name__}."
        raise RequestError(message, "chat_template_kwargs")
    plain: dict[str, Any] = plain_data(dict(values), "chat_template_kwargs")
    return {name: value for name, value in plain.items() if name not in OWN_NAMES}


def _mark_final(messages: list[Message], options: ChatOptions) -> str:
    """Append a mark to the last message's text, and return the text without the mark."""
    if options.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: the first"
            " continues the last message, the second begins a new one. Set one of them to false."
        )
    message = messages[-1]
    content = message["content"]
    if not content:
        reason = "continue_final_message needs a last message with text to continue."
        raise RequestError(reason, "continue_final_message")
    if isinstance(content, str):
        message["content"] = content + FINAL_MARK
        return content
    if "text" not in content[-1]:
        reason = "continue_final_message needs a last message that ends with text."
        raise RequestError(reason, "continue_final_message")
    text = str(content[-1]["text"])
    content[-1]["text"] = text + FINAL_MARK
    return text


def _cut_final(text: str, final: str) -> str:
    """Cut a text at the mark; strip white space at its end if the template strips it."""
    at = text.rfind(FINAL_MARK.strip())
    if at < 0 or final.strip() not in text[:at]:
        raise RequestError(
            "continue_final_message does not work with this chat template: it changes or drops the"
            " last message."
        )
    trims = not text.startswith(FINAL_MARK, at)
    return text[:at].rstrip() if trims else text[:at]
