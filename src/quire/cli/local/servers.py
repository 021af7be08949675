"""`quire ps` and `quire stop`: the servers that this user runs on this machine."""

import argparse
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from quire.base.errors import ConfigError, EngineError
from quire.cli.local.models import print_table
from quire.cli.options.help_parser import Commands

if TYPE_CHECKING:
    from quire.serve.processes.server_files import RunningServer

STOP_S = 60.0


def add_command(commands: Commands) -> None:
    shown = commands.add_parser(
        "ps",
        usage="quire ps [--json]",
        help="list the running servers",
        description="List the servers that `quire serve` and `quire run` started for this user.",
    )
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.set_defaults(run=run_ps)
    stopped = commands.add_parser(
        "stop",
        usage="quire stop [MODEL | PORT | PID] [--all]",
        help="stop a running server",
        description="Stop the server of MODEL, at PORT or with the process id PID, after its"
        " requests. Without an argument, stop the only server.",
    )
    stopped.add_argument("server", metavar="SERVER", nargs="?", help="a column of `quire ps`")
    stopped.add_argument("--all", action="store_true", help="stop all servers")
    stopped.set_defaults(run=run_stop)


def run_ps(arguments: argparse.Namespace) -> int:
    """Print the servers."""
    from quire.serve.processes.server_files import running_servers

    servers = running_servers()
    states = ["ready" if each.answers() else "no answer" for each in servers]
    pairs = [*zip(servers, states, strict=True)]
    if arguments.json:
        print(json.dumps([asdict(each) | {"state": state} for each, state in pairs], indent=1))
        return 0
    rows = [
        (",".join(each.models), each.url, str(each.pid), _age(each.started_s), state)
        for each, state in pairs
    ]
    print_table(("MODEL", "ADDRESS", "PID", "RUNNING", "STATE"), rows)
    return 0


def run_stop(arguments: argparse.Namespace) -> int:
    """Stop servers, and wait for their ends."""
    from quire.serve.processes.server_files import stop_server

    for server in _chosen(arguments.server, arguments.all):
        if not stop_server(server, STOP_S):
            raise EngineError(
                f"the server at {server.url} (process {server.pid}) still runs after {STOP_S:.0f}"
                " s, with its last requests. Run the command again to end it at once."
            )
        print(f"stopped {','.join(server.models)} at {server.url}")
    return 0


def _chosen(word: str | None, is_all: bool) -> "list[RunningServer]":
    """Return the servers to stop. Raises ConfigError unless the choice is clear."""
    from quire.serve.processes.server_files import running_servers

    servers = running_servers()
    if is_all and word is None:
        return servers
    found = [each for each in servers if word is None or _is_named(each, word)]
    if len(found) == 1:
        return found
    if is_all:
        raise ConfigError("give a server or --all, not both.")
    known = "; ".join(f"{','.join(each.models)} at {each.url} ({each.pid})" for each in servers)
    problem = "no server runs" if not found else f"{len(found)} servers run"
    named = "" if word is None else f" for {word!r}"
    raise ConfigError(
        f"{problem}{named}; running are: {known or 'none'}. Name one by model, port or process id."
    )


def _is_named(server: "RunningServer", word: str) -> bool:
    return word in (str(server.pid), str(server.port)) or server.name_of(word) is not None


def _age(started_s: float) -> str:
    seconds = max(0, int(time.time() - started_s))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
