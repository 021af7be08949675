"""Fields of the configuration with their metadata, and settings that hold JSON."""

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from quire.base.errors import ConfigError
from quire.base.plugins import PluginKind
from quire.base.secrets import Secret


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    plugins: PluginKind | None = None,
    words: Mapping[str, Any] | None = None,
    secrecy: type[Secret] | None = None,
    is_path: bool = False,
) -> Any:
    """Return a dataclass field with the metadata that the command line needs.

    help: a noun phrase or an imperative of at most 25 words; the unit and the default are added.
    plugins: the kind of installed packages that add choices. words: names of certain numbers, or
    other names of choices, which the help does not list. secrecy: the type that masks the value
    wherever it is shown. is_path: a path of this machine, which metrics do not show.
    """
    known: dict[str, Any] = {"help": help, "unit": unit, "words": {} if choices else words or {}}
    aliases = tuple(words or ()) if choices else ()
    known |= {"choices": (*choices, *aliases), "aliases": aliases}
    known |= {"plugins": plugins, "secrecy": secrecy, "is_path": is_path}
    return field(default=default, metadata=known)


def json_object(name: str, given: str | None) -> dict[str, Any]:
    """Parse a setting that holds JSON; return {} if it is not set. Raises ConfigError."""
    try:
        value = {} if given is None else json.loads(given)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f'{name} must be a JSON object such as {{"name": 1}}, got {given!r} ({error}).'
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f'{name} must be a JSON object such as {{"name": 1}}, got {given!r}.')
    return value


def number_of(name: str, value: Any, words: dict[str, int]) -> Any:
    """Return the number that a word stands for, such as `auto`. Raises ConfigError."""
    if not isinstance(value, str):
        return value
    if value not in words:
        raise ConfigError(f"{name} must be a number or {' or '.join(words)}, got {value!r}.")
    return words[value]
