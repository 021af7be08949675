"""`quire pull MODEL`, `quire list` and `quire rm MODEL`: the models on this machine."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from quire.base.errors import ConfigError, ModelError
from quire.cli.options.help_parser import Commands

MODEL_HELP = "Hugging Face id, such as org/repo; for one of its GGUF files org/repo:Q4_K_M"


def add_command(commands: Commands) -> None:
    pull = commands.add_parser(
        "pull",
        usage="quire pull MODEL [--revision TEXT]",
        help="download a model, or update it, and verify its checksums",
        description="Download MODEL, or what has changed since, and verify its checksums. Of a"
        " repository with GGUF files, the best one for this machine is downloaded.",
    )
    pull.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    pull.add_argument("--revision", metavar="TEXT", help="branch, tag or commit")
    pull.set_defaults(run=run_pull)
    shown = commands.add_parser(
        "list",
        usage="quire list [--json]",
        help="list the models on this machine, with Ollama's and LM Studio's",
        description="List the models that can be served without a download.",
    )
    shown.add_argument("--json", action="store_true", help="print JSON, with paths and bytes")
    shown.set_defaults(run=run_list)
    removed = commands.add_parser(
        "rm",
        usage="quire rm MODEL",
        help="remove a downloaded model",
        description="Remove a model, or one GGUF file of it, from the cache of Hugging Face.",
    )
    removed.add_argument("model", metavar="MODEL", help="name, as `quire list` shows it")
    removed.set_defaults(run=run_rm)


def run_pull(arguments: argparse.Namespace) -> int:
    """Download a model, and print where it is."""
    from quire.models.checkpoint.source import resolve_model

    source = resolve_model(arguments.model, arguments.revision, refresh=True)
    print(source.directory)
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    """Print the models with size and origin."""
    from quire.models.library.cache import stored_models
    from quire.models.library.gguf_choice import in_units

    models = stored_models()
    if arguments.json:
        print(json.dumps([asdict(each) | {"path": str(each.path)} for each in models], indent=1))
        return 0
    rows = [(each.name, in_units(each.num_bytes), each.program) for each in models]
    print_table(("NAME", "SIZE", "FROM"), [*rows, ("demo", "", "quire")])
    return 0


def run_rm(arguments: argparse.Namespace) -> int:
    """Remove a model, and print the bytes that this freed."""
    from quire.models.library.cache import remove_model
    from quire.models.library.gguf_choice import in_units
    from quire.serve.processes.server_files import running_servers

    name = arguments.model
    if Path(name).expanduser().exists():
        raise ConfigError(f"{name} is a file or directory of yours, which quire does not remove.")
    for server in running_servers():
        if server.name_of(name) is not None:
            raise ModelError(
                f"{name} is served at {server.url}; run `quire stop {server.pid}` first."
            )
    print(f"removed {name}: {in_units(remove_model(name))} freed")
    return 0


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns as wide as their longest text."""
    table = [head, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
