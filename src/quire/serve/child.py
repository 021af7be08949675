"""What the processes of a server share: they die with their parent, and log to its terminal."""

import ctypes
import faulthandler
import logging
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
# Exit status of a process that could not start and has said why: starting it anew is no use.
NO_START = 3


def begin_child(parent_pid: int, log_level: str) -> None:
    """Called first in a child: no orphan stays behind, and a terminal's Ctrl-C is the parent's."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(NO_START)  # the parent died before the line above
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # SIGABRT shows where a stuck process is
    logging.basicConfig(level=log_level.upper(), format="%(message)s", stream=sys.stderr)
    logging.getLogger("quire").setLevel(log_level.upper())
    if log_level != "debug":
        logging.getLogger().setLevel(logging.WARNING)  # other libraries
