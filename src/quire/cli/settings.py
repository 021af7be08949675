"""Command line options made from the configuration's dataclasses: name, help, unit, default.

`--config FILE` takes the same options as keys, with the same values.
"""

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.base.settings.cache_config import CacheConfig
from quire.base.settings.config import (
    JSON_SETTINGS,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from quire.base.settings.fields import setting
from quire.base.settings.lora import LoraConfig
from quire.base.settings.parallel import ParallelConfig
from quire.base.settings.secrets import MASK, Secret
from quire.cli.options.groups import GROUPS
from quire.cli.options.help_parser import HelpParser
from quire.engine.wire.logs import FORMATS
from quire.serve.vllm_compat import SPECULATION_FIELDS, VLLM_SETTINGS
from quire.serve.vllm_flags import FLAGS

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
ALIASES = {"device_memory_utilization": "gpu_memory_utilization"}
SHORT_FLAGS = {"quantization": "-q"} | {  # vLLM's
    name: short for name, theirs in FLAGS.items() if theirs.is_same for short in theirs.short
}
FLAG = "flag"  # origin of a value from the command line
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class LogConfig:
    """The log on standard error."""

    log_level: str = setting("info", "least severe messages in the log", choices=LOG_LEVELS)
    log_format: str = setting(
        "text",
        "form of log lines; `json` writes one object per line, for log collectors",
        choices=FORMATS,
    )


ENGINE: tuple[tuple[str, type], ...] = (
    ("model", ModelConfig),
    ("cache", CacheConfig),
    ("scheduler", SchedulerConfig),
    ("parallel", ParallelConfig),
    ("lora", LoraConfig),
    ("engine", EngineConfig),
)
SERVER: tuple[tuple[str, type], ...] = (("server", ServerConfig),)
LOG: tuple[tuple[str, type], ...] = (("log", LogConfig),)


@dataclass(frozen=True)
class Option:
    """A setting as an option of the command line and of files."""

    name: str
    kind: type
    several: bool  # whether it takes any number of values, stored as a tuple
    optional: bool
    default: Any
    help: str
    unit: str
    choices: tuple[str, ...]
    aliases: tuple[str, ...]  # choices that the help does not list
    is_open: bool  # whether plug-ins may add choices, which the configuration checks
    words: dict[str, int]
    secrecy: type[Secret] | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def shown_choices(self) -> list[str]:
        """The choices that the help lists."""
        return [choice for choice in self.choices if choice not in self.aliases]

    @property
    def shown_default(self) -> str | None:
        """The default, as the help and the settings page show it; None if it is derived."""
        if self.default is None or self.default in ((), ""):
            return None
        if self.kind is bool:
            return "on" if self.default else "off"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def shown(self, value: Any) -> Any:
        """Return one value or several with secrets masked."""
        kind = self.secrecy
        if kind is None or value is None:
            return value
        if isinstance(value, str):
            return kind(value)
        if kind is Secret or not isinstance(value, tuple | list):
            return f"{len(value)} given" if isinstance(value, tuple | list) else MASK
        return tuple(kind(each) if isinstance(each, str) else MASK for each in value)

    def exposed(self, value: Any) -> bool:
        """Return whether a value holds a secret that a command line would show to others."""
        if self.secrecy is None:
            return False
        kind, values = self.secrecy, value if isinstance(value, tuple) else (value,)
        texts = [kind(each) for each in values if isinstance(each, str)]
        return any(each.has_secret for each in texts)

    def parse(self, text: str) -> Any:
        """Return the value of a text; for an option of several values, one of them.

        Raises ArgumentTypeError.
        """
        if text in self.words:
            return self.words[text]
        if self.kind is int:
            return human_integer(text)
        if self.kind is float:
            return _number(text)
        return text


@dataclass(frozen=True)
class Given:
    """A value and its origin: FLAG, or the name of a file."""

    value: Any
    origin: str


def options_of(groups: tuple[tuple[str, type], ...]) -> dict[str, Option]:
    """Return the options of dataclasses, by name."""
    found = {}
    for _, config in groups:
        kinds = typing.get_type_hints(config)
        for item in dataclasses.fields(config):
            if "help" in item.metadata:
                found[item.name] = _option(item, kinds[item.name])
    return found


def all_options() -> dict[str, Option]:
    """Return all options that a configuration file may hold, for any command."""
    return options_of(ENGINE + SERVER + LOG)


def add_settings(
    parser: HelpParser,
    *more: tuple[str, type],
    model_first: bool = False,
    several_models: bool = False,
) -> None:
    """Add --config and one option per engine setting, in the groups of the help.

    The options have no defaults, so parsed arguments contain only given values.
    `quire.cli.config_file.resolve` merges flags and file.

    more: dataclasses in addition to the engine's. model_first: whether MODEL may be given without a
    flag. several_models: whether several may be.
    """
    _add_common(parser, model_first, several_models)
    _add_groups(parser, options_of((*more, *ENGINE)))


def add_some_settings(parser: HelpParser, names: Collection[str]) -> None:
    """Add some of the engine's settings, and MODEL without a flag."""
    _add_common(parser, model_first=True)
    _add_groups(parser, {n: o for n, o in options_of(ENGINE).items() if n in names})


def add_server_settings(parser: HelpParser, names: Collection[str]) -> None:
    """Add some of the server's settings, for a command that also adds the engine's."""
    _add_groups(parser, {n: o for n, o in options_of(SERVER).items() if n in names})


def _add_common(parser: HelpParser, model_first: bool, several_models: bool = False) -> None:
    """Add MODEL, --config and the settings of the log."""
    parser.set_defaults(has_settings=True)
    if several_models:
        parser.add_argument(
            "given_models", nargs="*", metavar="MODEL", default=argparse.SUPPRESS,
            help="model to serve, as for --model; give several as MODEL or NAME=MODEL",
        )  # fmt: skip
    elif model_first:
        parser.add_argument(
            "given_model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS,
            help="model, as for --model (default: demo)",
        )  # fmt: skip
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS,
        help="YAML file with settings, such as `max-model-len: 4k`; flags override it",
    )  # fmt: skip
    _add_groups(parser, options_of(LOG))


