"""Executors carry out plans in the order of submission and return their results in that order."""

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
    """Interface through which the core runs plans: in-process, on a thread, by ranks or simulated.

    A result may be ready when `submit` returns, or later.
    """

    def start(self, on_result: Callable[[], None]) -> None:
        """Set the callback for results that are ready after `submit`; any thread may call it."""
        ...

    def copy_bytes_per_s(self) -> float:
        """Return the rate of block copies to host memory; 0.0 if blocks cannot be copied."""
        ...

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        """Submit a plan. A plan that fails returns a result with an error. Plans submitted after it
        fail without running until no result is outstanding.

        masks: tokens that the plan's masked rows may choose; awaited before sampling.
        Raises EngineError if no further plan can run."""
        ...

    def is_ready(self) -> bool:
        """Return whether `next_result` returns without waiting."""
        ...

    def next_result(self) -> StepResult:
        """Wait for the oldest outstanding plan and return its result. Raises EngineError if no
        further plan can run."""
        ...

    def close(self) -> None: ...


class RunsPlans(Protocol):
    """Interface of a model loaded in the executor's process."""

    @property
    def copy_bytes_per_s(self) -> float: ...

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        """Run a plan and wait for its result."""
        ...

    def skip(self, plan: Plan) -> None:
        """Note a plan that is not run because an earlier plan failed. Stages pass this on."""
        ...


class InProcessExecutor:
    """Executor that runs each plan in the calling thread, within `submit`.

    check_device: called after a step that raised; raises if the device is no longer usable.
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
            # This plan assumes row states that the failed plan did not produce.
            self._results.append(failed_step(plan, "a step before it failed"))
            self._built.skip(plan)
            return
        try:
            self._results.append(self._built.run(plan, masks))
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
            self._results.append(failed_step(plan, message))
            if not isinstance(error, Exception):
                raise  # interrupts reach the caller; other errors fail requests, not the engine
            if message != self._last_error:  # once, not for each part of a repeated step
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
    """Raise if a device is no longer usable. After an illegal access or a failed assertion in a
    kernel, every later call raises. After out of memory or a wrong argument, the device still
    works."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def failed_step(plan: Plan, error: str) -> StepResult:
    """Return an empty result with an error, for a step that failed or was skipped."""
    nothing = np.empty((0, 1), np.int32)
    return StepResult(plan.step_id, nothing, nothing[:, 0], error=error)
