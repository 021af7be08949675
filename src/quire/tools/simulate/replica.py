"""One engine core on a virtual device: core, scheduler and memory of production, virtual time.

The seam for other engines: what the run needs of one is `SimulatedCore`. A baseline with batching
or memory of its own is another class of that form, beside the same workloads, step times and
measures.
"""

import math
from collections.abc import Callable
from typing import Protocol

from quire.base.clock import FakeClock
from quire.base.errors import RequestError
from quire.base.messages import Control, Request
from quire.base.validation import RequestLimits
from quire.engine.attachments.stores import StoresAttachment
from quire.engine.connectors.connections import OpenStores
from quire.engine.executors.executor import Executor
from quire.engine.loop.core import EngineCore
from quire.runner.step_size import StepBudget
from quire.scheduler.scheduler import Scheduler
from quire.tools.simulate.executor import VirtualExecutor
from quire.tools.simulate.served import Ledger, Listener, Served
from quire.tools.step_times import StepTimes

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
