"""A few processes for jobs that must be bounded, started when they are needed.

Usual jobs go to whichever process is free; heavy ones never take the last one.
"""

import asyncio
import json
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from quire.base.errors import EngineBusy, RequestError
from quire.render.jobs.job_process import JobKind, JobProcess
from quire.render.jobs.job_worker import MADE, REFUSED, TOO_MUCH

MAX_PROCESSES = 4
MAX_WAITING = 1024
GROW_S = 0.02  # a usual job takes far less: who waits longer waits for an unusual one

Place = Future["JobProcess | None"]


class JobPool:
    """May be used from any thread and any event loop."""

    def __init__(
        self, kind: JobKind, max_processes: int = MAX_PROCESSES, idle: Sequence[JobProcess] = ()
    ) -> None:
        """idle: processes that were started already."""
        self._kind = kind
        self._max = max_processes
        self._lock = threading.Lock()
        self._idle = list(idle)
        self._num_places = 1  # processes that there may be by now
        self._num_busy = 0
        self._num_heavy = 0  # of the busy ones
        self._waiting: tuple[deque[Place], deque[Place]] = deque(), deque()  # usual, heavy

    def prepare(self) -> None:
        """Start the first process, which the first job would have to wait for; once."""
        with self._lock:
            self._idle.append(JobProcess(self._kind))

    def run(self, data: bytes, heavy: bool = False) -> str:
        """Return the text that a job makes; see `run_bytes`."""
        return self.run_bytes(data, heavy).decode("utf-8", "surrogatepass")

    async def run_async(self, data: bytes, heavy: bool = False) -> str:
        """Do the same without holding up an event loop."""
        return (await self.run_bytes_async(data, heavy)).decode("utf-8", "surrogatepass")

    def run_bytes(self, data: bytes, heavy: bool = False) -> bytes:
        """Return what a job makes. heavy: it leaves a process to the others. Raises RequestError
        for one that is wrong or takes too much, EngineBusy where too many wait or the machine gives
        the process too little time."""
        place = self._ask(heavy)
        if not place.done():
            self._grow_after(place)
        process = _living(self._given(place))
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
        """Do the same without holding up an event loop."""
        place = self._ask(heavy)
        living = _living(place.result() if place.done() else await self._wait(place, heavy))
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

    # ---- who gets a process ------------------------------------------------------------------

    def _ask(self, heavy: bool) -> Place:
        """Take a place in the order of asking: a process, or None where one may be started."""
        place = Place()
        with self._lock:
            if sum(map(len, self._waiting)) >= MAX_WAITING:
                raise self._busy()
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

    def _give_back(self, process: JobProcess | None, heavy: bool) -> None:
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

    def _given(self, place: Place) -> JobProcess | None:
        """Wait for a place, as long as it may take."""
        try:
            return place.result(self._kind.wait_s)
        except TimeoutError:
            if place.cancel():
                raise self._busy() from None
            return place.result()  # given in this very moment

    async def _wait(self, place: Place, heavy: bool) -> JobProcess | None:
        loop = asyncio.get_running_loop()
        handles = [loop.call_later(GROW_S * n, self._grow) for n in range(1, self._max + 1)]
        try:
            async with asyncio.timeout(self._kind.wait_s):
                return await asyncio.wrap_future(place)
        except (asyncio.CancelledError, TimeoutError) as error:
            with self._lock:  # which is held while a place is given out
                is_given = place.done() and not place.cancelled()
            if is_given:
                self._give_back(place.result(), heavy)
            if isinstance(error, TimeoutError):
                raise self._busy() from None
            raise
        finally:
            for handle in handles:
                handle.cancel()

    # ---- what came of it ---------------------------------------------------------------------

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
        """Give back a process whose job was cancelled. One that has the job is killed, because its
        answer would come too late; one that still starts can take another job."""
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
    """Return a process that lives; None for one that was ended from outside while it waited:
    another is to be started."""
    if process is not None and process.has_ended:
        process.kill()
        return None
    return process
