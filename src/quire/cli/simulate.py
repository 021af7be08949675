"""`quire simulate MODEL --device NAME`: a workload served by the production scheduler, on a device
that need not be there."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base.config import config_from_flat
from quire.base.errors import ConfigError
from quire.cli.asked import DEVICE_HELP, find_config, find_device
from quire.cli.options.help_parser import Commands, HelpParser
from quire.cli.settings import ENGINE, add_some_settings, given_settings, options_of
from quire.tools.bench.arguments import (
    MANY_PROMPTS,
    add_count,
    add_dataset_arguments,
    add_result_arguments,
    at_least_zero,
    positive,
)

if TYPE_CHECKING:
    from quire.tools.simulate.handover import Roles

# Of several devices, what is asked here is how many; the rest is about real ones.
OWN = {"device", "tensor_parallel_size", "data_parallel_size"}


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "simulate",
        usage="quire simulate [MODEL] [--device NAME] [option ...]",
        help="serve a trace or a workload on a device that need not be there",
        description="Serve a workload by the production scheduler in virtual time: MODEL on any"
        " device, by a formula of how long steps take or by what was measured. Prints what `quire"
        " bench serve` would, memory, preemptions, prefix hits and what requests waited for.",
        epilog="Nothing is loaded: of MODEL only the config is read. docs/operate/simulate.md says"
        " how far to trust the numbers.",
    )
    parser.set_defaults(run=run)
    _add_device(parser)
    _add_trace(parser)
    add_dataset_arguments(parser, num_prompts=None, input_len=1024, output_len=128)
    group = add_result_arguments(parser)
    group.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the run there")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_some_settings(parser, options_of(ENGINE).keys() - OWN)


def _add_device(parser: HelpParser) -> None:
    group = parser.add_argument_group("device")
    group.add_argument("--device", metavar="NAME", default=argparse.SUPPRESS, help=DEVICE_HELP)
    add_count(
        group, ("--tensor-parallel-size", "-tp"), 1, "devices that share each layer"
    )  # fmt: skip
    add_count(
        group, ("--data-parallel-size", "--replicas", "-dp"), 1,
        "copies of the model, each with a scheduler; requests go where `quire serve` sends them",
    )  # fmt: skip
    add_count(
        group, ("--prefill-replicas",), None,
        "copies that compute prompts and sample the first token; --decode-replicas go on",
    )  # fmt: skip
    add_count(group, ("--decode-replicas",), None, "copies that compute the rest of answers")
    group.add_argument(
        "--link-gb-per-s", type=positive, default=50.0, metavar="GB",
        help="at which a decode replica gets what prefill replicas have computed (default:"
        " %(default)g, which is 400 Gbit/s)",
    )  # fmt: skip
    group.add_argument(
        "--fit", type=Path, metavar="FILE",
        help="step times that were measured: JSON of `quire bench calibrate`, or a recording of"
        " this model (`quire serve --record DIR`); without it they come from the data sheet",
    )  # fmt: skip
    group.add_argument(
        "--host-ms", type=at_least_zero, default=None, metavar="MS",
        help="time between two steps that the device waits for the host, where one plan is in"
        " flight (default: as measured, or none)",
    )  # fmt: skip


def _add_trace(parser: HelpParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="requests of a trace instead of drawn ones: Azure's LLM inference or BurstGPT's CSV,"
        " Mooncake's JSONL, or a recording",
    )  # fmt: skip
    add_count(
        group, ("--trace-piece",), 512, "tokens that a hash id of Mooncake's trace stands for"
    )  # fmt: skip
    group.add_argument(
        "--request-rate", type=positive, metavar="PER_SECOND",
        help="requests per second; stretches or squeezes a trace's times; without it drawn requests"
        " come all at once, and a trace's when they came",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=positive, default=1.0, metavar="SHAPE",
        help="of drawn times: 1 is a Poisson process, less is burstier, more is evener"
        " (default: %(default)s)",
    )  # fmt: skip
    add_count(group, ("--tenants",), 1, "tenants that the drawn requests are of")


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 1 if no request was answered."""
    from quire.tools.simulate.command import Asked, simulate_command

    settings = given_settings(arguments)
    device = find_device(settings.pop("device", "auto"))
    replicas = settings.pop("data_parallel_size", 1)
    if arguments.num_prompts is None and arguments.trace is None:
        arguments.num_prompts = MANY_PROMPTS
    if arguments.plot is not None and arguments.plot.suffix != ".svg":
        raise ConfigError(f"--plot draws SVG; give a name that ends so, not {arguments.plot.name}.")
    config, roles = config_from_flat(**settings), _roles(arguments, replicas)
    num = replicas if roles is None else roles.num_replicas
    asked = Asked(config, find_config(config.model), device, num, roles)
    return simulate_command(arguments, asked)


def _roles(arguments: argparse.Namespace, replicas: int) -> "Roles | None":
    """Return which replicas compute prompts and which answers; None if all do both."""
    from quire.tools.simulate.handover import Roles

    given = arguments.prefill_replicas, arguments.decode_replicas
    if given == (None, None):
        return None
    if None in given or replicas > 1:
        raise ConfigError(
            "give both --prefill-replicas and --decode-replicas, and no --replicas: each replica"
            " has one of the two roles."
        )
    return Roles(*given, arguments.link_gb_per_s * 1e9)
