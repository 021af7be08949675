"""The parent's side of worker processes: one process with its jobs, and a pool of processes.

A process runs `job_worker.py`, under limits of processor time and memory. The pool starts processes
on demand. Any free process takes a normal job; heavy jobs always leave one process to normal jobs.
"""

import asyncio
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO

from quire.base.errors import EngineBusy, RequestError
from quire.render.jobs.job_worker import ANSWER, LENGTH, MADE, READY, REFUSED, TOO_MUCH

MAX_PROCESSES = 4
MAX_WAITING = 1024
GROW_S = 0.02  # far longer than a normal job, so a longer wait means that slow jobs block the pool
ProcessFuture = Future["JobProcess | None"]

MAX_ANSWER_BYTES = 1 << 26
READ_BYTES = 1 << 18
MAX_LAST_WORDS = 2000
EXIT_S = 30.0  # time for the kernel to end a process whose socket is closed
NO_MEMORY = b"memory allocation of"  # Rust's message before it aborts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobKind:
    """One kind of worker: its program, its limits, and the words of its error messages.

    `cpu_s` and `memory_bytes` limit a job. The other limits are wall time. They guard against a
    machine that gives the process no processor time, and exceeding them is not the job's fault."""

    module: str  # the worker's program
    cpu_s: float
    memory_bytes: int
    answer_s: float  # time from sending a job to its answer
    subject: str  # object of a job, for example "the grammar"
    work: str  # addition to messages about too much time or memory; may be empty
    advice: str  # cure for a job that takes too much
    waiting: str  # description of a queue of such jobs
    wait_s: float | None = None  # time to wait for a free process; None for no limit
    start_s: float = 60.0  # time until the process is ready


@dataclass(frozen=True)
class JobEnd:
    """The reason why a job has no answer. is_busy: whether the machine is at fault, not the job."""

    text: str
    is_busy: bool = False


