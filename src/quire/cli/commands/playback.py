"""`quire playback FILE --output frames.jsonl.gz`: convert a recording for the page at /."""

import argparse
import math
from pathlib import Path

from quire.base.errors import ConfigError
from quire.cli.options.help_parser import Commands
from quire.cli.recordings import add_recording, log_outcome

EVERY_S = 0.1


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "playback",
        usage="quire playback FILE --output frames.jsonl.gz [--every SECONDS]",
        help="write frames of a recording, for the web page to play",
        description="Replay a recording and write the frames that the web page would have shown:"
        " KV blocks, running and waiting requests. Open the file on the page (Engine, Open a"
        " recording); it stays in the browser.",
    )
    add_recording(parser, run)
    parser.add_argument(
        "--output", metavar="FILE", type=Path, required=True,
        help="file of JSON lines to write; compressed if its name ends in .gz",
    )  # fmt: skip
    parser.add_argument(
        "--every", metavar="SECONDS", type=float, default=EVERY_S,
        help=f"minimum recorded time between two frames; 0 writes each step (default: {EVERY_S})",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status, which shows an incomplete recording."""
    from quire.tools.playback import write_playback
    from quire.tools.replay import Outcome

    if not (math.isfinite(arguments.every) and arguments.every >= 0):
        raise ConfigError(f"--every must be at least 0 seconds, got {arguments.every}.")
    outcome = Outcome()
    num_frames = write_playback(arguments.file, arguments.output, arguments.every, outcome)
    print(
        f"{num_frames:,} frames in {arguments.output}; open it on the page of a quire server"
        " (Engine, Open a recording)"
    )
    return log_outcome(outcome)
