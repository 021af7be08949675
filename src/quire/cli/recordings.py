"""The common part of `quire replay`, `explain`, `trace` and `playback`: the recording argument, the
exit status, and warnings about an incomplete recording."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.recording.frames import State

if TYPE_CHECKING:
    from quire.tools.replay import Outcome

logger = logging.getLogger("quire")

DIFFERS = 1
STATUS = {State.WHOLE: 0, State.DAMAGED: 3, State.CUT: 4}
EPILOG = (
    f"Exit status: 0 done, {DIFFERS} a plan differs or an error, 2 wrong usage,"
    f" {STATUS[State.DAMAGED]} damaged recording, {STATUS[State.CUT]} truncated or unfinished"
    " recording. The reliable part of such a recording is used."
)


def add_recording(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]
) -> None:
    """Set up a command that reads a recording; `run` executes it."""
    parser.epilog = EPILOG
    parser.set_defaults(run=run)
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="recording: a directory or one segment"
    )


def log_outcome(outcome: "Outcome") -> int:
    """Log the notes on a recording, and return the exit status."""
    for note in outcome.notes:
        logger.warning("%s", note)
    return DIFFERS if outcome.difference is not None else STATUS[outcome.state]
