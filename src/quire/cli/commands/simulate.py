"""`quire simulate MODEL --device NAME`: run the production scheduler on a workload, for a device
that need not exist here."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base.errors import ConfigError
from quire.base.settings.config import config_from_flat
from quire.cli.model_files import DEVICE_HELP, find_config, find_device
from quire.cli.options.help_parser import Commands, HelpParser
from quire.cli.settings import ENGINE, add_some_settings, given_settings, options_of
from quire.tools.bench.arguments import (
    AGENT_SHAPES,
    MANY_PROMPTS,
    add_count,
    add_dataset_arguments,
    add_result_arguments,
    at_least_zero,
    positive,
    token_scale,
)

if TYPE_CHECKING:
    from quire.tools.simulate.handover import Roles

# Settings that this command defines itself: their meaning differs for simulated devices.
OWN = {"device", "tensor_parallel_size", "data_parallel_size"}

USUAL = (
    "device", "tensor_parallel_size", "data_parallel_size", "fit", "trace", "request_rate",
    "dataset_name", "num_prompts", "random_input_len", "random_output_len", "output_json",
)  # fmt: skip


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "simulate",
        usage="quire simulate [MODEL] [--device NAME] [option ...]",
        help="simulate a workload on a device, without the device",
        description="Run the production scheduler on a workload in virtual time, for MODEL on any"
        " device. A formula or a measurement gives the time of each step. Prints the output of"
        " `quire bench serve`, and memory, preemptions, prefix hits and waiting times.",
        epilog="Nothing is loaded: of MODEL only the config is read. docs/operate/simulate.md says"
        " how far to trust the numbers.",
    )
    parser.set_defaults(run=run)
    parser.show_usually(*USUAL)
    _add_device(parser)
    _add_trace(parser)
    add_dataset_arguments(parser, num_prompts=None, input_len=1024, output_len=128)
    group = add_result_arguments(parser)
    group.add_argument("--plot", type=Path, metavar="FILE.svg", help="file for a chart of the run")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    add_some_settings(parser, options_of(ENGINE).keys() - OWN)


def _add_device(parser: HelpParser) -> None:
    group = parser.add_argument_group("device")
    group.add_argument("--device", metavar="NAME", default=argparse.SUPPRESS, help=DEVICE_HELP)
    add_count(
        group, ("--tensor-parallel-size", "-tp"), 1, "devices that share each layer"
    )  # fmt: skip
    add_count(
        group, ("--data-parallel-size", "--replicas", "-dp"), 1,
        "replicas of the model, each with a scheduler; requests are routed as by `quire serve`",
    )  # fmt: skip
    add_count(
        group, ("--prefill-replicas",), None,
        "replicas that compute prompts and the first token, for --decode-replicas to continue",
    )  # fmt: skip
    add_count(
        group,
        ("--decode-replicas",),
        None,
        "replicas that compute the output after the first token",
    )
    group.add_argument(
        "--link-gb-per-s", type=positive, default=50.0, metavar="GB",
        help="bandwidth from prefill to decode replicas (default: %(default)g, or 400 Gbit/s)",
    )  # fmt: skip
    group.add_argument(
        "--disk-gb-per-s", type=positive, default=3.0, metavar="GB",
        help="bandwidth of the directory of --kv-disk-dir, which is not written (default:"
        " %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--fit", type=Path, metavar="FILE",
        help="measured step times: JSON of `quire bench calibrate`, or a recording of this model;"
        " by default the data sheet of the device",
    )  # fmt: skip
    group.add_argument(
        "--host-ms", type=at_least_zero, default=None, metavar="MS",
        help="time that the device waits for the host between two steps, with one step in flight"
        " (default: as measured, else 0)",
    )  # fmt: skip


def _add_trace(parser: HelpParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="trace to replay instead of random requests: Azure's or BurstGPT's CSV, Mooncake's"
        " JSONL, or a recording",
    )  # fmt: skip
    add_count(
        group, ("--trace-piece",), 512, "tokens per hash id of a Mooncake trace"
    )  # fmt: skip
    group.add_argument(
        "--request-rate", type=positive, metavar="PER_SECOND",
        help="requests per second, to which the times of a trace are scaled; by default random"
        " requests arrive at once, and a trace keeps its times",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=positive, default=1.0, metavar="SHAPE",
        help="shape of random arrivals: 1 is a Poisson process, lower values are burstier"
        " (default: %(default)s)",
    )  # fmt: skip
    add_count(group, ("--tenants",), 1, "number of tenants of the random requests")
    group.add_argument(
        "--agents", choices=AGENT_SHAPES, default=None,
        help="sessions of coding agents with this published shape instead of random requests",
    )  # fmt: skip
    add_count(group, ("--num-sessions",), 20, "sessions of --agents, without their subagents")
    group.add_argument(
        "--scale", type=token_scale, default=1.0, metavar="FACTOR",
        help="factor of all token counts of --agents (default: %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--arrival-s", type=at_least_zero, default=1.0, metavar="SECONDS",
        help="mean time between the starts of two sessions of --agents (default: %(default)g)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status: 1 if no request got an answer."""
    from quire.tools.simulate.command import SimulationInput, simulate_command

    settings = given_settings(arguments)
    device = find_device(settings.pop("device", "auto"))
    replicas = settings.pop("data_parallel_size", 1)
    if arguments.agents is not None:
        _check_agents(arguments)
    if arguments.num_prompts is None and arguments.trace is None:
        arguments.num_prompts = MANY_PROMPTS
    if arguments.plot is not None and arguments.plot.suffix != ".svg":
        raise ConfigError(
            f"--plot must be a file name ending in .svg, got {arguments.plot.name!r}."
        )
    config, roles = config_from_flat(**settings), _roles(arguments, replicas)
    num = replicas if roles is None else roles.num_replicas
    simulation = SimulationInput(config, find_config(config.model), device, num, roles)
    return simulate_command(arguments, simulation)


def _check_agents(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options of other workloads next to --agents."""
    if arguments.trace is not None:
        raise ConfigError("--agents and --trace are two workloads; give one of them.")
    others = {
        "--request-rate": (arguments.request_rate is not None, "--arrival-s"),
        "--num-prompts": (arguments.num_prompts is not None, "--num-sessions"),
        "--tenants": (arguments.tenants > 1, None),
    }
    for name, (is_given, instead) in others.items():
        if is_given:
            advice = "" if instead is None else f", or use {instead}"
            raise ConfigError(
                f"--agents and {name} belong to two workloads; give one of them{advice}."
            )


def _roles(arguments: argparse.Namespace, replicas: int) -> "Roles | None":
    """Return the numbers of prefill and decode replicas; None if all replicas do both."""
    from quire.tools.simulate.handover import Roles

    given = arguments.prefill_replicas, arguments.decode_replicas
    if given == (None, None):
        return None
    if None in given or replicas > 1:
        raise ConfigError(
            "--prefill-replicas and --decode-replicas must be given together, without --replicas:"
            " each replica has one of the two roles."
        )
    return Roles(*given, arguments.link_gb_per_s * 1e9)
