"""Shared code of the benchmarks of a running server: a free port, and the server's end."""

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

END_S = 60.0


def free_port() -> int:
    """Return a TCP port without a listener at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port


@contextmanager
def running(command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process that gets SIGTERM when the block ends, and is awaited."""
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
