"""What runs in a process of its own: jobs, one after the other, which the kernel ends.

A job is foreign code or text. It may loop for ever, or fill the memory: so the process may take so
many seconds of processor time for each, which ends it, and so many bytes of memory, which raises
MemoryError, or ends it where a library does not. It takes jobs from the socket that it inherits
(its number is the first argument, the seconds are the second one, the bytes the third), and ends
with it.

    ready    one byte, once: jobs may come
    job      length (4 bytes), bytes
    answer   kind (1 byte), length (4 bytes), bytes: what was made (text as UTF-8), or as JSON why
             there is nothing and the field that is wrong
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
    """Do jobs until the other side closes the socket. work: raises RequestError for a job that is
    wrong. failure: the beginning of the message about any other error. warm_up: a job to do before
    any other, so that no job pays for what is loaded once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the parent
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    connection, cpu_s = socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2])
    if warm_up is not None:
        with contextlib.suppress(Exception):  # the first job meets the same error and says so
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
            return  # what is left of it in memory would make the next job fail


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
    """Bound what the process may take beyond what the interpreter has at the start."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not on Linux
        pages = 0
    most = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes; none if the other side has closed."""
    parts, left = [], num_bytes
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
