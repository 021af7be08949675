"""The worker's side: runs jobs one after the other under limits that the kernel enforces.

A job is untrusted code or text, which may loop for ever or fill the memory. Each job may use a
number of seconds of processor time; beyond it the kernel ends the process. The process may use a
number of bytes of memory; beyond it Python raises MemoryError, or a library aborts the process.
Jobs arrive on an inherited socket, and the worker ends when the socket closes.

    arguments  the socket's descriptor, seconds of processor time, bytes of memory
    ready      one byte, sent once when the worker can take jobs
    job        length (4 bytes), bytes
    answer     kind (1 byte), length (4 bytes), bytes: the result (text as UTF-8); or, for a
               rejected job, JSON of the message and the name of the invalid field
"""

import contextlib
import json
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from quire.base.errors import RequestError

LENGTH = struct.Struct("<I")
ANSWER = struct.Struct("<cI")
MADE, REFUSED, TOO_MUCH = b"t", b"r", b"m"
READY = b"+"


def serve_jobs(
    work: Callable[[bytes], str | bytes], failure: str, warm_up: bytes | None = None
) -> None:
    """Run jobs until the parent closes the socket.

    work: the job's function; raises RequestError for an invalid job.
    failure: start of the message about any other error.
    warm_up: job to run first, so that no real job pays for loading libraries."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # its default action ends the process
    connection, cpu_s = socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2])
    if warm_up is not None:
        with contextlib.suppress(Exception):  # the first job reports the same error
            work(warm_up)
    _limit_memory(int(sys.argv[3]))
    connection.sendall(READY)
    while True:
        size = _received(connection, LENGTH.size)
        data = _received(connection, LENGTH.unpack(size)[0]) if size else b""
        if not data:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        kind, text = _answer(work, failure, data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(ANSWER.pack(kind, len(text)) + text)
        if kind == TOO_MUCH:
            return  # the job's leftovers in memory would make the next job fail


def _answer(work: Callable[[bytes], str | bytes], failure: str, data: bytes) -> tuple[bytes, bytes]:
    try:
        made = work(data)
        return MADE, made if isinstance(made, bytes) else made.encode("utf-8", "surrogatepass")
    except MemoryError:
        return TOO_MUCH, b""
    except RequestError as error:
        return REFUSED, json.dumps([str(error), error.field]).encode()
    except Exception as error:
        text = f"{failure} ({type(error).__name__}: {error})."
        shown = text.encode("utf-8", "backslashreplace").decode()
        return REFUSED, json.dumps([shown, None]).encode()


def _limit_memory(num_bytes: int) -> None:
    """Limit memory to the process's present size plus `num_bytes`."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not on Linux
        pages = 0
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive exactly `num_bytes`; return no bytes if the parent has closed the socket."""
    parts, left = [], num_bytes
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
