"""Which row of the table a model's answers follow: by name, or told from its chat template."""

from collections.abc import Collection, Iterable, Sequence
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
from quire.render.answers.syntax import CallFormat, ReasoningFormat
from quire.render.answers.table import CALLS, HERMES, REASONING

AUTO, NONE = "auto", "none"

Format = TypeVar("Format", CallFormat, ReasoningFormat)


def call_format(name: str, template: str, tokens: Collection[str]) -> CallFormat | None:
    """Return the format of calls of this name; `auto`: as the template shows. tokens: the added
    ones, which decide where the template speaks of tools, but shows no format; else it is the
    most usual one."""
    if name != AUTO:
        return _named(name, CALLS, TOOL_FORMATS, CallFormat)
    return _shown(template, CALLS) or _shown("\n".join(tokens), CALLS) or HERMES


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Return the format of reasoning of this name; `auto`: as the template shows."""
    if name != AUTO:
        return _named(name, REASONING, REASONING_FORMATS, ReasoningFormat)
    return _shown(template, REASONING)


def check_names(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise ConfigError if there is no format of such a name. No plug-in is imported."""
    for name, rows, kind in (
        (tool_call_parser, CALLS, TOOL_FORMATS),
        (reasoning_parser, REASONING, REASONING_FORMATS),
    ):
        ours = _names(rows)
        if name not in ours and not is_installed(kind, name, ours):
            message = f"there is no {kind.noun} {name!r}; there are {all_names(kind, ours)}."
            raise ConfigError(message)


def _shown(text: str, rows: Sequence[Format]) -> Format | None:
    """Return the first row of whose groups of marks the text has a whole one."""
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
