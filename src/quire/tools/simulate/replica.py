"""One engine core on a virtual device: core, scheduler and memory of production, virtual time.

The seam for other engines is `SimulatedCore`. A baseline with batching or memory of its own is
another class of that form, with the same workloads, step times and measures. The executor has no
device: plans take virtual time, and rows end when their requests say so.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from quire.base.clock import Clock, FakeClock
from quire.base.errors import RequestError
from quire.base.masks import MaskPromise
from quire.base.messages import Control, Request
from quire.base.plan import Plan, StepResult
from quire.base.requests.validation import RequestLimits
from quire.engine.attachments.stores import StoresAttachment
from quire.engine.connectors.connections import OpenStores
from quire.engine.executors.executor import Executor
from quire.engine.loop.core import EngineCore
from quire.runner.setup.step_size import StepBudget
from quire.scheduler.scheduler import Scheduler
from quire.tools.simulate.arrivals import OTHER, STOP
from quire.tools.simulate.served import Ledger, Listener, Served
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


ANY_LOGPROBS = -1


class SimulatedCore(Protocol):
    """What a run asks of an engine. Nothing of it waits."""

    @property
    def listener(self) -> Ledger:
        """What became of its requests."""
        ...

    def add(self, request: Request, num_output: int, served: Served) -> None:
        """Take a request, which ends after so many tokens. Raises RequestError."""
        ...

    def control(self, message: Control) -> None: ...

    def turn(self) -> None:
        """Do what is to be done at this moment of the clock."""
        ...

    def next_s(self) -> float | None:
        """Return when there is something to do by itself; None: not before a message comes."""
        ...


class VirtualStores(OpenStores, Protocol):
    """A core's stores in virtual time."""

    @property
    def next_answer_s(self) -> float | None:
        """When the next answer comes; None if nothing was asked."""
        ...


class Replica:
    """A core of ours. clock: of the whole run. wrap: puts an executor around the one without a
    device, for what that does not know."""

    def __init__(
        self,
        scheduler: Scheduler,
        times: StepTimes,
        clock: FakeClock,
        number: int,
        by_id: dict[str, Served],
        vocab_size: int,
        step_budget: StepBudget | None = None,
        wrap: Callable[[VirtualExecutor], Executor] = lambda executor: executor,
    ) -> None:
        self._stores: VirtualStores | None = None
        self._outputs: dict[str, int] = {}
        self._clock, self._times, self._scheduler = clock, times, scheduler
        self._executor = VirtualExecutor(scheduler, times, clock, self._outputs)
        limits = RequestLimits(
            vocab_size, scheduler.max_model_len, ANY_LOGPROBS, scheduler.rows.table.num_rows
        )
        self.core = EngineCore(scheduler, wrap(self._executor), clock, limits, step_budget)
        self.listener = Listener(scheduler, number, by_id)
        self.core.subscribe(self.listener)
        self._plans_s: float | None = None  # when the host has made the next plan

    def connect(self, stores: VirtualStores) -> None:
        """Let these carry out what the scheduler orders of its stores."""
        self._stores = stores
        keeps = False  # at the end: there is nobody to come
        self.core.attach(StoresAttachment(stores, self._clock, keeps_at_end=keeps))

    def add(self, request: Request, num_output: int, served: Served) -> None:
        self._outputs[request.request_id] = num_output
        self.listener.begin(request.request_id, served)
        try:
            self.core.add(request)
        except RequestError as error:
            del self._outputs[request.request_id], self.listener.open[request.request_id]
            served.error = str(error)
            raise
        self._wake()

    def control(self, message: Control) -> None:
        self.core.control(message)
        self._wake()

    def turn(self) -> None:
        if self._plans_s is not None and self._clock.now() < self._plans_s:
            return
        self._plans_s = None
        self.core.advance()
        for request_id in self.listener.ended:
            self._outputs.pop(request_id, None)
        self._wake()

    def close(self) -> None:
        self.core.close()

    def _wake(self) -> None:
        """The host begins to plan, unless it does already or has nothing to plan."""
        if self._plans_s is None and not self.core.num_in_flight and self.core.rest_s() == 0.0:
            step_id = self._scheduler.planner.next_step_id
            self._plans_s = self._times.plans_s(step_id, self._clock.now())

    def next_s(self) -> float | None:
        if self._plans_s is not None:
            return self._plans_s
        rest_s, now = self.core.rest_s(), self._clock.now()
        times = []
        if rest_s is not None:  # a time that rounding took away would never come
            times = [max(now + rest_s, math.nextafter(now, math.inf)) if rest_s else now]
        if self._executor.next_s is not None:
            times.append(max(now, self._executor.next_s))
        if self._stores is not None and self._stores.next_answer_s is not None:
            times.append(max(now, self._stores.next_answer_s))
        return min(times, default=None)
