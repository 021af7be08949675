"""`--config FILE`: settings in YAML, and the origin of each setting.

    model: demo
    max-model-len: 4k          # a flag's name, with - or _
    served-model-name: [a, b]
    enable-prefix-caching: false
    models: [a, {model: b, name: [c, d], max-model-len: 2k}]     # of `quire serve`

A file may hold settings of all commands; each command reads its own. Flags override the file, and
the file overrides defaults.
"""

import argparse
import difflib
import math
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.base.settings.secrets import KEY_VARIABLES
from quire.cli.options.synonyms import SYNONYMS
from quire.cli.served_models import ModelEntry, entry_of, join_models
from quire.cli.settings import (
    ALIASES,
    ENGINE,
    FLAG,
    Given,
    Option,
    all_options,
    options_of,
)
from quire.engine.wire.logs import choose_format
from quire.serve.vllm_compat import (
    SPECULATION,
    SPECULATION_FIELDS,
    VLLM_SETTINGS,
    ignore_vllm_setting,
    speculation_of,
)

THEIRS = VLLM_SETTINGS.keys() | SPECULATION_FIELDS.keys()
MODELS, NAMES = "models", ("name", "names", "served-model-name", "served_model_name")
KINDS = {
    int: "a whole number such as 4096 or 4k",
    float: "a number such as 0.9",
    bool: "true or false",
    str: "a string (in quotes if it looks like a number)",
}


def resolve(arguments: argparse.Namespace) -> list[str]:
    """Set `arguments.settings` and `arguments.log_level`, and choose the format of the log.

    Settings are stored by name, each with its origin. Return notes to log as warnings. Raises
    ConfigError.
    """
    flags = vars(arguments)
    has_settings = flags.pop("has_settings", False)
    settings: dict[str, Given] = {}
    if has_settings:
        _take_model(flags)
        words = flags.pop("given_models", [])
        known = all_options()
        if "config" in flags:
            settings |= read_config_file(Path(flags.pop("config")))
        for name in [name for name in flags if name in known or name in THEIRS]:
            value = flags.pop(name)
            settings[name] = Given(tuple(value) if isinstance(value, list) else value, FLAG)
        join_models(settings, words)
    notes = [
        _ignored(name, settings.pop(name)) for name in [n for n in settings if n in VLLM_SETTINGS]
    ]
    notes += _exposed(settings)
    _join_speculation(settings)
    arguments.settings = settings
    if has_settings or "log_level" not in flags:
        given = settings.get("log_level")
        arguments.log_level = "info" if given is None else given.value
    kind = settings.get("log_format")
    choose_format(None if kind is None else kind.value)
    return notes


def describe(settings: dict[str, Given]) -> list[str]:
    """Return a line for each given setting: value and origin. Secrets are masked."""
    options = all_options()
    shown = {n: options[n].shown(g.value) if n in options else g.value for n, g in settings.items()}
    return [f"{name} = {shown[name]} ({given.origin})" for name, given in sorted(settings.items())]


def _exposed(settings: dict[str, Given]) -> list[str]:
    """Return a warning for each secret on the command line, which other local users can read."""
    options = all_options()
    return [
        f"{options[name].flag} holds a secret, which all users of this machine can read on the"
        " command line; put it into a private file for --config"
        + (f", or set {KEY_VARIABLES[0]}." if name == "api_key" else ".")
        for name, given in settings.items()
        if given.origin == FLAG and name in options and options[name].exposed(given.value)
    ]


def read_config_file(path: Path) -> dict[str, Given]:
    """Read the settings of a file. Raises ConfigError, naming the file, the key and the value."""
    options = all_options()
    settings: dict[str, Given] = {}
    for key, value in read_yaml(path).items():
        if key == MODELS:
            settings[MODELS] = Given(_entries(path, value), str(path))
            continue
        name = _name_of(path, key, options)
        if name in settings:
            raise ConfigError(
                f"{path}: {name} is set twice, the second time as {key!r}; remove one."
            )
        checked = value if name in THEIRS else _checked(path, key, value, options[name])
        settings[name] = Given(checked, str(path))
    return settings


def read_yaml(path: Path) -> dict[Any, Any]:
    """Read a file of keys and values. Raises ConfigError, naming the file."""
    import yaml  # type: ignore[import-untyped]  # imported only if needed

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_problem(error)}.") from None
    if not isinstance(content, dict | None):
        raise ConfigError(
            f"{path} must hold lines such as `max-model-len: 4k`, got a {type(content).__name__}."
        )
    return content or {}


