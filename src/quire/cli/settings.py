"""Command line options made from the configuration's dataclasses: name, help, unit, default."""

import argparse
import dataclasses
import types
import typing
from typing import Any

from quire.base.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from quire.base.errors import ConfigError

GROUPS = (
    ("model", ModelConfig),
    ("cache", CacheConfig),
    ("scheduler", SchedulerConfig),
    ("engine", EngineConfig),
)
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One option per field, in one group per dataclass."""
    for title, config in GROUPS:
        group = parser.add_argument_group(f"{title} settings")
        kinds = typing.get_type_hints(config)
        for item in dataclasses.fields(config):
            if "help" in item.metadata:
                _add_option(group, item, kinds[item.name])


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options' values by setting, as `LLM` and `config_from_flat` take them."""
    names = {i.name for _, config in GROUPS for i in dataclasses.fields(config) if i.metadata}
    return {name: value for name, value in vars(arguments).items() if name in names}


def human_integer(text: str) -> int:
    """`4096`, `4k` (thousand), `4K` (1,024), `2.5G`. Raises ArgumentTypeError."""
    number, factor = text, 1
    if text and text[-1] in SUFFIXES:
        number, factor = text[:-1], SUFFIXES[text[-1]]
    try:
        value = float(number) * factor
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number such as 4096, 4k or 2G"
        ) from error
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def _add_option(group: argparse._ArgumentGroup, item: "dataclasses.Field[Any]", kind: Any) -> None:
    flag = "--" + item.name.replace("_", "-")
    unit = item.metadata["unit"]
    text = item.metadata["help"].replace("%", "%%") + (f" [{unit}]" if unit else "")
    if item.default is not None:
        text += " (default: %(default)s)"
    kind = _plain(kind)
    if kind is bool:
        group.add_argument(
            flag, action=argparse.BooleanOptionalAction, default=item.default, help=text
        )
        return
    group.add_argument(
        flag,
        type=human_integer if kind is int else kind,
        default=item.default,
        choices=item.metadata["choices"] or None,
        metavar=None if item.metadata["choices"] else (unit or kind.__name__).upper(),
        help=text,
    )


def _plain(kind: Any) -> Any:
    """X of `X | None`."""
    if isinstance(kind, types.UnionType):
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        if len(kinds) != 1:
            raise ConfigError(f"a setting of type {kind} has no command line option.")
        return kinds[0]
    return kind
