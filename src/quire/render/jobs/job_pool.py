"""A pool of worker processes for jobs with limits; processes start on demand.

Any free process takes a normal job. Heavy jobs always leave one process to normal jobs.
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
GROW_S = 0.02  # far longer than a normal job, so a longer wait means that slow jobs block the pool

Place = Future["JobProcess | None"]


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
        self._waiting: tuple[deque[Place], deque[Place]] = deque(), deque()  # normal, heavy

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
        place = self._join_queue(heavy)
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
        """Do the same as `run_bytes` without blocking the event loop."""
        place = self._join_queue(heavy)
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

    # ---- assignment of processes -------------------------------------------------------------

    def _join_queue(self, heavy: bool) -> Place:
        """Join the queue. The place resolves to a process, or to None if one must be started."""
        place = Place()
        with self._lock:
            if sum(map(len, self._waiting)) >= MAX_WAITING:
                raise self._busy()
            self._waiting[heavy].append(place)
            self._serve()
        return place

    def _serve(self) -> None:
        """Assign free processes to waiting jobs. The caller holds the lock."""
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
        """Allow one more process, because a job has waited for long."""
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
        """Wait for a place, at most `wait_s` seconds. Raises EngineBusy after that."""
        try:
            return place.result(self._kind.wait_s)
        except TimeoutError:
            if place.cancel():
                raise self._busy() from None
            return place.result()  # assigned just before the cancellation

    async def _wait(self, place: Place, heavy: bool) -> JobProcess | None:
        loop = asyncio.get_running_loop()
        handles = [loop.call_later(GROW_S * n, self._grow) for n in range(1, self._max + 1)]
        try:
            async with asyncio.timeout(self._kind.wait_s):
                return await asyncio.wrap_future(place)
        except (asyncio.CancelledError, TimeoutError) as error:
            with self._lock:  # places are assigned under it
                is_given = place.done() and not place.cancelled()
            if is_given:
                self._give_back(place.result(), heavy)
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
