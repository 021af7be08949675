"""The sampling options of the commands that run a model."""

import argparse
from typing import TYPE_CHECKING, Any

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
    fields = {name: getattr(defaults, name) for name in SAMPLING} | {"max_tokens": None}
    return type(defaults)(**(fields | given_sampling(arguments)))