def _problem(error: Exception) -> str:
    """Return the error and its place, without the file's text, which may contain secrets."""
    problem = getattr(error, "problem", None) or type(error).__name__
    mark = getattr(error, "problem_mark", None)
    return (
        problem if mark is None else f"{problem} (line {mark.line + 1}, column {mark.column + 1})"
    )


def _take_model(flags: dict[str, Any]) -> None:
    """Merge MODEL and --model. Raises ConfigError if they differ."""
    if "given_model" not in flags:
        return
    first = flags.pop("given_model")
    if flags.setdefault("model", first) != first:
        raise ConfigError(
            f"there are two models, {first!r} and --model {flags['model']!r}; give one of them."
        )


def _join_speculation(settings: dict[str, Given]) -> None:
    """Merge vLLM's flags for single fields into one setting. Raises ConfigError."""
    parts = {name: settings.pop(name) for name in SPECULATION_FIELDS if name in settings}
    if parts:
        values = {name: given.value for name, given in parts.items()}
        origin = next(iter(parts.values())).origin
        settings[SPECULATION] = Given(speculation_of(values, settings.get(SPECULATION)), origin)


def _ignored(name: str, given: Given) -> str:
    """Return the note on a setting of vLLM that has no effect. Raises ConfigError if it would have
    one."""
    return f"{name} ({given.origin}) is ignored: {ignore_vllm_setting(name, given.value)}."


def _entries(path: Path, value: object) -> tuple[ModelEntry, ...]:
    """Return the models of a list. Each is a text, or engine settings with `model` and `name`."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{path}: models must be a list of models, got {value!r}.")
    return tuple(_entry(path, item) for item in value)


def _entry(path: Path, item: object) -> ModelEntry:
    if isinstance(item, str):
        return entry_of(item)
    if not isinstance(item, dict):
        raise ConfigError(f"{path}: an entry of models must be a string or settings, got {item!r}.")
    options = options_of(ENGINE)
    names, settings = list[str](), dict[str, Any]()
    for key, value in item.items():
        if key in NAMES:
            names += value if isinstance(value, list) else [value]
            continue
        name = _name_of(path, key, options)
        if name not in options:
            raise ConfigError(
                f"{path}: {key} is a setting of vLLM; remove it from the entry of models."
            )
        settings[name] = _checked(path, f"{key} of an entry of models", value, options[name])
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: names of an entry of models must be strings, got {names!r}.")
    model = settings.pop("model", None)
    if model is None:
        raise ConfigError(f"{path}: an entry of models lacks `model`; add it.")
    return ModelEntry(model, tuple(names), settings)


def _name_of(path: Path, key: object, options: dict[str, Option]) -> str:
    name = str(key).replace("-", "_")
    name = ALIASES.get(name, name)
    if name in options or name in THEIRS:
        return name
    theirs = SYNONYMS.get("--" + name.replace("_", "-"))
    close = difflib.get_close_matches(name, options, n=1)
    hint = f" Did you mean {close[0].replace('_', '-')}?" if close else ""
    if theirs is not None and theirs.meaning.becomes:
        hint = f" Did you mean {theirs.meaning.becomes[0][2:]}?"
    raise ConfigError(
        f"{path}: there is no setting {key!r}.{hint} `quire serve --help all` lists the settings."
    )


def _checked(path: Path, key: str, value: Any, option: Option) -> Any:
    if option.several:
        values = value if isinstance(value, list) else [value]
        return tuple(_single(path, key, item, option) for item in values)
    if value is None and option.optional:
        return None
    return _single(path, key, value, option)


def _single(path: Path, key: str, value: Any, option: Option) -> Any:
    """Return one value, converted to the type of its setting. Raises ConfigError."""
    rule = KINDS[option.kind]
    choices = () if option.is_open else option.choices
    if choices:
        rule = f"one of {', '.join(option.shown_choices)}"
    elif option.words:
        rule += f" or {', '.join(option.words)}"
    shown = "something else" if option.secrecy is not None else repr(value)
    wrong = ConfigError(f"{path}: {key} must be {rule}, got {shown}.")
    is_text, is_bool = isinstance(value, str), isinstance(value, bool)
    if option.kind is bool or option.kind is str:
        if not isinstance(value, option.kind) or (choices and value not in choices):
            raise wrong
        return value
    if is_text:  # such as 4k or auto
        try:
            return option.parse(value)
        except argparse.ArgumentTypeError as error:
            raise wrong from error
    is_number = isinstance(value, int | float) and not is_bool and math.isfinite(value)
    if not is_number or option.kind(value) != value:
        raise wrong
    return option.kind(value)
