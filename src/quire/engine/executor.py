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
        try:
            self._results.append(self._built.runner.run(plan))
        except Exception as error:  # anything that a step raises fails its requests, not the engine
            self._results.append(failed_step(plan, error))

    def next_result(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()
        self._built = None


def failed_step(plan: Plan, error: Exception) -> StepResult:
    """The result of a step that raised."""
    nothing = np.empty((0, 1), np.int32)
    text = f"{type(error).__name__}: {error}"
    return StepResult(plan.step_id, nothing, nothing[:, 0], error=text)
