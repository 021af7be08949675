"""Executors carry out plans in the order in which they were submitted, and hand back results."""

from collections import deque
from typing import Protocol

import numpy as np

from quire.base.plan import Plan, StepResult
from quire.kv.sizing import MemoryPlan
from quire.runner.build import BuiltRunner


class Executor(Protocol):
    """What the core needs of the device side; in-process, multi-process, simulated."""

    def start(self) -> None: ...

    def memory(self) -> MemoryPlan: ...

    def submit(self, plan: Plan) -> None:
        """Hand over a plan. Whatever goes wrong comes back as the result's error."""
        ...

    def next_result(self) -> StepResult:
        """The result of the oldest plan that has not been answered; waits for it."""
        ...

    def close(self) -> None: ...


class InProcessExecutor:
    """Runs each plan in the calling thread, when it is submitted."""

    def __init__(self, built: BuiltRunner) -> None:
        self._built: BuiltRunner | None = built
        self._results: deque[StepResult] = deque()

    def start(self) -> None:
        pass

    def memory(self) -> MemoryPlan:
        assert self._built is not None, "the executor is closed"
        return self._built.memory

    def submit(self, plan: Plan) -> None:
        assert self._built is not None, "the executor is closed"
        if self._results and self._results[-1].error is not None:
            # Built on a plan that failed: the rows are not as this one takes them to be.
            self._results.append(failed_step(plan, "a step before it failed"))
            return
        try:
            self._results.append(self._built.runner.run(plan))
        except BaseException as error:
            self._results.append(failed_step(plan, f"{type(error).__name__}: {error}"))
            if not isinstance(error, Exception):
                raise  # an interrupt is the caller's; anything else fails requests, not the engine

    def next_result(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()
        self._built = None


def failed_step(plan: Plan, error: str) -> StepResult:
    """The result of a step that was not carried out."""
    nothing = np.empty((0, 1), np.int32)
    return StepResult(plan.step_id, nothing, nothing[:, 0], error=error)
