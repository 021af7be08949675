"""An executor without a device: plans take virtual time, and rows end when they are to."""

from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from quire.base.clock import Clock
from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult
from quire.scheduler.scheduler import Scheduler
from quire.tools.simulate.arrivals import OTHER, STOP
from quire.tools.step_times import StepTimes

NEVER = np.iinfo(np.int64).max


class VirtualExecutor:
    """Carries out the scheduler's plans one after the other. outputs: by request id, the number of
    tokens after which a sequence ends."""

    def __init__(
        self, scheduler: Scheduler, times: StepTimes, clock: Clock, outputs: Mapping[str, int]
    ) -> None:
        self._table = scheduler.rows.table
        self._times, self._clock, self._outputs = times, clock, outputs
        self._length = np.zeros(self._table.num_rows, np.int64)  # [rows] tokens known
        self._last = np.full(self._table.num_rows, NEVER)  # [rows] tokens known at the end
        self._results: deque[tuple[float, StepResult]] = deque()
        self._ends_s = 0.0

    @property
    def next_s(self) -> float | None:
        """When the oldest plan in flight is done."""
        return self._results[0][0] if self._results else None

    def start(self, on_result: Callable[[], None]) -> None:
        pass

    def copy_bytes_per_s(self) -> float:
        return self._times.copy_bytes_per_s

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        begins_s = max(self._ends_s, self._clock.now())
        idle_s = begins_s - self._ends_s
        self._ends_s, duration_s = self._times.carry_out(plan, begins_s, idle_s)
        num = len(plan.sample_rows)
        answer = StepResult(
            plan.step_id, self._sample(plan), np.ones(num, np.int32),
            duration_s=duration_s,
        )  # fmt: skip
        self._results.append((self._ends_s, answer))

    def is_ready(self) -> bool:
        return bool(self._results) and self._results[0][0] <= self._clock.now()

    def next_result(self) -> StepResult:
        return self._results.popleft()[1]

    def close(self) -> None:
        self._results.clear()

    def _sample(self, plan: Plan) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """Return the stop token for rows that get their last one, some other for all others."""
        for start in plan.started:
            request_id = self._table.sequences[start.row].request.request_id
            self._length[start.row] = len(start.token_ids)
            self._last[start.row] = start.num_prompt_tokens + self._outputs[request_id]
        for fork in plan.forked:
            self._length[fork.child] = self._length[fork.parent]
            self._last[fork.child] = self._last[fork.parent]
        for piece in plan.host_tokens:
            self._length[piece.row] = piece.position + len(piece.token_ids)
        rows = plan.sample_rows
        self._length[rows] += 1
        tokens = np.where(self._length[rows] >= self._last[rows], STOP, OTHER)
        return tokens.astype(np.int32)[:, None]
