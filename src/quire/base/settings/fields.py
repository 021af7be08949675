"""Fields of settings: their metadata, checks of values and names, and settings that hold JSON."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from quire.base.clock import duration_rule, is_duration
from quire.base.errors import ConfigError
from quire.base.plugins import PluginKind, all_names, is_installed
from quire.base.settings.secrets import Secret


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
    plugins: kind of plug-ins that add choices.
    words: names of special numbers, or aliases of choices, which the help does not list.
    secrecy: type that masks the value wherever it is shown.
    is_path: whether the value is a path on this machine, which metrics must not show.
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


def list_of(name: str, text: str) -> list[str]:
    """Return the items of a JSON list, which vLLM's flags accept, or the text itself. Raises
    ConfigError."""
    if not text.startswith("["):
        return [text]
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{name} must be texts or a JSON list of them, got {text!r} ({error})."
        ) from error
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{name} must be a list of strings, got {text!r}.")
    return value


def number_of(name: str, value: Any, words: dict[str, int]) -> Any:
    """Return the number for a word such as `auto`; other values unchanged. Raises ConfigError."""
    if not isinstance(value, str):
        return value
    if value not in words:
        raise ConfigError(f"{name} must be a number or {' or '.join(words)}, got {value!r}.")
    return words[value]


def check(ok: bool, name: str, value: object, rule: str) -> None:
    """Raise ConfigError with the rule if a value is not ok."""
    if not ok:
        raise ConfigError(f"{name} must be {rule}, got {value!r}.")


def check_duration(name: str, seconds: float, otherwise: str) -> None:
    """Raise ConfigError for an invalid duration. otherwise: the meaning of 0."""
    check(is_duration(seconds), name, seconds, duration_rule(otherwise))


def check_installed(
    kind: PluginKind, names: tuple[str, ...], built_in: tuple[str, ...] = ()
) -> None:
    """Raise ConfigError for a name that is neither built in nor of an installed package."""
    for name in names:
        if name not in built_in and not is_installed(kind, name, built_in):
            known = all_names(kind, built_in) or "none"
            raise ConfigError(
                f"there is no {kind.noun} {name!r}; quire and installed packages provide: {known}."
            )


def check_choices(*configs: Any) -> None:
    """Raise ConfigError for a value that is not a choice of its field."""
    for config in configs:
        for item in dataclasses.fields(config):
            choices = item.metadata.get("choices", ())
            value = getattr(config, item.name)
            if not choices or value in choices or value is None is item.default:
                continue
            kind = item.metadata["plugins"]
            if kind is None or not is_installed(kind, value, choices):
                listed = tuple(c for c in choices if c not in item.metadata["aliases"])
                known = ", ".join(listed) if kind is None else all_names(kind, listed)
                raise ConfigError(f"{item.name} must be one of {known}, got {value!r}.")