def _add_groups(parser: HelpParser, options: Mapping[str, Option]) -> None:
    for group in GROUPS:
        for name in group.settings:
            if name in options:
                _add_option(parser.settings_group(group.name), options[name])


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given engine settings, as `LLM` and `config_from_flat` take them.

    Raises ConfigError if a file lists several models."""
    settings: dict[str, Given] = arguments.settings
    if "models" in settings:
        raise ConfigError(
            f"{settings['models'].origin} has several models, which only `quire serve` takes; name"
            " one of them with --model."
        )
    return _given(arguments, ENGINE)


def given_for_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given engine settings, also if there are several models."""
    return _given(arguments, ENGINE)


def given_server_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given server settings, as `ServerConfig` takes them."""
    return _given(arguments, SERVER)


def check_several(settings: dict[str, Given]) -> None:
    """Raise ConfigError if an option with several values has absorbed the MODEL after it.

    Otherwise a model's name could become an API key."""
    if "model" in settings or "models" in settings:
        return
    texts = (n for n, o in options_of(ENGINE + SERVER).items() if o.several and o.kind is str)
    for name in texts:
        given = settings.get(name)
        if given is None or given.origin != FLAG or not given.value:
            continue
        last = given.value[-1]
        is_id = len(given.value) > 1 and HUB_ID.fullmatch(last)
        if last.startswith("shape:") or is_id or Path(last, "config.json").is_file():
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} took the model {last!r} as one of its values; give the model first, or as"
                " --model."
            )


def _given(arguments: argparse.Namespace, groups: tuple[tuple[str, type], ...]) -> dict[str, Any]:
    settings: dict[str, Given] = arguments.settings
    return {name: settings[name].value for name in options_of(groups) if name in settings}


