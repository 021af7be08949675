"""A process for jobs that must be bounded, seen from the one that asks (`job_worker.py` runs in
it), and what to say of a job that takes too much."""

import asyncio
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Generator
from dataclasses import dataclass
from typing import IO

from quire.render.jobs.job_worker import ANSWER, LENGTH, READY

MAX_ANSWER_BYTES = 1 << 26
READ_BYTES = 1 << 18
MAX_LAST_WORDS = 2000
EXIT_S = 30.0  # for the kernel to end a process whose socket is closed already
NO_MEMORY = b"memory allocation of"  # what Rust writes before it aborts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobKind:
    """What a process does. module: its program. cpu_s, memory_bytes: what a job may take.

    The other limits are wall time. They guard against a machine that gives the process no processor
    time, so they say nothing about the job. answer_s: from sending a job to its answer. start_s:
    until the process is ready. wait_s: for a process; None is for ever.

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
    start_s: float = 60.0


@dataclass(frozen=True)
class JobEnd:
    """Why a job has no answer. is_busy: the machine is to blame, not the job."""

    text: str
    is_busy: bool = False


class JobProcess:
    """One process, for one job at a time. It starts in the background; the first job waits until
    it is ready, and only then its clock runs.
    """

    def __init__(self, kind: JobKind) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", kind.module, str(theirs.fileno())]
        command += [str(kind.cpu_s), str(kind.memory_bytes)]
        self._kind = kind
        self._is_ready = self._is_late = False
        self.is_at_rest = True  # it owes no answer
        self._last_words = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115  (see _end)
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stderr=self._last_words,
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        self.kill = weakref.finalize(self, _end, self._process, ours, self._last_words)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exchange(self, job: bytes) -> tuple[bytes, bytes]:
        """Return kind and bytes of the answer. Raise OSError if the process has ended or does not
        answer in time; `why` says which."""
        try:
            return self._exchanged(job)
        except TimeoutError:
            self._is_late = True
            raise

    def _exchanged(self, job: bytes) -> tuple[bytes, bytes]:
        if not self._is_ready:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(self._kind.start_s * 1000):
                raise TimeoutError
            self._take_ready()
        self._begin()
        self._socket.settimeout(self._kind.answer_s)
        self._socket.sendall(LENGTH.pack(len(job)) + job)
        reading = _answer()
        wanted = next(reading)
        while True:
            try:
                wanted = reading.send(self._socket.recv(min(wanted, READ_BYTES)))
            except StopIteration as done:
                found: tuple[bytes, bytes] = done.value
                self.is_at_rest = True
                return found

    async def exchange_async(self, job: bytes) -> tuple[bytes, bytes]:
        """Do the same. Only a process that `is_at_rest` may be asked again if this is cancelled."""
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        if not self._is_ready:
            await self._wait_until_ready(loop)
        self._begin()
        late = loop.call_later(self._kind.answer_s, self._give_up)
        try:
            await loop.sock_sendall(self._socket, LENGTH.pack(len(job)) + job)
            reading = _answer()
            wanted = next(reading)
            while True:
                try:
                    data = await loop.sock_recv(self._socket, min(wanted, READ_BYTES))
                    wanted = reading.send(data)
                except StopIteration as done:
                    found: tuple[bytes, bytes] = done.value
                    self.is_at_rest = True
                    return found
        finally:
            late.cancel()

    def why(self) -> JobEnd:
        """Return why the last job has no answer. Wait for the end of a process that is ending."""
        self._socket.close()
        try:
            status = self._process.wait(0 if self._is_late else EXIT_S)
        except subprocess.TimeoutExpired:
            limit = self._kind.answer_s if self._is_ready else self._kind.start_s
            return JobEnd(f"got too little processor time for {limit:g} s", is_busy=True)
        if status == -signal.SIGPROF:
            return JobEnd(
                f"takes more than {self._kind.cpu_s:g} s of processor time{self._kind.work}"
            )
        words = self._read_last_words()
        if NO_MEMORY in words:
            return JobEnd(self.too_much_memory())
        logger.warning(
            "%s ended with status %d: %s", self._kind.module, status, words.decode(errors="replace")
        )
        if not self._is_ready:
            return JobEnd("could not be checked: its process does not start", is_busy=True)
        if status == -signal.SIGKILL:
            return JobEnd("lost its process, which was killed from outside", is_busy=True)
        if status == -signal.SIGSEGV:
            return JobEnd("ended its process: it is nested too deep, or met an error in a library")
        return JobEnd(f"ended its process by an error in a library (exit status {status})")

    def too_much_memory(self) -> str:
        """Return what to say of a job that met the memory limit."""
        return f"takes more than {self._kind.memory_bytes >> 20} MiB of memory{self._kind.work}"

    def _begin(self) -> None:
        self.is_at_rest = False
        os.ftruncate(self._last_words.fileno(), 0)

    async def _wait_until_ready(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait without taking anything, so that a cancelled wait loses nothing."""
        is_readable = loop.create_future()

        def readable() -> None:
            if not is_readable.done():
                is_readable.set_result(None)

        loop.add_reader(self._socket, readable)
        try:
            async with asyncio.timeout(self._kind.start_s):
                await is_readable
        except TimeoutError:
            self._is_late = True
            raise
        finally:
            loop.remove_reader(self._socket)
        self._take_ready()

    def _take_ready(self) -> None:
        if self._socket.recv(len(READY)) != READY:
            raise ConnectionError("the process has ended")
        self._is_ready = True

    def _give_up(self) -> None:
        """End an exchange. A closed socket would leave the loop waiting for its descriptor."""
        self._is_late = True
        self._socket.shutdown(socket.SHUT_RDWR)

    def _read_last_words(self) -> bytes:
        size = os.fstat(self._last_words.fileno()).st_size
        return os.pread(self._last_words.fileno(), MAX_LAST_WORDS, max(0, size - MAX_LAST_WORDS))


def _end(
    process: "subprocess.Popen[bytes]", connection: socket.socket, last_words: IO[bytes]
) -> None:
    connection.close()
    process.kill()
    process.wait()
    last_words.close()


def _answer() -> Generator[int, bytes, tuple[bytes, bytes]]:
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
    return kind, bytes(data)


def _some(data: bytes) -> bytes:
    if not data:
        raise ConnectionError("the process has ended")
    return data
