"""`quire bench throughput|serve|calibrate`: speed of an engine in this process, or of a server."""

import argparse
from typing import Any

from quire.cli.options.help_parser import Commands
from quire.cli.settings import add_settings, given_settings
from quire.tools.bench.arguments import (
    add_calibrate_arguments,
    add_serve_arguments,
    add_throughput_arguments,
)

THROUGHPUT = """Run requests through an engine in this process, all at once, and show the tokens per
second beside what the machine's arithmetic and memory allow. Prints and writes what `vllm bench
throughput` does."""
SERVE = """Send requests to a running server with OpenAI's API and show how long they take. Prints
and writes what `vllm bench serve` does; tokens are counted by the server's `usage`."""

CALIBRATE = """Run an engine in this process on steps of all kinds and find how long each part of
a step takes. `quire simulate --fit` reads what it writes."""


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        usage="quire bench KIND [option ...]",
        help="measure throughput or a server",
        description="Measure speed. `quire bench KIND --help` explains a kind.",
    )
    kinds = parser.add_subparsers(
        required=True,
        prog="quire bench",
        metavar="KIND (throughput, serve, calibrate)",
        title="kinds",
    )
    _add(kinds, "throughput", "an engine in this process", THROUGHPUT, run_throughput)
    _add(kinds, "serve", "a running server", SERVE, run_serve)
    _add(kinds, "calibrate", "how long steps take, for simulate", CALIBRATE, run_calibrate)


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
    parser.set_defaults(run=run)
    if name == "throughput":
        add_throughput_arguments(parser)
        add_settings(parser)
    elif name == "calibrate":
        add_calibrate_arguments(parser)
        add_settings(parser, model_first=True)
    else:
        add_serve_arguments(parser)


def run_throughput(arguments: argparse.Namespace) -> int:
    """Returns the exit status."""
    from quire.tools.bench import throughput

    return throughput.run(arguments, given_settings(arguments))


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Returns the exit status."""
    from quire.tools.bench import calibrate

    return calibrate.run(arguments, given_settings(arguments))


def run_serve(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 1 if no request was answered."""
    from quire.tools.bench import serve

    return serve.run(arguments)
