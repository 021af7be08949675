"""`quire batch IN OUT`: runs the requests of a file and writes the responses to another."""

import argparse
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.base.settings.config import ServerConfig, config_from_flat
from quire.cli.options.help_parser import Commands, HelpParser
from quire.cli.settings import (
    add_server_settings,
    add_settings,
    given_server_settings,
    given_settings,
)

# The server's settings that affect responses.
SETTINGS = (
    "served_model_name", "max_body_bytes", "response_role", "strict_fields",
    "trust_request_chat_template", "exclude_tools_when_tool_choice_none", "hooks", "hook_timeout",
)  # fmt: skip
NAMES = ("batch", "run-batch")  # the second one is vLLM's
USAGE = """\
quire batch IN OUT [-m MODEL] [option ...]
       quire run-batch -i IN -o OUT [--model MODEL] [option ...]  (vLLM's spelling of the same)"""
EPILOG = """\
Exit status: 0 every request has a response or an error, 1 the run could not continue, 130 the run
was interrupted."""
DESCRIPTION = """\
Run the requests of IN, one JSON object per line, in the form of OpenAI's batches:

  `{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`.

OUT gets a line per request, in the order in which they finish:

  `{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`.

A failed request gets an error in its line. Requests with a common prefix run together. After an
interruption, the same command resumes, and runs no request twice. It rejects an OUT of another
input or model. Ctrl-C lets running requests finish; a second Ctrl-C stops at once.
"""


def add_command(commands: Commands) -> None:
    for name in NAMES:
        known: dict[str, Any] = {}
        if name == NAMES[0]:
            known["help"] = "run the requests of a file, and write the responses to another"
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
    add("given_input", nargs="?", metavar="IN", help="file of requests, one per line")
    add("given_output", nargs="?", metavar="OUT", help="file for the responses")
    add("-i", "--input-file", metavar="IN", help="same as IN")
    add("-o", "--output-file", metavar="OUT", help="same as OUT")
    add("-m", dest="model", metavar="TEXT", default=argparse.SUPPRESS, help="same as --model")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from quire.serve.batch_run import BatchFiles, BatchRun

    files = BatchFiles(
        _path("IN", arguments.given_input, arguments.input_file),
        _path("OUT", arguments.given_output, arguments.output_file),
    )
    server = ServerConfig(**given_server_settings(arguments))
    return BatchRun(config_from_flat(**given_settings(arguments)), server, files).run()


def _path(name: str, given: str | None, flag: str | None) -> Path:
    if (given is None) == (flag is None):
        raise ConfigError(f"{name} must be given once; run `quire batch IN OUT`.")
    return Path(given or flag or "")
