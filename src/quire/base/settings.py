"""A field of the configuration: its default, and what the command line needs to know about it."""

from dataclasses import field
from typing import Any

from quire.base.plugins import PluginKind


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    plugins: PluginKind | None = None,
    words: dict[str, int] | None = None,
) -> Any:
    """Return a dataclass field with what the command line needs to know about it.

    plugins: other packages may bring more choices. words: what may be written in place of certain
    numbers.
    """
    known: dict[str, Any] = {"help": help, "unit": unit, "choices": choices, "words": words or {}}
    known["plugins"] = plugins
    return field(default=default, metadata=known)
