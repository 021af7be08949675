"""`quire bench KIND`: measures an engine or a running server."""

import argparse
from typing import Any

from quire.cli.options.help_parser import Commands
from quire.cli.settings import add_settings, given_settings
from quire.tools.bench.arguments import (
    add_agents_arguments,
    add_calibrate_arguments,
    add_latency_arguments,
    add_serve_arguments,
    add_throughput_arguments,
)

THROUGHPUT = """Run all requests at once through an engine in this process. Print the tokens per
second, and the limits of the machine's arithmetic and memory. The output has the form of `vllm
bench throughput`."""
LATENCY = """Run one batch of requests at a time through an engine in this process. Print how long a
batch takes. The output has the form of `vllm bench latency`."""
SERVE = """Send requests to a running server with OpenAI's API and print their latencies. The output
has the form of `vllm bench serve`. The server's `usage` counts the tokens."""

AGENTS = """Play sessions of coding agents against a running server: turns that resend a growing
context, pauses, subagents. Print the share of reusable tokens that was reused, and how much longer
jobs take than alone."""
CALIBRATE = """Run an engine in this process on steps of all kinds and fit the time of each part of
a step. `quire simulate --fit` reads the output file."""

USUAL = (
    "base_url", "model", "dataset_name", "dataset_path", "num_prompts", "random_input_len",
    "random_output_len", "request_rate", "max_concurrency", "save_result", "output_json", "rounds",
    "seconds", "batch_size", "num_iters", "input_len", "output_len", "shape", "trace",
    "num_sessions", "scale", "speed",
)  # fmt: skip


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        usage="quire bench KIND [option ...]",
        help="measure the throughput of an engine or the latency of a server",
        description="Measure speed. `quire bench KIND --help` explains a kind of benchmark.",
    )
    kinds = parser.add_subparsers(
        required=True,
        prog="quire bench",
        metavar="KIND (throughput, latency, serve, agents, calibrate)",
        title="kinds",
    )
    _add(kinds, "throughput", "throughput of an engine in this process", THROUGHPUT, run_engine)
    _add(kinds, "latency", "time of a batch in an engine in this process", LATENCY, run_engine)
    _add(kinds, "serve", "latency and throughput of a running server", SERVE, run_serve)
    _add(kinds, "agents", "sessions of coding agents on a running server", AGENTS, run_serve)
    _add(kinds, "calibrate", "times of steps, for `quire simulate`", CALIBRATE, run_engine)


def _add(
    kinds: Commands,
    name: str,
    text: str,
    description: str,
    run: Any,
) -> None:
    parser = kinds.add_parser(
        name,
        usage=f"quire bench {name} [option ...]",
        help=text,
        description=description,
    )
    parser.set_defaults(run=run, kind=name)
    parser.show_usually(*USUAL)
    if name == "throughput":
        add_throughput_arguments(parser)
        add_settings(parser)
    elif name == "latency":
        add_latency_arguments(parser)
        add_settings(parser)
    elif name == "calibrate":
        add_calibrate_arguments(parser)
        add_settings(parser, model_first=True)
    elif name == "agents":
        add_agents_arguments(parser)
    else:
        add_serve_arguments(parser)


def run_engine(arguments: argparse.Namespace) -> int:
    """Run a benchmark of an engine in this process; return the exit status."""
    from quire.tools.bench import calibrate, latency, throughput

    kinds = {"throughput": throughput, "latency": latency, "calibrate": calibrate}
    status: int = kinds[arguments.kind].run(arguments, given_settings(arguments))
    return status


def run_serve(arguments: argparse.Namespace) -> int:
    """Run a benchmark of a server; return the exit status."""
    from quire.tools.bench import agents, serve

    kind = agents if arguments.kind == "agents" else serve
    status: int = kind.run(arguments)
    return status
