"""`quire launch AGENT`: a coding agent that uses a model of quire.

It finds or starts a server, shows what it changes in the agent's settings, changes it after a
confirmation, and starts the agent. `--undo` takes the settings back.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from quire.base.errors import ConfigError
from quire.base.settings.secrets import KEY_VARIABLES
from quire.cli.launch.agents import AGENTS, Agent, Target
from quire.cli.launch.settings_files import change, revert
from quire.cli.options.help_parser import Commands

MIN_CONTEXT = 16_384  # tokens; the agents' own instructions take about half of them


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "launch",
        usage="quire launch AGENT [--model MODEL] [--url URL] [--yes] [-- ARGUMENT ...]",
        help="start a coding agent that uses a model of quire",
        description="Set a coding agent's address, key and model to a server of quire, and start"
        " the agent. The change is shown first; --undo takes it back. A server is started if none"
        f" has the model. The key of a server is read from {' or '.join(KEY_VARIABLES)}.",
    )
    parser.add_argument("agent", metavar="AGENT", help=", ".join(AGENTS))
    parser.add_argument("--model", metavar="MODEL", help="model; by default a running server's")
    parser.add_argument(
        "--url", metavar="URL", help="address of a server, such as http://host:8000"
    )
    parser.add_argument("--undo", action="store_true", help="take the agent's settings back")
    parser.add_argument("--yes", action="store_true", help="change the settings without a question")
    parser.add_argument(
        "--dry-run", action="store_true", help="show the change, and neither make it nor start"
    )
    parser.add_argument(
        "--no-start", action="store_true", help="change the settings without starting the agent"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command, and return the exit status, which is the agent's if it was started."""
    if (agent := AGENTS.get(arguments.agent)) is None:
        raise ConfigError(
            f"there is no agent {arguments.agent!r}; there are {', '.join(AGENTS)}. `quire serve"
            " MODEL` serves a model."
        )
    if arguments.undo:
        return _undo(agent)
    target = _target(arguments.model, arguments.url, arguments.dry_run)
    planned = change(agent.settings(target), agent.name)
    if not planned.is_done:
        print(planned.shown())
    if arguments.dry_run:
        return 0
    if not planned.is_done:
        if not (arguments.yes or _agrees()):
            print("nothing was changed")
            return 1
        planned.write(agent.name)
        print(f"changed {planned.settings.path}; `quire launch {agent.name} --undo` takes it back")
    return 0 if arguments.no_start else _start(agent, target, arguments.rest)


def _undo(agent: Agent) -> int:
    path = revert(agent.name)
    print("nothing to take back" if path is None else f"took back the change of {path}")
    return 0


def _target(model: str | None, url: str | None, is_dry: bool) -> Target:
    """Find the server and its model; start a server if none has the model."""
    from quire.cli.local.run import running_server, start_server
    from quire.serve.processes.server_files import running_servers

    key = next((found for name in KEY_VARIABLES if (found := os.environ.get(name))), None)
    if url is None:
        reachable = [each for each in running_servers() if each.port is not None and each.answers()]
        server = reachable[-1] if model is None and reachable else running_server(model or "demo")
        if server is None and is_dry:
            raise ConfigError(f"no server has {model or 'a model'}; start one, or leave --dry-run.")
        if server is None:
            print(f"[starting a server for {model or 'demo'}]", file=sys.stderr)
            server = start_server({"model": model or "demo"}, {}, "info")
        url, model = server.url, server.name_of(model) if model else next(iter(server.models))
    cards = _cards(url.rstrip("/").removesuffix("/v1"), key)
    name = model or next(iter(cards), None)
    if name not in cards:
        raise ConfigError(f"{url} has no model {name!r}; it has {', '.join(cards) or 'none'}.")
    num_context = cards[name].get("max_model_len")
    if isinstance(num_context, int) and num_context < MIN_CONTEXT:
        print(
            f"[{name} has a context of {num_context:,} tokens; coding agents need {MIN_CONTEXT:,}"
            " or more]",
            file=sys.stderr,
        )
    return Target(url.rstrip("/").removesuffix("/v1"), name, key, num_context)


def _cards(url: str, key: str | None) -> dict[str, dict[str, Any]]:
    """Return the server's models by name. Raises HttpError."""
    from quire.tools.http_client import HttpClient

    async def read() -> Any:
        client = HttpClient(url, {"Authorization": f"Bearer {key}"} if key else {})
        try:
            return (await client.request("/v1/models")).json()
        finally:
            await client.close()

    try:
        return {card["id"]: card for card in asyncio.run(read())["data"]}
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{url} has no list of models; is it a server of quire?") from error


def _agrees() -> bool:
    """Return the user's answer. Raises ConfigError if there is no terminal for the question."""
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask for a confirmation; add --yes or --dry-run.")
    return input("Make this change? [y/N] ").strip().lower() in ("y", "yes")


def _start(agent: Agent, target: Target, arguments: Sequence[str]) -> int:
    """Start the agent and return its exit status."""
    start = agent.start(target)
    command = [agent.program, *start.arguments, *arguments]
    if (program := shutil.which(agent.program)) is None:
        print(f"{agent.name} is not installed; install it with: {agent.install}")
        print(f"then start it: {' '.join(command)}")
        return 0
    variables = {**os.environ, **start.variables}
    for name in start.unset:
        if variables.pop(name, None):
            print(f"[the agent starts without {name}]", file=sys.stderr)
    return subprocess.run([program, *command[1:]], env=variables, check=False).returncode
