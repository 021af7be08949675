"""Chat templates in processes of their own, which the kernel ends when they take too much.

A few processes at most, started when they are needed. Usual conversations go to whichever is free;
long ones, and templates that came with a request, never take the last one.
"""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future

from quire.base.errors import EngineBusy, RequestError
from quire.render.chat_template import MAX_CHARS
from quire.render.template_job import TemplateJob
from quire.render.template_worker import (
    ANSWER,
    LENGTH,
    MEMORY_BYTES,
    REFUSED,
    TEXT,
    TOO_MUCH,
)

CPU_S = 5.0
MAX_PROCESSES = 4
MAX_WAITING = 1024
GROW_S = 0.02  # a usual job takes far less: who waits longer waits for an unusual one
ANSWER_S = 60.0  # what takes so long without using the processor will never end
HEAVY_BYTES = 1 << 18
READ_BYTES = 1 << 18


class TemplateProcess:
    """One process, for one job at a time. cpu_s: processor time that a job may take."""

    def __init__(self, cpu_s: float = CPU_S) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "quire.render.template_worker"]
        command += [str(theirs.fileno()), str(cpu_s)]
        self._cpu_s = cpu_s
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
        self._socket.settimeout(ANSWER_S)
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
        late = loop.call_later(ANSWER_S, self._socket.shutdown, socket.SHUT_RDWR)
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
            return f"did not answer for {ANSWER_S:g} s"
        if status == -signal.SIGPROF:
            return f"takes more than {self._cpu_s:g} s of processor time on this conversation"
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
    if size > 4 * MAX_CHARS:
        raise ConnectionError(f"an answer of {size} bytes")
    data.clear()
    while len(data) < size:
        data += _some((yield size - len(data)))
    return kind, data.decode("utf-8", "surrogatepass")


def _some(data: bytes) -> bytes:
    if not data:
        raise ConnectionError("the process has ended")
    return data


Place = Future["TemplateProcess | None"]


class TemplatePool:
    """May be used from any thread and any event loop."""

    def __init__(self, max_processes: int = MAX_PROCESSES, cpu_s: float = CPU_S) -> None:
        self._max = max_processes
        self._cpu_s = cpu_s
        self._lock = threading.Lock()
        self._idle: list[TemplateProcess] = []
        self._num_places = 1  # processes that there may be by now
        self._num_busy = 0
        self._num_heavy = 0  # of the busy ones
        self._waiting: tuple[deque[Place], deque[Place]] = deque(), deque()  # usual, heavy

    def prepare(self) -> None:
        with self._lock:
            self._idle.append(TemplateProcess(self._cpu_s))

    def render(self, job: TemplateJob) -> str:
        data = job.pack()
        heavy = _is_heavy(job, data)
        place = self._ask(heavy)
        if not place.done():
            self._grow_after(place)
        process = _living(place.result())
        try:
            process = process or TemplateProcess(self._cpu_s)
        except BaseException:
            self._give_back(None, heavy)
            raise
        try:
            kind, text = process.exchange(data)
        except OSError:
            raise self._ended(process, heavy) from None
        except BaseException:
            process.kill()
            self._give_back(None, heavy)
            raise
        return self._taken(process, heavy, kind, text)

    async def render_async(self, job: TemplateJob) -> str:
        data = job.pack()
        heavy = _is_heavy(job, data)
        place = self._ask(heavy)
        living = _living(place.result() if place.done() else await self._wait(place, heavy))
        try:
            process = living
            if process is None:
                process = await asyncio.to_thread(TemplateProcess, self._cpu_s)
        except BaseException:
            self._give_back(None, heavy)
            raise
        try:
            kind, text = await process.exchange_async(data)
        except OSError:
            raise await asyncio.to_thread(self._ended, process, heavy) from None
        except BaseException:  # cancelled: what it answers is not for the next
            process.kill()
            self._give_back(None, heavy)
            raise
        return self._taken(process, heavy, kind, text)

    # ---- who gets a process ------------------------------------------------------------------

    def _ask(self, heavy: bool) -> Place:
        """Take a place in the order of asking: a process, or None where one may be started."""
        place = Place()
        with self._lock:
            if sum(map(len, self._waiting)) >= MAX_WAITING:
                raise EngineBusy(
                    f"{MAX_WAITING} conversations wait for the chat template; try again later."
                )
            self._waiting[heavy].append(place)
            self._serve()
        return place

    def _serve(self) -> None:
        """Give out what is free. Under the lock."""
        for heavy, waiting in enumerate(self._waiting):
            while waiting and self._num_busy < self._num_places:
                if heavy and self._num_heavy >= max(1, self._max - 1):
                    break
                place = waiting.popleft()
                if not place.set_running_or_notify_cancel():
                    continue
                self._num_busy += 1
                self._num_heavy += heavy
                place.set_result(self._idle.pop() if self._idle else None)

    def _give_back(self, process: TemplateProcess | None, heavy: bool) -> None:
        with self._lock:
            self._num_busy -= 1
            self._num_heavy -= heavy
            if process is not None:
                self._idle.append(process)
            self._serve()

    def _grow(self) -> None:
        """Somebody has waited for long: one more process may be started."""
        with self._lock:
            if any(self._waiting) and self._num_places < self._max:
                self._num_places += 1
                self._serve()

    def _grow_after(self, place: Place) -> None:
        for _ in range(self._max):
            try:
                place.result(GROW_S)
                return
            except TimeoutError:
                self._grow()

    async def _wait(self, place: Place, heavy: bool) -> TemplateProcess | None:
        loop = asyncio.get_running_loop()
        handles = [loop.call_later(GROW_S * n, self._grow) for n in range(1, self._max + 1)]
        try:
            return await asyncio.wrap_future(place)
        except asyncio.CancelledError:
            with self._lock:  # which is held while a place is given out
                is_given = place.done() and not place.cancelled()
            if is_given:
                self._give_back(place.result(), heavy)
            raise
        finally:
            for handle in handles:
                handle.cancel()

    # ---- what came of it ---------------------------------------------------------------------

    def _taken(self, process: TemplateProcess, heavy: bool, kind: bytes, text: str) -> str:
        if kind == TOO_MUCH:
            process.kill()
            self._give_back(None, heavy)
            raise RequestError(
                f"the chat template takes more than {MEMORY_BYTES >> 20} MiB of memory on this"
                " conversation; send less, or give another chat_template."
            )
        self._give_back(process, heavy)
        if kind == TEXT:
            return text
        assert kind == REFUSED
        message, field = json.loads(text)
        raise RequestError(message, field)

    def _ended(self, process: TemplateProcess, heavy: bool) -> RequestError:
        why = process.why()
        process.kill()
        self._give_back(None, heavy)
        return RequestError(f"the chat template {why}; send less, or give another chat_template.")


def _living(process: TemplateProcess | None) -> TemplateProcess | None:
    """Return a process that lives; None for one that was ended from outside while it waited:
    another is to be started."""
    if process is not None and process.has_ended:
        process.kill()
        return None
    return process


def _is_heavy(job: TemplateJob, data: bytes) -> bool:
    return job.is_foreign or len(data) > HEAVY_BYTES
