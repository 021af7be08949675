"""A listening socket of a process without free file descriptors.

`test_hung_core` tests it with a server.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Iterator

import pytest

from quire.serve.http.http import Listener, report_loop_error


@pytest.fixture
def listener() -> Iterator[Listener]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield Listener(fileno=sock.detach())


def test_failed_accept_ends_the_accept_loop(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio calls accept until it raises BlockingIOError, at most once for each backlog entry."""

    def no_descriptor_left(self: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", no_descriptor_left)
        for _ in range(2):
            with pytest.raises(OSError, match="Too many open files"):
                listener.accept()
            with pytest.raises(BlockingIOError):
                listener.accept()
    with socket.create_connection(listener.getsockname()):
        listener.accept()[0].close()
    listener.close()


def test_failed_accept_is_logged_in_one_line_other_errors_in_full(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.new_event_loop()
    with caplog.at_level(logging.ERROR):
        error = OSError(errno.EMFILE, "Too many open files")
        message = "socket.accept() out of system resource"
        report_loop_error(loop, {"message": message, "exception": error})
        [record] = caplog.records
        assert "no connection can be accepted" in record.message and not record.exc_info
        report_loop_error(loop, {"message": "something else", "exception": ValueError("odd")})
    assert caplog.records[-1].exc_info is not None
    loop.close()
