"""`quire explain FILE [REQUEST]`: what happened to a request, in plain words."""

import argparse
import json
import logging

from quire.base.errors import RequestError
from quire.cli.options.help_parser import Commands
from quire.cli.recordings import add_recording, log_outcome

logger = logging.getLogger("quire")


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "explain",
        usage="quire explain FILE [REQUEST] [--json]",
        help="explain what happened to a request of a recording",
        description="Show the timeline of REQUEST in a recording: its wait and the requests before"
        " it, its prefix hit, chunks and preemptions. Without REQUEST, print one line for each.",
    )
    add_recording(parser, run)
    parser.add_argument(
        "request", metavar="REQUEST", nargs="?", help="id of the request, as in its response"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, as `GET /v1/requests/{id}` returns it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status, which shows an incomplete recording."""
    from quire.engine.observability.timeline import as_data, in_words
    from quire.engine.recording.files import read_recording
    from quire.tools.explain import timelines_of

    timelines, outcome = timelines_of(read_recording(arguments.file))
    status = log_outcome(outcome)
    if arguments.request is None:
        for line in [*timelines.ended.values(), *timelines.open.values()]:
            print(f"{line.request_id}: {'; '.join(in_words(line, timelines.block_size))}")
        return status
    found = timelines.find(arguments.request)
    if not found:
        problem = (
            f"there is no request {arguments.request!r} in {arguments.file}; run `quire explain"
            f" {arguments.file}` to list its requests."
        )
        if status == 0:
            raise RequestError(problem)
        logger.error("%s It may be in the unreadable part.", problem)
        return status
    if arguments.json:
        print(json.dumps([as_data(line, timelines.block_size) for line in found], indent=1))
        return status
    for line in found:
        print(f"request {line.request_id}")
        for text in in_words(line, timelines.block_size):
            print(f"  {text}")
    return status