def human_integer(text: str) -> int:
    """Parse `4096`, `4k` (thousand), `4K` (1,024), `2.5G`. Raises ArgumentTypeError."""
    number, factor = text, 1
    if text and text[-1] in SUFFIXES:
        number, factor = text[:-1], SUFFIXES[text[-1]]
    try:
        value = float(number) * factor
        whole = int(value)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number such as 4096, 4k or 2G"
        ) from error
    if value != whole:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return whole


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 0.9") from error


def _option(item: "dataclasses.Field[Any]", hint: Any) -> Option:
    kind, optional = _plain(hint)
    several = typing.get_origin(kind) is tuple
    if several:
        kind = typing.get_args(kind)[0]
    if kind not in (int, float, bool, str):
        raise ConfigError(f"a setting of type {hint} has no command line option.")
    known = item.metadata
    return Option(
        item.name, kind, several, optional, item.default,
        known["help"], known["unit"], known["choices"], known["aliases"],
        known["plugins"] is not None,
        known["words"], known["secrecy"],
    )  # fmt: skip


def _plain(kind: Any) -> tuple[Any, bool]:
    """Return the X of `X | None`, and whether None is allowed."""
    if isinstance(kind, types.UnionType):
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        return (kinds[0], True) if len(kinds) == 1 else (kind, True)
    return kind, False


def _add_option(group: argparse._ActionsContainer, option: Option) -> None:
    known: dict[str, Any] = {
        "dest": option.name,
        "default": argparse.SUPPRESS,
        "help": _help(option).replace("%", "%%"),
    }
    same = [alias for alias, name in ALIASES.items() if name == option.name]
    short = [SHORT_FLAGS[option.name]] if option.name in SHORT_FLAGS else []
    flags = [*short, option.flag, *("--" + alias.replace("_", "-") for alias in same)]
    if option.kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **known)
        return
    names = {int: "NUMBER", float: "NUMBER", str: "TEXT"}
    is_json = option.name in JSON_SETTINGS
    known["metavar"] = "JSON" if is_json else (option.unit or names[option.kind]).upper()
    known["type"] = option.parse
    if option.choices:
        more = ["..."] if option.is_open else []
        known["metavar"] = f"{{{','.join([*option.shown_choices, *more])}}}"
    if option.several:
        group.add_argument(*flags, nargs="+", action="extend", **known)
    else:
        choices = None if option.is_open else option.choices or None
        group.add_argument(*flags, choices=choices, **known)


def _help(option: Option) -> str:
    text = option.help + (f" [{option.unit}]" if option.unit else "")
    default = option.shown_default
    return text if default is None else f"{text} (default: {default})"


def add_vllm_settings(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add those flags of vLLM without counterpart that occur in the words, hidden from the help.

    Their values are then checked. Adding all flags would be slow."""
    given = {word.split("=")[0] for word in words}
    for name in (*VLLM_SETTINGS, *SPECULATION_FIELDS):
        theirs = FLAGS[name]
        flag = "--" + name.replace("_", "-")
        spellings = {flag, f"--no-{flag[2:]}", *theirs.short}
        joined = any(word[:2] in theirs.short for word in words)  # -O3
        if not (joined or spellings & given):
            continue
        known: dict[str, Any] = {
            "dest": name,
            "default": argparse.SUPPRESS,
            "help": argparse.SUPPRESS,
        }
        if theirs.is_switch:
            known["action"] = argparse.BooleanOptionalAction
        elif theirs.several:
            known |= {"nargs": "+", "action": "extend"}
        parser.add_argument(flag, *theirs.short, **known)


def vllm_spellings() -> list[str]:
    """Return the spellings of vLLM's flags without counterpart."""
    names = (*VLLM_SETTINGS, *SPECULATION_FIELDS)
    flags = ["--" + name.replace("_", "-") for name in names]
    return flags + [short for name in names for short in FLAGS[name].short]
