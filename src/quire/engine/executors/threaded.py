"""Executor that runs plans on its own thread while the caller plans the next steps.

One thread does all of the model's work, including loading (`DeviceThread.call`). OpenMP keeps one
thread pool per calling thread; with two pools it counts more threads than cores, and its threads
sleep between operations. GPUs use `launching.py`.

    caller   | plan N+1 | update N-1 | messages, text |  wait  | plan N+2 | update N ...
    thread   |                   step N                        |      step N+1 ...
"""

import contextlib
import os
import sys
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

END_S = 5.0  # maximum wait for the thread's current function at process exit
BACKGROUND_NICENESS = 10  # the thread gets a tenth of the time that a thread of a step gets
IDLE_S = 0.05  # longer than the pause between two steps, even with one step in flight

T = TypeVar("T")
Job = Callable[[], None]


class DeviceThread:
    """Thread that runs functions one after another. It ends on `close`, or when the last reference
    to this object is dropped. is_background: steps come first (`lower_priority`)."""

    def __init__(self, name: str = "device", *, is_background: bool = False) -> None:
        self._jobs: Jobs = SimpleQueue()
        # A daemon: a non-daemon thread would not learn that the process exits.
        self._thread = threading.Thread(
            target=_carry_out,
            args=(self._jobs, is_background),
            name=f"quire-{name}",
            daemon=True,
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._jobs, self._thread)

    def do(self, job: Job) -> None:
        """Queue a function after the functions queued before. It must not raise."""
        self._jobs.put(job)

    def do_when_idle(self, job: Callable[[], bool]) -> None:
        """Run a function each time the queue was empty for IDLE_S, until it returns false. It must
        not raise."""
        self._jobs.put(_WhenIdle(job))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the thread and wait; return its value or raise its error. Ctrl-C
        interrupts the waiting caller, not the function."""
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
        """Wait for all queued functions and end the thread. A second call does nothing."""
        if self._end.detach() is not None:
            self._jobs.put(None)
            self._thread.join()


@dataclass(frozen=True)
class _WhenIdle:
    job: Callable[[], bool]


Jobs = SimpleQueue[Job | _WhenIdle | None]


def lower_priority() -> None:
    """Let other threads of this machine come before this one and the threads that it starts.
    Elsewhere than on Linux, a priority belongs to a whole process, and nothing changes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)


def _carry_out(jobs: Jobs, is_background: bool) -> None:
    if is_background:
        lower_priority()
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
        del job  # hold no reference while waiting


def _end(jobs: Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(END_S)


class ThreadedExecutor:
    """Executor that runs an inner executor's plans one after another on a thread.

    A failed plan returns a result with an error; `next_result` raises EngineError if no further
    plan can run. Ctrl-C only interrupts the main thread's wait. The step continues, and the next
    call of `next_result` returns its result.
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
            steps.has_failed = False  # no outstanding plan depends on it, and the thread is idle
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
        """Wait for the current step; skip the plans queued after it."""
        self._is_closed = self._steps.has_failed = True
        self._thread.close()
        self._inner.close()


class _Steps:
    """State of the thread. It must not refer to the executor: the thread ends when the executor is
    garbage-collected."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.results: SimpleQueue[StepResult | EngineError] = SimpleQueue()
        self.on_result: Callable[[], None] = lambda: None
        self.has_failed = False

    def carry_out(self, plan: Plan, masks: MaskPromise | None) -> None:
        self.results.put(self._result(plan, masks))
        self.on_result()

    def _result(self, plan: Plan, masks: MaskPromise | None) -> StepResult | EngineError:
        if self.has_failed:  # this plan assumes row states that do not exist
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
