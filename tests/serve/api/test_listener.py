"""A listening socket without descriptors for connections; `test_hung_core` has it with a server."""

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


def test_one_round_of_accepting_fails_once(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio accepts until BlockingIOError, as often as the backlog is long."""

    def none_left(self: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", none_left)
        for _ in range(2):
            with pytest.raises(OSError, match="Too many open files"):
                listener.accept()
            with pytest.raises(BlockingIOError):
                listener.accept()
    with socket.create_connection(listener.getsockname()):
        listener.accept()[0].close()
    listener.close()


def test_it_is_one_line_of_the_log_and_all_else_the_usual_report(
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
