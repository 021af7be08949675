"""Command line options made from the configuration's dataclasses: name, help, unit, default.

The same table of options tells `--config FILE` which keys there are and what they may hold.
"""

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.base.cache_config import CacheConfig
from quire.base.config import (
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from quire.base.errors import ConfigError
from quire.base.parallel import ParallelConfig
from quire.base.secrets import MASK, Secret
from quire.base.settings import setting
from quire.serve.vllm_compat import SPECULATION_FIELDS, VLLM_SETTINGS
from quire.serve.vllm_flags import FLAGS

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
ALIASES = {"device_memory_utilization": "gpu_memory_utilization"}
SHORT_FLAGS = {"quantization": "-q"} | {  # vLLM's
    name: short for name, theirs in FLAGS.items() if theirs.is_same for short in theirs.short
}
FLAG = "flag"  # where a value came from
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class LogConfig:
    """What the command itself tells."""

    log_level: str = setting("info", "what is told on standard error", choices=LOG_LEVELS)


ENGINE: tuple[tuple[str, type], ...] = (
    ("model", ModelConfig),
    ("cache", CacheConfig),
    ("scheduler", SchedulerConfig),
    ("parallel", ParallelConfig),
    ("engine", EngineConfig),
)
SERVER: tuple[tuple[str, type], ...] = (("server", ServerConfig),)
LOG: tuple[tuple[str, type], ...] = (("log", LogConfig),)


@dataclass(frozen=True)
class Option:
    """A setting as a person may write it. several: any number of values, kept as a tuple.

    is_open: other packages may bring more choices, which are checked with the configuration.
    """

    name: str
    kind: type
    several: bool
    optional: bool
    default: Any
    help: str
    unit: str
    choices: tuple[str, ...]
    is_open: bool
    words: dict[str, int]
    secrecy: type[Secret] | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def shown(self, value: Any) -> Any:
        """Return a value, or several, as it may be shown."""
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
        """Return the value that a text stands for; one of them where there are several.

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
    """A value, and who gave it: `flag`, or a file's name."""

    value: Any
    origin: str


def options_of(groups: tuple[tuple[str, type], ...]) -> dict[str, Option]:
    """Return the options of these dataclasses, by name."""
    found = {}
    for _, config in groups:
        kinds = typing.get_type_hints(config)
        for item in dataclasses.fields(config):
            if "help" in item.metadata:
                found[item.name] = _option(item, kinds[item.name])
    return found


def all_options() -> dict[str, Option]:
    """Return what a configuration file may hold, whatever command reads it."""
    return options_of(ENGINE + SERVER + LOG)


def add_settings(
    parser: argparse.ArgumentParser,
    *more: tuple[str, type],
    model_first: bool = False,
    several_models: bool = False,
) -> None:
    """Add --config, and one option per field in one group per dataclass. None has a default here:
    what is in the parsed arguments was given.

    more: dataclasses beside the engine's. model_first: MODEL may also be given without a flag;
    several_models: or any number of them.
    `quire.cli.config_file.resolve` puts it all together.
    """
    _add_common(parser, model_first, several_models)
    for title, config in (*more, *ENGINE):
        group = parser.add_argument_group(f"{title} settings")
        for option in options_of(((title, config),)).values():
            _add_option(group, option)


def add_some_settings(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    """Add as add_settings does with MODEL first, but only these of the engine's options."""
    _add_common(parser, model_first=True)
    group = parser.add_argument_group("settings, as the engine takes them")
    for name, option in options_of(ENGINE).items():
        if name in names:
            _add_option(group, option)


def add_server_settings(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    """Add these of the server's options, for a command that adds the engine's."""
    group = parser.add_argument_group("server settings")
    for name, option in options_of(SERVER).items():
        if name in names:
            _add_option(group, option)


def _add_common(
    parser: argparse.ArgumentParser, model_first: bool, several_models: bool = False
) -> None:
    """Add MODEL, --config and what is told."""
    parser.set_defaults(has_settings=True)
    if several_models:
        parser.add_argument(
            "given_models", nargs="*", metavar="MODEL", default=argparse.SUPPRESS,
            help="as --model; or NAME=MODEL; several are served side by side",
        )  # fmt: skip
    elif model_first:
        parser.add_argument(
            "given_model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS,
            help="as --model",
        )  # fmt: skip
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS,
        help="YAML with settings: `max-model-len: 4k`; flags win over it",
    )  # fmt: skip
    _add_option(parser, options_of(LOG)["log_level"])


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's settings that were given, as `LLM` and `config_from_flat` take them.
    Raise ConfigError where a file gives several models, and one is needed."""
    settings: dict[str, Given] = arguments.settings
    if "models" in settings:
        raise ConfigError(
            f"{settings['models'].origin} has several models, which are for `quire serve`; name one"
            " of them with --model."
        )
    return _given(arguments, ENGINE)


def given_for_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's settings that were given, for several models perhaps."""
    return _given(arguments, ENGINE)


def given_server_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the server's settings that were given, as `ServerConfig` takes them."""
    return _given(arguments, SERVER)


def check_several(settings: dict[str, Given]) -> None:
    """Raise ConfigError where an option of several values has taken the MODEL that follows it, so
    that no model becomes a key."""
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
                f"{flag} took the model {last!r} for one of its values; give the model first, or as"
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
        known["help"], known["unit"], known["choices"], known["plugins"] is not None,
        known["words"], known["secrecy"],
    )  # fmt: skip


def _plain(kind: Any) -> tuple[Any, bool]:
    """Return X, and whether it may be None, of `X | None`."""
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
    known["metavar"] = None if option.choices else (option.unit or names[option.kind]).upper()
    known["type"] = option.parse
    if option.several:
        group.add_argument(*flags, nargs="+", action="extend", **known)
    elif option.is_open:
        known["metavar"] = f"{{{','.join(option.choices)},...}}"
        group.add_argument(*flags, **known)
    else:
        group.add_argument(*flags, choices=option.choices or None, **known)


def _help(option: Option) -> str:
    text = option.help + (f" [{option.unit}]" if option.unit else "")
    if option.default is None or option.default == ():
        return text
    default = option.default
    if option.kind is bool:
        default = "on" if default else "off"
    return f"{text} (default: {default})"


def add_vllm_settings(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add those of vLLM's flags without a counterpart that are among these words: known, so that
    they are answered, but not in the help. There are hundreds, and argparse is slow with each."""
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


def vllm_flags() -> list[str]:
    """List vLLM's flags without a counterpart."""
    return ["--" + name.replace("_", "-") for name in (*VLLM_SETTINGS, *SPECULATION_FIELDS)]
