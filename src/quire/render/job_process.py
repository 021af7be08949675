"""A process for jobs that must be bounded, seen from the one that asks (`job_worker.py` runs in
it), and what to say of a job that takes too much."""

import asyncio
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Generator
from dataclasses import dataclass

from quire.render.job_worker import ANSWER, LENGTH

MAX_ANSWER_BYTES = 1 << 26
READ_BYTES = 1 << 18


@dataclass(frozen=True)
class JobKind:
    """What a process does. module: its program. cpu_s, memory_bytes: what a job may take; what
    takes answer_s without using the processor will never end. wait_s: how long a job may wait for a
    process; None is for ever.

    subject, work, advice: what a job belongs to, what it is, and what to do about one that takes
    too much; waiting: what many of them are that wait.
    """

    module: str
    cpu_s: float
    memory_bytes: int
    answer_s: float
    subject: str
    work: str
    advice: str
    waiting: str
    wait_s: float | None = None


class JobProcess:
    """One process, for one job at a time."""

    def __init__(self, kind: JobKind) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", kind.module, str(theirs.fileno())]
        command += [str(kind.cpu_s), str(kind.memory_bytes)]
        self._kind = kind
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._socket = ours
        self.kill = weakref.finalize(self, _end, self._process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exchange(self, job: bytes) -> tuple[bytes, str]:
        """Kind and text of the answer. Raises ConnectionError if the process has ended."""
        self._socket.settimeout(self._kind.answer_s)
        self._socket.sendall(LENGTH.pack(len(job)) + job)
        reading = _answer()
        wanted = next(reading)
        while True:
            try:
                wanted = reading.send(self._socket.recv(min(wanted, READ_BYTES)))
            except StopIteration as done:
                found: tuple[bytes, str] = done.value
                return found

    async def exchange_async(self, job: bytes) -> tuple[bytes, str]:
        """Do the same. Nothing may be asked of the process any more if it is cancelled."""
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        # Not closed, which would leave the loop waiting for a descriptor that is no more.
        late = loop.call_later(self._kind.answer_s, self._socket.shutdown, socket.SHUT_RDWR)
        try:
            await loop.sock_sendall(self._socket, LENGTH.pack(len(job)) + job)
            reading = _answer()
            wanted = next(reading)
            while True:
                try:
                    data = await loop.sock_recv(self._socket, min(wanted, READ_BYTES))
                    wanted = reading.send(data)
                except StopIteration as done:
                    found: tuple[bytes, str] = done.value
                    return found
        finally:
            late.cancel()

    def why(self) -> str:
        """Return why it has ended."""
        self._socket.close()
        try:
            status = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return f"did not answer for {self._kind.answer_s:g} s"
        if status == -signal.SIGPROF:
            return f"takes more than {self._kind.cpu_s:g} s of processor time{self._kind.work}"
        return "ended its process (it takes too much memory, or a library's error did)"


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


def _answer() -> Generator[int, bytes, tuple[bytes, str]]:
    """Yield how many bytes are wanted at most, take what came."""
    data = bytearray()
    while len(data) < ANSWER.size:
        data += _some((yield ANSWER.size - len(data)))
    kind, size = ANSWER.unpack(data)
    if size > MAX_ANSWER_BYTES:
        raise ConnectionError(f"an answer of {size} bytes")
    data.clear()
    while len(data) < size:
        data += _some((yield size - len(data)))
    return kind, data.decode("utf-8", "surrogatepass")


def _some(data: bytes) -> bytes:
    if not data:
        raise ConnectionError("the process has ended")
    return data
