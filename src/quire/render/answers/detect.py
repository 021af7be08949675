"""Select a model's format of calls and of reasoning: by name, or from the chat template."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from quire.base.errors import ConfigError
from quire.base.plugins import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    PluginKind,
    all_names,
    is_installed,
    load_plugin,
)
from quire.render.answers.format import AnswerFormat
from quire.render.answers.syntax import CallFormat, ReasoningFormat
from quire.render.answers.table import CALLS, HERMES, REASONING
from quire.render.tokens.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"

Format = TypeVar("Format", CallFormat, ReasoningFormat)


def call_format(name: str, template: str, tokens: Collection[str]) -> CallFormat | None:
    """Return the call format with this name, or None for `none`.

    `auto` searches the template for marks, then `tokens` (the tokenizer's added tokens), and else
    returns the Hermes format. Raises ConfigError if a plug-in provides no CallFormat."""
    if name != AUTO:
        return _named(name, CALLS, TOOL_FORMATS, CallFormat)
    return _shown(template, CALLS) or _shown("\n".join(tokens), CALLS) or HERMES


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Return the reasoning format with this name; `auto` searches the template for marks."""
    if name != AUTO:
        return _named(name, REASONING, REASONING_FORMATS, ReasoningFormat)
    return _shown(template, REASONING)


def check_names(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise ConfigError if either name belongs to no format. Imports no plug-in."""
    for name, rows, kind in (
        (tool_call_parser, CALLS, TOOL_FORMATS),
        (reasoning_parser, REASONING, REASONING_FORMATS),
    ):
        ours = _names(rows)
        if name not in ours and not is_installed(kind, name, ours):
            message = f"there is no {kind.noun} {name!r}; there are {all_names(kind, ours)}."
            raise ConfigError(message)


def _shown(text: str, rows: Sequence[Format]) -> Format | None:
    """Return the first row with a group of marks that all occur in the text."""
    for row in rows:
        if any(all(mark in text for mark in group) for group in row.marks):
            return row
    return None


def _named(
    name: str, rows: Sequence[Format], kind: PluginKind, row_class: type[Format]
) -> Format | None:
    if name == NONE:
        return None
    for row in rows:
        if name in row.names:
            return row
    made: Any = load_plugin(kind, name, _names(rows))().format()
    if not isinstance(made, row_class):
        raise ConfigError(
            f"the {kind.noun} {name!r} provides a {type(made).__name__}; it must be a"
            f" {row_class.__name__}."
        )
    return made


def _names(rows: Iterable[CallFormat] | Iterable[ReasoningFormat]) -> tuple[str, ...]:
    return (AUTO, NONE, *dict.fromkeys(name for row in rows for name in row.names))


def detect_format(
    template: str | None,
    tokenizer: Tokenizer | None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> AnswerFormat:
    """Return the format of a model's answers, from its chat template or from parser names.

    The names are vLLM's parser names, a plug-in's name, or `none` to read nothing of that kind.
    Raises ConfigError for unknown names."""
    template = template or ""
    tokens = () if tokenizer is None else tokenizer.added_tokens.values()
    found = AnswerFormat(
        call_format(tool_call_parser, template, tokens),
        reasoning_format(reasoning_parser, template),
    )
    if tokenizer is None:
        return found
    return replace(found, shown_special_token_ids=special_token_ids_in(found, tokenizer))


def special_token_ids_in(form: AnswerFormat, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of the special tokens that occur in the format's marks."""
    texts = [text for text in form.marks() if text]
    added = tokenizer.added_tokens
    return tuple(
        token_id
        for token_id in sorted(tokenizer.special_ids)
        if any(added[token_id] in text for text in texts)
    )
