"""A process that puts conversations through chat templates: python -m quire.render.template_worker.

A template is foreign code. The sandbox keeps it from files and from Python's insides, not from
looping for ever or making a text that fills the memory. Here the kernel does: the process may take
so many seconds of processor time for a job (the second argument), which ends it, and MEMORY_BYTES
of memory, which raises MemoryError. It takes jobs from the socket that it inherits (the first
argument is its number), one after the other, and ends with it.

    job      length (4 bytes), `TemplateJob.pack()`
    answer   kind (1 byte), length (4 bytes), UTF-8: the text, or as JSON why there is none and the
             field that is wrong
"""

import json
import resource
import signal
import socket
import struct
import sys
from pathlib import Path

from quire.base.errors import RequestError
from quire.render.template_job import InThisProcess, unpack

MEMORY_BYTES = 512 << 20  # beyond what the interpreter has at the start

LENGTH = struct.Struct("<I")
ANSWER = struct.Struct("<cI")
TEXT, REFUSED, TOO_MUCH = b"t", b"r", b"m"


def main() -> None:
    """Serve the socket until the other side closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the parent
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    connection, cpu_s = socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2])
    templates = InThisProcess()
    _limit_memory()
    while True:
        size = _received(connection, LENGTH.size)
        data = _received(connection, LENGTH.unpack(size)[0]) if size else b""
        if not data:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        kind, text = _answer(templates, data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(ANSWER.pack(kind, len(text)) + text)
        if kind == TOO_MUCH:
            return  # what is left of it in memory would make the next job fail


def _answer(templates: InThisProcess, data: bytes) -> tuple[bytes, bytes]:
    try:
        text = templates.render(unpack(data))
        return TEXT, text.encode("utf-8", "surrogatepass")
    except MemoryError:
        return TOO_MUCH, b""
    except RequestError as error:
        return REFUSED, json.dumps([str(error), error.field]).encode()
    except Exception as error:
        text = f"the chat template fails on this conversation ({type(error).__name__}: {error})."
        shown = text.encode("utf-8", "backslashreplace").decode()
        return REFUSED, json.dumps([shown, None]).encode()


def _limit_memory() -> None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not on Linux
        pages = 0
    most = pages * resource.getpagesize() + MEMORY_BYTES
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


if __name__ == "__main__":
    main()
