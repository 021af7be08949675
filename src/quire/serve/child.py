"""What the processes of a server share: they die with their parent, and log to its terminal.

python -m quire.serve.child PARENT MODULE ...: runs a module as a child of the process PARENT. It is
tied to it here, before the module's imports, which may take seconds.
"""

import ctypes
import faulthandler
import logging
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1
# Exit status of a process that could not start and has said why: starting it anew is no use.
NO_START = 3


def main() -> None:
    """Tie this process to its parent: no orphan stays behind. Then run the module."""
    parent_pid = int(sys.argv.pop(1))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(NO_START)  # the parent died before the line above
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


def begin_child(log_level: str) -> None:
    """Called first by the module. Ctrl-C in the terminal is for the parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # SIGABRT shows where a stuck process is
    logging.basicConfig(level=log_level.upper(), format="%(message)s", stream=sys.stderr)
    logging.getLogger("quire").setLevel(log_level.upper())
    if log_level != "debug":
        logging.getLogger().setLevel(logging.WARNING)  # other libraries


if __name__ == "__main__":
    main()
