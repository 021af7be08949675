"""`quire trace FILE --output trace.json`: convert a recording for ui.perfetto.dev."""

import argparse
from pathlib import Path

from quire.cli.options.help_parser import Commands
from quire.cli.recordings import add_recording, log_outcome


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "trace",
        usage="quire trace FILE --output trace.json",
        help="export a recording for Perfetto",
        description="Write a recording as a Chrome trace with a track per row, a track of steps,"
        " and counters. Open it at https://ui.perfetto.dev, which keeps it in the browser.",
    )
    add_recording(parser, run)
    parser.add_argument(
        "--output", metavar="FILE", type=Path, required=True, help="JSON file to write"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status, which shows an incomplete recording."""
    from quire.tools.replay import Outcome
    from quire.tools.trace import write_trace

    outcome = Outcome()
    num_events = write_trace(arguments.file, arguments.output, outcome)
    print(f"{num_events:,} events in {arguments.output}; open it at https://ui.perfetto.dev")
    return log_outcome(outcome)
