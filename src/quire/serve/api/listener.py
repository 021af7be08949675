"""The listening socket of an API process that has run out of file descriptors.

asyncio stops accepting for a second then, but before that it tries as often as the backlog is long,
and writes a traceback to the log each time.
"""

import asyncio
import errno
import logging
import socket
from typing import Any

from quire.engine.wire.wire import NO_RESOURCES

logger = logging.getLogger("quire")


class Listener(socket.socket):
    """Fails once when no connection can be accepted; the next call says that none is there, which
    ends asyncio's round. Who wants to connect waits until descriptors are free."""

    _has_failed = False

    def accept(self) -> tuple[socket.socket, Any]:
        if self._has_failed:
            self._has_failed = False
            raise BlockingIOError(errno.EAGAIN, "no connection can be accepted now")
        try:
            return super().accept()
        except OSError as error:
            self._has_failed = error.errno in NO_RESOURCES
            raise


def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle an exception of a loop: one line for what a `Listener` says, which is once a second;
    the usual report for all else."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in NO_RESOURCES:
        reason = error.strerror
        logger.error(
            "no connection can be accepted (%s); the server tries again every second. Raise the"
            " limit of open files (ulimit -n), or connect fewer clients.",
            reason,
        )
        return
    loop.default_exception_handler(context)
