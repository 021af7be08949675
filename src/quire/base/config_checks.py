"""Checks of configurations: values, choices, and names that installed packages provide."""

import dataclasses
from typing import Any

from quire.base.durations import duration_rule, is_duration
from quire.base.errors import ConfigError
from quire.base.plugins import PluginKind, all_names, is_installed


def check(ok: bool, name: str, value: object, rule: str) -> None:
    """Raise ConfigError with the rule if a value is not ok."""
    if not ok:
        raise ConfigError(f"{name} must be {rule}, got {value!r}.")


def check_duration(name: str, seconds: float, otherwise: str) -> None:
    """Raise ConfigError if a value is not a number of seconds. otherwise: what 0 means."""
    check(is_duration(seconds), name, seconds, duration_rule(otherwise))


def check_installed(kind: PluginKind, names: tuple[str, ...]) -> None:
    """Raise ConfigError for a name that no installed package provides."""
    for name in names:
        if not is_installed(kind, name, ()):
            known = all_names(kind, ()) or "none"
            raise ConfigError(
                f"there is no {kind.noun} {name!r}; installed packages provide: {known}."
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
