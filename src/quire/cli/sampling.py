"""The sampling options of the commands that run a model."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.base.errors import ConfigError
from quire.cli.options.help_parser import HelpParser
from quire.tools.bench.arguments import SAMPLERS

if TYPE_CHECKING:
    from quire.base.requests.sampling_params import SamplingParams

# Option -> type and help. The names are SamplingParams' field names.
SAMPLING: dict[str, tuple[type, str]] = SAMPLERS | {
    "max_tokens": (int, "maximum number of output tokens; by default the rest of the context"),
    "min_tokens": (int, "minimum number of output tokens"),
}


def add_sampling(parser: HelpParser) -> None:
    group = parser.add_argument_group("sampling (defaults: the model's)")
    for name, (kind, text) in SAMPLING.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="text that ends the output; repeatable"
    )
    group.add_argument("--ignore-eos", action="store_true", help="continue after end of sequence")
    group.add_argument(
        "--sampling-seed", type=int, metavar="INT", help="seed that makes the output repeatable"
    )
    parser.show_usually("temperature", "max_tokens")


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given options by field of SamplingParams, which is also the HTTP API's field."""
    fields = {name: getattr(arguments, name) for name in SAMPLING}
    fields |= {"stop": arguments.stop, "seed": arguments.sampling_seed}
    fields |= {"ignore_eos": arguments.ignore_eos or None}
    return {name: value for name, value in fields.items() if value is not None}


def sampling_params(arguments: argparse.Namespace, defaults: "SamplingParams") -> "SamplingParams":
    """Return the model's defaults, overridden by the given options. Raises RequestError."""
    return params_of(given_sampling(arguments), defaults)


def params_of(given: Mapping[str, Any], defaults: "SamplingParams") -> "SamplingParams":
    """Return the model's defaults, overridden by these fields. Raises RequestError."""
    fields = {name: getattr(defaults, name) for name in SAMPLING} | {"max_tokens": None}
    return type(defaults)(**(fields | dict(given)))


def parse_sampling(name: str, text: str) -> Any:
    """Return the value of a field's text; None for `default`. Raises ConfigError."""
    kinds = {key: kind for key, (kind, _) in SAMPLING.items()} | {"seed": int, "stop": str}
    if name not in kinds:
        raise ConfigError(f"there is no sampling option {name!r}; there are {', '.join(kinds)}.")
    if text == "default":
        return None
    try:
        value = kinds[name](text)
    except ValueError:
        value = ""
    if value == "":
        kind = {int: "a whole number", float: "a number", str: "a text"}[kinds[name]]
        raise ConfigError(f"{name} must be {kind}, or `default`, got {text!r}.")
    return [value] if name == "stop" else value
