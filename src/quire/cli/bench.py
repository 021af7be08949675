"""`quire bench throughput|serve`: speed of an engine in this process, or of a server."""

import argparse
from typing import Any

from quire.cli.settings import add_settings, given_settings
from quire.tools.bench.arguments import add_serve_arguments, add_throughput_arguments

THROUGHPUT = """Run requests through an engine in this process, all at once, and show the tokens per
second beside what the machine's arithmetic and memory allow. Prints and writes what `vllm bench
throughput` does."""
SERVE = """Send requests to a running server with OpenAI's API and show how long they take. Prints
and writes what `vllm bench serve` does; tokens are counted by the server's `usage`."""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "bench",
        usage="quire bench KIND [option ...]",
        help="measure throughput or a server",
        description="Measure speed. `quire bench KIND --help` explains a kind.",
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(
        required=True, prog="quire bench", metavar="KIND (throughput, serve)", title="kinds"
    )
    _add(kinds, "throughput", "an engine in this process", THROUGHPUT, run_throughput)
    _add(kinds, "serve", "a running server", SERVE, run_serve)


def _add(
    kinds: "argparse._SubParsersAction[argparse.ArgumentParser]",
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
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    if name == "throughput":
        add_throughput_arguments(parser)
        add_settings(parser)
    else:
        add_serve_arguments(parser)


def run_throughput(arguments: argparse.Namespace) -> int:
    """Returns the exit status."""
    from quire.tools.bench import throughput

    return throughput.run(arguments, given_settings(arguments))


def run_serve(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 1 if no request was answered."""
    from quire.tools.bench import serve

    return serve.run(arguments)
