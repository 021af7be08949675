"""`quire batch IN OUT`: the requests of a file, answered into another one."""

import argparse
from pathlib import Path
from typing import Any

from quire.base.config import ServerConfig, config_from_flat
from quire.base.errors import ConfigError
from quire.cli.options.help_parser import Commands, HelpParser
from quire.cli.settings import (
    add_server_settings,
    add_settings,
    given_server_settings,
    given_settings,
)

# Of the server's settings those that change answers.
SETTINGS = (
    "served_model_name", "max_body_bytes", "response_role", "strict_fields",
    "trust_request_chat_template", "hooks", "hook_timeout",
)  # fmt: skip
NAMES = ("batch", "run-batch")  # the second one is vLLM's
USAGE = """\
quire batch IN OUT [-m MODEL] [option ...]
       quire run-batch -i IN -o OUT [--model MODEL] [option ...]  (vLLM's spelling of the same)"""
EPILOG = """\
Exit status: 0 when every line has its answer or its error, 1 when it could not go on, 130 when it
was stopped."""
DESCRIPTION = """\
Answer the requests of IN, one on each line, as OpenAI's batches have them:

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

OUT gets a line for each: {"id", "custom_id", "response": {"status_code", "request_id", "body"},
"error"}, in the order in which they are done. A line that fails is written as such, and the others
go on. Lines whose prompts begin alike are run together. OUT says what is done: the same command
goes on where an earlier one was stopped or killed, and does nothing twice. It refuses an OUT that
is of another input or model. Ctrl-C lets open lines end; a second one ends at once.
"""


def add_command(commands: Commands) -> None:
    for name in NAMES:
        known: dict[str, Any] = {}
        if name == NAMES[0]:
            known["help"] = "answer a file of requests into another file"
        parser = commands.add_parser(
            name,
            usage=USAGE,
            description=DESCRIPTION,
            epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **known,
        )
        parser.set_defaults(run=run)
        _add_files(parser)
        add_server_settings(parser, SETTINGS)
        add_settings(parser)


def _add_files(parser: HelpParser) -> None:
    add = parser.add_argument
    add("given_input", nargs="?", metavar="IN", help="the requests, one a line")
    add("given_output", nargs="?", metavar="OUT", help="where the answers go")
    add("-i", "--input-file", metavar="IN", help="as IN")
    add("-o", "--output-file", metavar="OUT", help="as OUT")
    add("-m", dest="model", metavar="TEXT", default=argparse.SUPPRESS, help="as --model")


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status."""
    from quire.serve.batch_run import BatchFiles, BatchRun

    files = BatchFiles(
        _path("IN", arguments.given_input, arguments.input_file),
        _path("OUT", arguments.given_output, arguments.output_file),
    )
    server = ServerConfig(**given_server_settings(arguments))
    return BatchRun(config_from_flat(**given_settings(arguments)), server, files).run()


def _path(name: str, given: str | None, flag: str | None) -> Path:
    if (given is None) == (flag is None):
        raise ConfigError(f"give {name} once: quire batch IN OUT.")
    return Path(given or flag or "")
