"""Executors carry out plans in the order in which they were submitted, and hand back results."""

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quire.base.errors import EngineError
from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult

if TYPE_CHECKING:  # clients of a core elsewhere import this file, and no torch
    import torch


logger = logging.getLogger("quire")


class Executor(Protocol):
    """What the core needs of the device side; in-process, on a thread, simulated.

    A result may be ready when `submit` returns, or later.
    """

    def start(self, on_result: Callable[[], None]) -> None:
        """Begin. on_result: to be called, from any thread, when a result is ready later."""
        ...

    def copy_bytes_per_s(self) -> float:
        """Return how fast blocks are copied to host memory; 0.0 if they cannot be."""
        ...

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        """Hand over a plan. What goes wrong with it comes back as the result's error; plans behind
        it are answered without being carried out, until all were answered. Raises EngineError if
        no plan can be carried out any more.

        masks: which tokens its masked rows may choose; waited for before they do."""
        ...

    def is_ready(self) -> bool:
        """Tell whether `next_result` returns at once."""
        ...

    def next_result(self) -> StepResult:
        """Return the result of the oldest plan that was not answered; waits for it. Raises
        EngineError as `submit` does."""
        ...

    def close(self) -> None: ...


class RunsPlans(Protocol):
    """What an executor needs of a loaded model in its process."""

    @property
    def copy_bytes_per_s(self) -> float: ...

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        """Carry out a plan and wait for it."""
        ...

    def skip(self, plan: Plan) -> None:
        """Take note of a plan that is not carried out, because one before it failed."""
        ...


class InProcessExecutor:
    """Runs each plan in the calling thread, when it is submitted.

    check_device: raises if the device cannot be used any more; asked after a step that raised.
    """

    def __init__(self, built: RunsPlans, check_device: Callable[[], None] | None = None) -> None:
        self._built: RunsPlans | None = built
        self._check_device = check_device or (lambda: None)
        self._results: deque[StepResult] = deque()
        self._last_error = ""

    def start(self, on_result: Callable[[], None]) -> None:
        pass

    def copy_bytes_per_s(self) -> float:
        assert self._built is not None, "the executor is closed"
        return self._built.copy_bytes_per_s

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        assert self._built is not None, "the executor is closed"
        if self._results and self._results[-1].error is not None:
            # Built on a plan that failed: the rows are not as this one takes them to be.
            self._results.append(failed_step(plan, "a step before it failed"))
            self._built.skip(plan)
            return
        try:
            self._results.append(self._built.run(plan, masks))
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
            self._results.append(failed_step(plan, message))
            if not isinstance(error, Exception):
                raise  # an interrupt is the caller's; anything else fails requests, not the engine
            if message != self._last_error:  # not again for each part in which it is repeated
                logger.debug("step %d raised", plan.step_id, exc_info=error)
            self._last_error = message
            self._give_up_if_lost(message)

    def is_ready(self) -> bool:
        return len(self._results) > 0

    def next_result(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()
        self._built = None

    def _give_up_if_lost(self, message: str) -> None:
        try:
            self._check_device()
        except Exception as error:
            raise EngineError(
                f"a step raised {message} and the device cannot be used any more ({error});"
                " restart the process."
            ) from error


def check_usable(device: "torch.device") -> None:
    """Raise if a device cannot be used any more. An error that poisons it (an illegal access, an
    assertion in a kernel) is raised by every later call; one that does not (out of memory, a wrong
    argument) leaves it usable."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def failed_step(plan: Plan, error: str) -> StepResult:
    """Make the result of a step that was not carried out."""
    nothing = np.empty((0, 1), np.int32)
    return StepResult(plan.step_id, nothing, nothing[:, 0], error=error)
