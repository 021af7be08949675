"""An executor that carries out plans on a thread of its own, while the caller plans the next ones.

All of the model's work belongs on one thread, its loading too (`DeviceThread.call`): OpenMP keeps a
pool of threads per calling thread, and with two of them it counts more threads than cores and lets
each sleep between operations. (A GPU has `launching.py`.)

    caller   | plan N+1 | update N-1 | messages, text |  wait  | plan N+2 | update N ...
    thread   |                   step N                        |      step N+1 ...
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from quire.base.errors import EngineError
from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult
from quire.engine.executors.executor import Executor, failed_step

END_S = 5.0  # how long the end of the process waits for what the thread is doing
IDLE_S = 0.05  # between two steps there is less, also where only one is in flight

T = TypeVar("T")
Job = Callable[[], None]


class DeviceThread:
    """A thread that carries out one function after the other. It ends with `close`, or when nobody
    holds this object any more."""

    def __init__(self, name: str = "device") -> None:
        self._jobs: Jobs = SimpleQueue()
        # A daemon, because nothing could tell another thread that the process is to end.
        self._thread = threading.Thread(
            target=_carry_out, args=(self._jobs,), name=f"quire-{name}", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._jobs, self._thread)

    def do(self, job: Job) -> None:
        """Carry out a function after those before it. It must not raise."""
        self._jobs.put(job)

    def do_when_idle(self, job: Callable[[], bool]) -> None:
        """Carry out a function whenever nothing else was to be done for IDLE_S, as long as it
        returns true. It must not raise."""
        self._jobs.put(_WhenIdle(job))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function there; returns or raises what it does. Ctrl-C reaches the caller, who
        waits."""
        answers: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

        def answer() -> None:
            try:
                answers.put((function(), None))
            except BaseException as error:
                answers.put((None, error))

        self.do(answer)
        value, error = answers.get()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """Wait for what was given to it, and end it. A second call does nothing."""
        if self._end.detach() is not None:
            self._jobs.put(None)
            self._thread.join()


@dataclass(frozen=True)
class _WhenIdle:
    job: Callable[[], bool]


Jobs = SimpleQueue[Job | _WhenIdle | None]


def _carry_out(jobs: Jobs) -> None:
    idle: _WhenIdle | None = None
    while True:
        try:
            job = jobs.get(timeout=None if idle is None else IDLE_S)
        except Empty:
            idle = idle if idle is not None and idle.job() else None
            continue
        if job is None:
            return
        if isinstance(job, _WhenIdle):
            idle = job
        else:
            job()
        del job  # while it waits it holds nothing


def _end(jobs: Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(END_S)


class ThreadedExecutor:
    """Carries out another executor's plans, one after the other, on a thread.

    What fails comes back as a result, as with any executor; EngineError is raised by `next_result`.
    Signals are the main thread's: Ctrl-C interrupts its waiting, the step goes on, and its result
    is there when it is asked for again.
    """

    def __init__(self, inner: Executor, thread: DeviceThread | None = None) -> None:
        self._inner = inner
        self._thread = thread or DeviceThread()
        self._steps = _Steps(inner)
        self._num_unanswered = 0
        self._is_closed = False

    def start(self, on_result: Callable[[], None]) -> None:
        self._steps.on_result = on_result
        self._inner.start(on_result)

    def copy_bytes_per_s(self) -> float:
        return self._inner.copy_bytes_per_s()

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        assert not self._is_closed, "the executor is closed"
        steps = self._steps
        if self._num_unanswered == 0:
            steps.has_failed = False  # nothing is built on it; the thread has nothing to do
        self._num_unanswered += 1
        self._thread.do(lambda: steps.carry_out(plan, masks))

    def is_ready(self) -> bool:
        return not self._steps.results.empty()

    def next_result(self) -> StepResult:
        found = self._steps.results.get()
        self._num_unanswered -= 1
        if isinstance(found, EngineError):
            raise found
        return found

    def close(self) -> None:
        """Wait for the present step; those behind it are not carried out."""
        self._is_closed = self._steps.has_failed = True
        self._thread.close()
        self._inner.close()


class _Steps:
    """The thread's side: it must not hold the executor, whose end is its own."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.results: SimpleQueue[StepResult | EngineError] = SimpleQueue()
        self.on_result: Callable[[], None] = lambda: None
        self.has_failed = False

    def carry_out(self, plan: Plan, masks: MaskPromise | None) -> None:
        self.results.put(self._result(plan, masks))
        self.on_result()

    def _result(self, plan: Plan, masks: MaskPromise | None) -> StepResult | EngineError:
        if self.has_failed:  # the rows are not as this plan takes them to be
            return failed_step(plan, "a step before it failed")
        try:
            self.inner.submit(plan, masks)
            result = self.inner.next_result()
        except EngineError as error:
            return error
        except BaseException as error:
            return EngineError(f"the executor failed ({type(error).__name__}: {error})")
        if result.error is not None:
            self.has_failed = True
        return result
