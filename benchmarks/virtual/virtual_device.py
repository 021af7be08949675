"""A device without arithmetic, in real time: each step takes a fixed time and gives random tokens.

A step starts at the end of the step before it or when it is submitted, whichever is later. Its
result is ready at its end. Between the end of a step and the start of the next one the device waits
for the host.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from benchmarks.virtual.dry_run import VOCAB_SIZE
from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult


class VirtualDevice:
    """An executor. step_s: how long each step takes; idle_s: how long it has waited for the host
    between steps; busy_s: how long it has worked."""

    def __init__(self, step_s: float, seed: int = 0) -> None:
        self.step_s = step_s
        self.idle_s = self.busy_s = 0.0
        self._rng = np.random.default_rng(seed)
        self._ends: deque[float] = deque()
        self._plans: deque[Plan] = deque()
        self._last_end_s = 0.0
        self._alarms: SimpleQueue[float | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, on_result: Callable[[], None]) -> None:
        """Start a thread that rings at the end of each step."""
        alarms = self._alarms

        def ring() -> None:
            while (end_s := alarms.get()) is not None:
                sleep_until(end_s)
                on_result()

        self._thread = threading.Thread(target=ring, name="virtual-device", daemon=True)
        self._thread.start()

    def copy_bytes_per_s(self) -> float:
        return 0.0

    def reset(self) -> None:
        """Count from now on, at the end of the step that is on its way."""
        self.idle_s = self.busy_s = 0.0

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        now = time.monotonic()
        start_s = max(self._last_end_s, now)
        if self._last_end_s:
            self.idle_s += start_s - self._last_end_s
        self.busy_s += self.step_s
        self._last_end_s = start_s + self.step_s
        self._ends.append(self._last_end_s)
        self._plans.append(plan)
        self._alarms.put(self._last_end_s)

    def is_ready(self) -> bool:
        return bool(self._ends) and time.monotonic() >= self._ends[0]

    def next_result(self) -> StepResult:
        sleep_until(self._ends.popleft())
        plan = self._plans.popleft()
        num = len(plan.sample_rows)
        token_ids = self._rng.integers(0, VOCAB_SIZE, (num, 1), np.int32)
        return StepResult(plan.step_id, token_ids, np.ones(num, np.int32), duration_s=self.step_s)

    def close(self) -> None:
        if self._thread is not None:
            self._alarms.put(None)
            self._thread.join()
            self._thread = None


def sleep_until(end_s: float) -> None:
    """Sleep until a time of the monotonic clock; wakes up some 0.06 ms late."""
    left_s = end_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
