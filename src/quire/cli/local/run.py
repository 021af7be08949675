"""`quire run MODEL [PROMPT]`: download a model if needed, serve it if needed, and chat with it.

The server is a process of its own that outlives the chat, so the next `run` starts at once. It
unloads the model after five minutes without requests. Its settings go through a private file, since
other users can read command lines.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.errors import ConfigError, EngineError
from quire.base.settings.config import ServerConfig, config_from_flat
from quire.base.settings.secrets import KEY_VARIABLES
from quire.cli.options.help_parser import Commands
from quire.cli.sampling import add_sampling, given_sampling
from quire.cli.settings import (
    SERVER,
    add_settings,
    given_server_settings,
    given_settings,
)

if TYPE_CHECKING:
    from quire.serve.processes.server_files import RunningServer

DEMO = "demo"
IDLE_UNLOAD_S = 300.0
POLL_S = 0.05
LOG_LINES = 15  # end of the log that is shown if a server does not start


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "run",
        usage="quire run [MODEL] [PROMPT] [option ...]",
        help="chat with a model that is downloaded and served as needed",
        description="Chat with MODEL (by default the demo model), or answer PROMPT. The model is"
        " downloaded and served if it is not yet. The server keeps running; `quire stop` ends it.",
    )
    parser.set_defaults(run=run)
    add_sampling(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument(
        "--image", action="append", default=[], metavar="PATH",
        help="image that is sent with the first message; may be given several times",
    )  # fmt: skip
    parser.add_argument("--plain", action="store_true", help="print answers without Markdown")
    add_settings(parser, *SERVER, model_first=True)
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="one message to answer, instead of a chat"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from quire.cli.chat.conversation import Conversation, Image
    from quire.cli.chat.display import print_notice
    from quire.cli.chat.session import Chat
    from quire.cli.chat_targets import ServerTarget

    images = [Image.read(path) for path in arguments.image]
    settings = {"model": DEMO} | given_settings(arguments)
    extra = given_server_settings(arguments)
    server = running_server(settings["model"])
    given = [name for name in (*settings, *extra) if name != "model"]
    if server is None:
        print_notice(f"[starting a server for {settings['model']}]")
        server = start_server(settings, extra, arguments.log_level)
        print_notice(f"[serving at {server.url}; `quire stop {server.pid}` ends the server]")
    elif given:
        print_notice(
            f"[the server at {server.url} keeps its own settings, without {', '.join(given)};"
            f" `quire stop {server.pid}` ends it]"
        )
    keys = [os.environ.get(name) for name in KEY_VARIABLES]
    key = next((each for each in (*extra.get("api_key", ()), *keys) if each), None)
    name = server.name_of(settings["model"])
    sampling = given_sampling(arguments)
    target = ServerTarget(server.url, key, name, sampling)
    try:
        chat = Chat(
            target,
            Conversation(arguments.system),
            arguments.max_tokens,
            images,
            sampling,
            arguments.plain,
        )
        return chat.run() if arguments.prompt is None else chat.answer_one(arguments.prompt)
    finally:
        target.close()


def running_server(model: str) -> "RunningServer | None":
    """Return a server that has the model and can be reached over TCP."""
    from quire.serve.processes.server_files import running_servers

    for server in running_servers():
        if server.name_of(model) is not None and server.port is not None and server.answers():
            return server
    return None


def start_server(
    settings: Mapping[str, Any], extra: Mapping[str, Any], log_level: str
) -> "RunningServer":
    """Start a server in the background, and return it once it is ready.

    settings: of the engine. extra: of the server. Raises ConfigError and ModelError before the
    start, and EngineError with the end of the log if the server does not start."""
    from quire.cli.chat.display import print_notice
    from quire.cli.model_files import fitting_quantization, quantization_notice
    from quire.engine.start.preflight import check_before_loading
    from quire.models.checkpoint.source import resolve_source
    from quire.serve.processes.server_files import servers_folder

    if extra.get("uds"):
        raise ConfigError("quire run talks to its server over TCP; remove --uds.")
    config = config_from_flat(**settings)
    # The download shows its progress here, and errors come before anything is started.
    source = resolve_source(config.model)
    check_before_loading(config, source)
    if quantization := fitting_quantization(config, source):
        print_notice(quantization_notice(quantization, source))
        settings = dict(settings) | {"quantization": quantization}
    server: dict[str, Any] = {"port": _free_port()} | dict(extra)
    if "idle_unload_s" not in extra and _can_unload(config):
        server["idle_unload_s"] = IDLE_UNLOAD_S
    ServerConfig(**server)  # checks the values
    folder = servers_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=folder) as file:
        values = dict(settings) | server | {"log_level": log_level}
        json.dump(values, file)  # JSON is YAML
        file.flush()
        return _start(file.name, folder / "run.log")


def _start(settings_file: str, log: Path) -> "RunningServer":
    """Start `quire serve` and wait until it is ready or has ended."""
    from quire.serve.processes.server_files import running_servers

    command = [sys.executable, "-m", "quire.cli.main", "serve", "--config", settings_file]
    log.unlink(missing_ok=True)
    with log.open("xb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            for server in running_servers():
                if server.pid == process.pid:
                    return server
            time.sleep(POLL_S)
    except BaseException:  # such as Ctrl-C
        process.terminate()
        process.wait()
        raise
    with contextlib.suppress(OSError):
        lines = log.read_text("utf-8", "replace").strip().splitlines()[-LOG_LINES:]
        raise EngineError(
            f"the server ended with status {process.returncode} before it was ready:\n"
            + "\n".join(lines)
        )
    raise EngineError(f"the server ended with status {process.returncode}.")


def _free_port() -> int:
    """Return the default port if it is free, else 0, for which the server takes a free one."""
    port = ServerConfig().port
    with contextlib.closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((ServerConfig().host, port))
        except OSError:
            return 0
    return port


def _can_unload(config: Any) -> bool:
    """Return whether the model can be unloaded while the server runs."""
    from quire.serve.several.served import ServedModel, check_together

    try:
        check_together([ServedModel(config, ())], ServerConfig(idle_unload_s=IDLE_UNLOAD_S))
    except ConfigError:
        return False
    return True
