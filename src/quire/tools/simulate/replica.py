"""One simulated engine core: production's core, scheduler and memory, on a virtual device.

`SimulatedCore` is the interface for other engines. A baseline with its own batching or memory is
another class with this interface, and uses the same workloads, step times and metrics. The executor
has no device: plans take virtual time, and sequences end at their requests' output lengths.
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
    """Executes plans one after the other in virtual time.

    outputs: by request id, the number of tokens after which a sequence ends."""

    def __init__(
        self, scheduler: Scheduler, times: StepTimes, clock: Clock, outputs: Mapping[str, int]
    ) -> None:
        self._table = scheduler.rows.table
        self._times, self._clock, self._outputs = times, clock, outputs
        self._length = np.zeros(self._table.num_rows, np.int64)  # [rows] known tokens
        self._last = np.full(self._table.num_rows, NEVER)  # [rows] known tokens at the end
        self._results: deque[tuple[float, StepResult]] = deque()
        self._ends_s = 0.0

    @property
    def next_s(self) -> float | None:
        """The time at which the oldest plan in flight is done."""
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
        """Return the stop token for rows at their last token, another token for other rows."""
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
    """The interface of a simulated engine. No method waits."""

    @property
    def listener(self) -> Ledger:
        """The record of its requests' progress."""
        ...

    def add(self, request: Request, num_output: int, served: Served) -> None:
        """Add a request that ends after `num_output` tokens. Raises RequestError."""
        ...

    def control(self, message: Control) -> None: ...

    def turn(self) -> None:
        """Do the work that is due at the clock's present time."""
        ...

    def next_s(self) -> float | None:
        """Return the time of the next work; None if only a message can cause work."""
        ...


class VirtualStores(OpenStores, Protocol):
    """A core's stores in virtual time."""

    @property
    def next_answer_s(self) -> float | None:
        """The time of the next answer; None if no order is open."""
        ...


class Replica:
    """A core of quire in a simulation.

    clock: clock of the whole run. wrap: wraps the virtual executor, to add features it lacks."""

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
        self._plans_s: float | None = None  # time at which the host finishes the next plan

    def connect(self, stores: VirtualStores) -> None:
        """Attach stores that carry out the scheduler's orders."""
        self._stores = stores
        keeps = False  # no later engine would use blocks written at the end
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
        """Start planning, unless the host is planning already or has nothing to plan."""
        if self._plans_s is None and not self.core.num_in_flight and self.core.rest_s() == 0.0:
            step_id = self._scheduler.planner.next_step_id
            self._plans_s = self._times.plans_s(step_id, self._clock.now())

    def next_s(self) -> float | None:
        if self._plans_s is not None:
            return self._plans_s
        rest_s, now = self.core.rest_s(), self._clock.now()
        times = []
        if rest_s is not None:  # a wait that rounding makes 0 would repeat for ever
            times = [max(now + rest_s, math.nextafter(now, math.inf)) if rest_s else now]
        if self._executor.next_s is not None:
            times.append(max(now, self._executor.next_s))
        if self._stores is not None and self._stores.next_answer_s is not None:
            times.append(max(now, self._stores.next_answer_s))
        return min(times, default=None)
