"""Common start of all child processes: they die with their parent, and log to its terminal.

python -m quire.engine.wire.child PARENT MODULE ... runs a module as a child of the process PARENT.
It ties the child to its parent before the module's imports, which may take seconds.
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
# Exit status of a process that could not start and has reported why: a restart would fail too.
NO_START = 3
YOUNG_OBJECTS = 50_000  # net new objects before the collector looks for cycles


def main() -> None:
    """Tie this process to its parent, so that it never becomes an orphan. Then run the module."""
    parent_pid = int(sys.argv.pop(1))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(NO_START)  # the parent died before the line above
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


def begin_child(log_level: str, name: str = "") -> None:
    """Set up signals, crash traces and the log of a child; its module calls this first. Ctrl-C is
    ignored, as only the parent handles it. name: process name in log lines."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # SIGABRT shows where a stuck process is
    begin_logging(log_level, name)
    logging.getLogger("quire").setLevel(log_level.upper())
    if log_level != "debug":
        logging.getLogger().setLevel(logging.WARNING)  # other libraries


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Make Python's garbage collections rare within the block, which serves requests.

    Objects loaded before are frozen, so no collection visits them. The outputs of a step with 4,096
    rows are 20,000 objects, which their readers free again. With Python's threshold of 700, each
    step would cause about thirty collections: a third of the time that its messages take.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()  # otherwise they are not freed at exit, where nanobind counts leaks


if __name__ == "__main__":
    main()