class JobProcess:
    """One worker process, for one job at a time.

    The process starts in the background. The first job waits until the process is ready; only then
    does the job's time limit begin."""

    def __init__(self, kind: JobKind) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", kind.module, str(theirs.fileno())]
        command += [str(kind.cpu_s), str(kind.memory_bytes)]
        self._kind = kind
        self._is_ready = self._is_late = False
        self.is_at_rest = True  # no job is without its answer
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
        """Run a job and return the kind and bytes of its answer.

        Raises OSError if the process ends or answers too late; `why` then returns the reason."""
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
        limit = next(reading)
        while True:
            try:
                limit = reading.send(self._socket.recv(min(limit, READ_BYTES)))
            except StopIteration as done:
                found: tuple[bytes, bytes] = done.value
                self.is_at_rest = True
                return found

    async def exchange_async(self, job: bytes) -> tuple[bytes, bytes]:
        """Do the same as `exchange`. After a cancellation, use only a process that `is_at_rest`."""
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        if not self._is_ready:
            await self._wait_until_ready(loop)
        self._begin()
        late = loop.call_later(self._kind.answer_s, self._give_up)
        try:
            await loop.sock_sendall(self._socket, LENGTH.pack(len(job)) + job)
            reading = _answer()
            limit = next(reading)
            while True:
                try:
                    data = await loop.sock_recv(self._socket, min(limit, READ_BYTES))
                    limit = reading.send(data)
                except StopIteration as done:
                    found: tuple[bytes, bytes] = done.value
                    self.is_at_rest = True
                    return found
        finally:
            late.cancel()

    def why(self) -> JobEnd:
        """Return the reason why the last job has no answer; wait for a dying process to end."""
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
        """Return the message for a job that met the memory limit."""
        return f"takes more than {self._kind.memory_bytes >> 20} MiB of memory{self._kind.work}"

    def _begin(self) -> None:
        self.is_at_rest = False
        os.ftruncate(self._last_words.fileno(), 0)

    async def _wait_until_ready(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until the ready byte can be read, without reading it; safe to cancel."""
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
        """Shut the socket down to end an exchange. Closing it would leave the loop's watch open."""
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
    """Yield the maximum number of bytes to receive; take the received bytes; return the answer."""
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


class JobPool:
    """Assigns jobs to processes. All methods are thread-safe and work from any event loop."""

    def __init__(
        self, kind: JobKind, max_processes: int = MAX_PROCESSES, idle: Sequence[JobProcess] = ()
    ) -> None:
        """Create the pool. `idle` are processes that already run."""
        self._kind = kind
        self._max = max_processes
        self._lock = threading.Lock()
        self._idle = list(idle)
        self._num_places = 1  # processes allowed so far
        self._num_busy = 0
        self._num_heavy = 0  # busy processes with heavy jobs
        self._waiting: tuple[deque[ProcessFuture], deque[ProcessFuture]] = (
            deque(),
            deque(),
        )  # normal, heavy

    def prepare(self) -> None:
        """Start a process in advance. Call this at most once."""
        with self._lock:
            self._idle.append(JobProcess(self._kind))

    def run(self, data: bytes, heavy: bool = False) -> str:
        """Run a job as `run_bytes` does, and return its result as text."""
        return self.run_bytes(data, heavy).decode("utf-8", "surrogatepass")

    async def run_async(self, data: bytes, heavy: bool = False) -> str:
        """Do the same as `run` without blocking the event loop."""
        return (await self.run_bytes_async(data, heavy)).decode("utf-8", "surrogatepass")

    def run_bytes(self, data: bytes, heavy: bool = False) -> bytes:
        """Run a job and return its result.

        heavy: whether the job must leave a process to normal jobs.
        Raises RequestError if the job is invalid or takes too much. Raises EngineBusy if too many
        jobs wait, or if the machine gives the process too little time."""
        waiter = self._join_queue(heavy)
        if not waiter.done():
            self._grow_after(waiter)
        process = _living(self._given(waiter))
        try:
            process = process or JobProcess(self._kind)
        except BaseException:
            self._give_back(None, heavy)
            raise
        try:
            kind, made = process.exchange(data)
        except OSError:
            raise self._ended(process, heavy) from None
        except BaseException:
            self._leave(process, heavy)
            raise
        return self._taken(process, heavy, kind, made)

    async def run_bytes_async(self, data: bytes, heavy: bool = False) -> bytes:
        """Do the same as `run_bytes` without blocking the event loop."""
        waiter = self._join_queue(heavy)
        living = _living(waiter.result() if waiter.done() else await self._wait(waiter, heavy))
        try:
            process = living
            if process is None:
                process = await asyncio.to_thread(JobProcess, self._kind)
        except BaseException:
            self._give_back(None, heavy)
            raise
        try:
            kind, made = await process.exchange_async(data)
        except OSError:
            raise await asyncio.to_thread(self._ended, process, heavy) from None
        except BaseException:
            self._leave(process, heavy)
            raise
        return self._taken(process, heavy, kind, made)

    # ---- assignment of processes -------------------------------------------------------------

    def _join_queue(self, heavy: bool) -> ProcessFuture:
        """Join the queue. The place resolves to a process, or to None if one must be started."""
        waiter = ProcessFuture()
        with self._lock:
            if sum(map(len, self._waiting)) >= MAX_WAITING:
                raise self._busy()
            self._waiting[heavy].append(waiter)
            self._serve()
        return waiter

    def _serve(self) -> None:
        """Assign free processes to waiting jobs. The caller holds the lock."""
        for heavy, waiting in enumerate(self._waiting):
            while waiting and self._num_busy < self._num_places:
                if heavy and self._num_heavy >= max(1, self._max - 1):
                    break
                waiter = waiting.popleft()
                if not waiter.set_running_or_notify_cancel():
                    continue
                self._num_busy += 1
                self._num_heavy += heavy
                waiter.set_result(self._idle.pop() if self._idle else None)

    def _give_back(self, process: JobProcess | None, heavy: bool) -> None:
        with self._lock:
            self._num_busy -= 1
            self._num_heavy -= heavy
            if process is not None:
                self._idle.append(process)
            self._serve()

    def _grow(self) -> None:
        """Allow one more process, because a job has waited for long."""
        with self._lock:
            if any(self._waiting) and self._num_places < self._max:
                self._num_places += 1
                self._serve()

    def _grow_after(self, waiter: ProcessFuture) -> None:
        for _ in range(self._max):
            try:
                waiter.result(GROW_S)
                return
            except TimeoutError:
                self._grow()

    def _given(self, waiter: ProcessFuture) -> JobProcess | None:
        """Wait for a place, at most `wait_s` seconds. Raises EngineBusy after that."""
        try:
            return waiter.result(self._kind.wait_s)
        except TimeoutError:
            if waiter.cancel():
                raise self._busy() from None
            return waiter.result()  # assigned just before the cancellation

    async def _wait(self, waiter: ProcessFuture, heavy: bool) -> JobProcess | None:
        loop = asyncio.get_running_loop()
        handles = [loop.call_later(GROW_S * n, self._grow) for n in range(1, self._max + 1)]
        try:
            async with asyncio.timeout(self._kind.wait_s):
                return await asyncio.wrap_future(waiter)
        except (asyncio.CancelledError, TimeoutError) as error:
            with self._lock:  # places are assigned under it
                is_given = waiter.done() and not waiter.cancelled()
            if is_given:
                self._give_back(waiter.result(), heavy)
            if isinstance(error, TimeoutError):
                raise self._busy() from None
            raise
        finally:
            for handle in handles:
                handle.cancel()

    # ---- results -----------------------------------------------------------------------------

    def _taken(self, process: JobProcess, heavy: bool, kind: bytes, made: bytes) -> bytes:
        if kind == TOO_MUCH:
            why = process.too_much_memory()
            process.kill()
            self._give_back(None, heavy)
            raise self._refused(why)
        self._give_back(process, heavy)
        if kind == MADE:
            return made
        assert kind == REFUSED
        message, field = json.loads(made)
        raise RequestError(message, field)

    def _ended(self, process: JobProcess, heavy: bool) -> RequestError:
        end = process.why()
        process.kill()
        self._give_back(None, heavy)
        if end.is_busy:
            return EngineBusy(f"{self._kind.subject} {end.text}; try again later.")
        return self._refused(end.text)

    def _leave(self, process: JobProcess, heavy: bool) -> None:
        """Release the process of a cancelled job. A process that is still starting stays usable.

        A process that has the job is killed, because no one waits for its answer any more."""
        if process.is_at_rest:
            self._give_back(process, heavy)
        else:
            process.kill()
            self._give_back(None, heavy)

    def _busy(self) -> EngineBusy:
        return EngineBusy(f"too many {self._kind.waiting}; try again later.")

    def _refused(self, why: str) -> RequestError:
        return RequestError(f"{self._kind.subject} {why}; {self._kind.advice}.")


def _living(process: JobProcess | None) -> JobProcess | None:
    """Return the process, or None if it died while idle, so that the caller starts another."""
    if process is not None and process.has_ended:
        process.kill()
        return None
    return process
