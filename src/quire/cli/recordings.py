"""What `quire replay`, `explain`, `trace` and `playback` share: the recording that they read, how
they end, and what they say of a recording that is not whole."""

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
    """Make a command that reads a recording, and that `run` carries out."""
    parser.epilog = EPILOG
    parser.set_defaults(run=run)
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="recording: a directory or one segment"
    )


def tell(outcome: "Outcome") -> int:
    """Warn of what a reader must know of the recording; return the exit status."""
    for note in outcome.notes:
        logger.warning("%s", note)
    return DIFFERS if outcome.difference is not None else STATUS[outcome.state]
