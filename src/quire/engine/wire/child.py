"""What an engine's and a server's processes share: they die with their parent, and log to its
terminal.

python -m quire.engine.wire.child PARENT MODULE ...: runs a module as a child of the process PARENT.
It is tied to it here, before the module's imports, which may take seconds.
"""

import ctypes
import faulthandler
import gc
import logging
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from quire.engine.wire.logs import begin_logging

PR_SET_PDEATHSIG = 1
# Exit status of a process that could not start and has said why: starting it anew is no use.
NO_START = 3
YOUNG_OBJECTS = 50_000  # more than were freed since, before the collector looks for cycles


def main() -> None:
    """Tie this process to its parent: no orphan stays behind. Then run the module."""
    parent_pid = int(sys.argv.pop(1))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(NO_START)  # the parent died before the line above
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


def begin_child(log_level: str, name: str = "") -> None:
    """Set up the process; called first by the module. Ctrl-C in the terminal is for the parent
    alone. name: of the process, for its lines in the log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # SIGABRT shows where a stuck process is
    begin_logging(log_level, name)
    logging.getLogger("quire").setLevel(log_level.upper())
    if log_level != "debug":
        logging.getLogger().setLevel(logging.WARNING)  # other libraries


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Keep Python's collector out of the way while requests are served.

    What is loaded now stays, so no collection walks through it. The outputs of a step of 4,096 rows
    are 20,000 objects, which their readers free again: with Python's threshold of 700 each step
    would be searched for cycles some thirty times, a third of the time that its messages take.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()  # otherwise nothing of it is freed at the exit, where nanobind counts


if __name__ == "__main__":
    main()
