"""A field of the configuration: its default, and what the command line needs to know about it; and
what one says as JSON."""

import json
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
    words: dict[str, int] | None = None,
    secrecy: type[Secret] | None = None,
    is_path: bool = False,
) -> Any:
    """Return a dataclass field with what the command line needs to know about it.

    plugins: other packages may bring more choices. words: what may be written in place of certain
    numbers. secrecy: the type that masks the value wherever it is shown. is_path: of this machine,
    which metrics do not show.
    """
    known: dict[str, Any] = {"help": help, "unit": unit, "choices": choices, "words": words or {}}
    known |= {"plugins": plugins, "secrecy": secrecy, "is_path": is_path}
    return field(default=default, metadata=known)


def json_object(name: str, given: str | None) -> dict[str, Any]:
    """Return what a setting says as JSON; {} if it says nothing. Raises ConfigError."""
    try:
        value = {} if given is None else json.loads(given)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON ({error}): {given!r}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f'{name} must be a JSON object such as {{"name": 1}}, got {given!r}.')
    return value


def number_of(name: str, value: Any, words: dict[str, int]) -> Any:
    """Return the number that a word stands for."""
    if not isinstance(value, str):
        return value
    if value not in words:
        raise ConfigError(f"{name} must be a number or {' or '.join(words)}, got {value!r}.")
    return words[value]
