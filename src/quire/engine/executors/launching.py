"""Executor for asynchronous devices: one thread launches plans, another waits for results.

    caller     | plan N+1 |            update N | messages, text ...
    launching  |          | launch N+1 |        |
    waiting    |        result of N ...    ring |      result of N+1 ...
    device     |        step N              | step N+1

The device receives step N+1 while it computes step N, so it never waits for the host. While there
is nothing to launch, the launching thread lets the runner record graphs.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING

from quire.base.errors import EngineError
from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult
from quire.engine.executors.executor import check_usable, failed_step
from quire.engine.executors.threaded import DeviceThread

if TYPE_CHECKING:
    from quire.runner.model_runner import ModelRunner
    from quire.runner.setup.built import BuiltRunner

logger = logging.getLogger("quire")


class LaunchingExecutor:
    """Executor that launches plans on an asynchronous device and waits for them on a second thread.

    A plan that cannot be launched returns a result with an error. An error on the device after the
    launch makes the device unusable: `next_result` raises EngineError. thread: thread that loaded
    the model and launches plans. idles: whether idle moments are used to record graphs.
    """

    def __init__(self, built: "BuiltRunner", thread: DeviceThread, *, idles: bool = True) -> None:
        self._idles = idles
        self._copy_bytes_per_s = built.copy_bytes_per_s
        self._launching, self._waiting = thread, DeviceThread()
        self._steps = _Steps(built.runner, lambda: check_usable(built.device))
        self._num_unanswered = 0
        self._is_closed = False

    def start(self, on_result: Callable[[], None]) -> None:
        self._steps.on_result = on_result

    def copy_bytes_per_s(self) -> float:
        return self._copy_bytes_per_s

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        assert not self._is_closed, "the executor is closed"
        steps, waiting, launching = self._steps, self._waiting, self._launching
        if self._num_unanswered == 0:
            steps.has_failed = False  # no outstanding plan depends on the failed one
        self._num_unanswered += 1

        def launch() -> None:
            answer = steps.launch(plan, masks)
            waiting.do(lambda: steps.answer(answer))

        launching.do(launch)

    def is_ready(self) -> bool:
        return not self._steps.results.empty()

    def next_result(self) -> StepResult:
        found = self._steps.results.get()
        self._num_unanswered -= 1
        if self._num_unanswered == 0 and self._idles:
            steps = self._steps
            self._launching.do_when_idle(steps.idle)
        if isinstance(found, EngineError):
            raise found
        return found

    def close(self) -> None:
        """Wait for launched plans to end; skip plans that are not launched yet."""
        self._is_closed = self._steps.has_failed = True
        self._launching.do(self._steps.settle)
        self._launching.close()
        self._waiting.close()


Answer = Callable[[], StepResult]


class _Steps:
    """State of the threads. It must not refer to the executor: the threads end when the executor is
    garbage-collected."""

    def __init__(self, runner: "ModelRunner", check: Callable[[], None]) -> None:
        self._runner = runner
        self._check_device = check
        self.results: SimpleQueue[StepResult | EngineError] = SimpleQueue()
        self.on_result: Callable[[], None] = lambda: None
        self.has_failed = False
        self._num_launched = self._num_answered = 0  # each has one writing thread

    def launch(self, plan: Plan, masks: MaskPromise | None) -> Answer:
        """Launch a plan on the launching thread. Return a function that waits for its result, and
        that reports or raises an error of the launch."""
        self._num_launched += 1
        if self.has_failed:  # this plan assumes row states that do not exist
            return lambda: failed_step(plan, "a step before it failed")
        try:
            pending = self._runner.launch(plan, masks)
        except EngineError as error:
            return _raises(error)
        except BaseException as error:
            self.has_failed = True
            return self._failure(plan, f"{type(error).__name__}: {error}")
        return pending.end

    def answer(self, answer: Answer) -> None:
        """Wait for a plan's result on the waiting thread and queue it, in order of submission."""
        try:
            self.results.put(answer())
        except EngineError as error:
            self.results.put(error)
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
            self.results.put(_lost(f"a step failed with {message}", message))
        self._num_answered += 1
        self.on_result()

    def idle(self) -> bool:
        """Let the runner record a graph, on the launching thread, if no plan is outstanding. Return
        whether to call again. Errors are logged and fail no request."""
        try:
            return self._num_launched > self._num_answered or self._runner.idle()
        except Exception:
            logger.warning("no more graphs are recorded", exc_info=True)
            return False

    def settle(self) -> None:
        """Wait, on the launching thread, for device work from idle moments before its memory is
        freed."""
        with suppress(Exception):
            self._check_device()

    def _failure(self, plan: Plan, message: str) -> Answer:
        """Return the answer to a failed launch. Check the device now, before the next launch."""
        try:
            self._check_device()
        except Exception as error:
            return _raises(_lost(f"a step raised {message}", str(error)))
        return lambda: failed_step(plan, message)


def _raises(error: EngineError) -> Answer:
    def answer() -> StepResult:
        raise error

    return answer


def _lost(failure: str, device_error: str) -> EngineError:
    return EngineError(
        f"{failure} and the device cannot be used any more ({device_error}); restart the process."
    )
