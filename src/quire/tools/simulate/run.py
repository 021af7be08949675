"""Run a simulation: a clock that jumps from event to event.

The schedulers are the engine's own, so a run shows their real decisions. The duration of steps is
an estimate. With several replicas, requests are routed as `quire serve` routes them.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.base.clock import FakeClock
from quire.base.errors import EngineError, RequestError
from quire.engine.wire.core_choice import CoreChoice, OpenLoad
from quire.scheduler.scheduler import Scheduler
from quire.tools.simulate.arrivals import Arrival, Message
from quire.tools.simulate.replica import Replica, SimulatedCore
from quire.tools.simulate.served import REASONS, Float64, Ledger, Served
from quire.tools.step_times import StepTimes

ANY_VOCABULARY = 1 << 31
Caused = Arrival | list[Arrival] | None  # one arrival, some, or none
NextArrival = Callable[[str, float], Caused]
Incoming = Arrival | Message
CoresOf = Callable[[str], Collection[int]]  # returns the cores that may get a request, by its id


@dataclass
class Run:
    """The record of a run. `by_id` has all requests; each replica has one of `listeners`."""

    by_id: dict[str, Served] = field(default_factory=dict)
    listeners: list[Ledger] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def num_steps(self) -> int:
        return sum(len(each.series.at_s) for each in self.listeners)

    @property
    def num_sequence_steps(self) -> int:
        """The rows of all steps."""
        return sum(sum(each.series.num_rows) for each in self.listeners)

    @property
    def num_output(self) -> int:
        return sum(served.num_output for served in self.by_id.values())

    @property
    def tokens_per_s(self) -> float:
        return self.num_output / self.duration_s

    @property
    def num_preemptions(self) -> int:
        return sum(served.num_preemptions for served in self.by_id.values())

    @property
    def num_lost_tokens(self) -> int:
        return sum(each.num_lost_tokens for each in self.listeners)

    @property
    def used(self) -> float:
        """The mean share of the pools in use, over steps."""
        shares = [share for each in self.listeners for share in each.series.used]
        return sum(shares) / max(1, len(shares))

    @property
    def most_used(self) -> int:
        return max(each.most_used for each in self.listeners)

    @property
    def gaps_s(self) -> Float64:
        """All times between two tokens of a sequence."""
        return np.concatenate(
            [np.empty(0), *(gaps for each in self.listeners for gaps in each.gaps)]
        )

    @property
    def waits(self) -> dict[str, float]:
        """Waiting time before admissions, in requests x seconds, by reason."""
        return {name: sum(each.waits[name] for each in self.listeners) for name in REASONS}


def simulate(
    scheduler: Scheduler,
    arrivals: Iterable[Incoming],
    times: StepTimes,
    then: NextArrival = lambda request_id, now: None,
) -> Run:
    """Serve arrivals with one scheduler; see `run_all`."""
    clock, run = FakeClock(), Run()
    replica = Replica(scheduler, times, clock, 0, run.by_id, ANY_VOCABULARY)
    in_order = sorted(arrivals, key=lambda coming: coming.at_s)
    return run_all([replica], in_order, clock, run, then)


@dataclass(frozen=True)
class Routing:
    """How arrivals are given to cores. block_size: tokens of a block for routing by prefix; 0
    disables it. cores_of: returns the cores that may get a request; None for all."""

    block_size: int = 0
    cores_of: CoresOf | None = None


def run_all(
    cores: Sequence[SimulatedCore],
    arrivals: Iterable[Incoming],
    clock: FakeClock,
    run: Run,
    then: NextArrival = lambda request_id, now: None,
    progress: Callable[[int], None] = lambda num_ended: None,
    routing: Routing = Routing(),
    refused: NextArrival = lambda request_id, now: None,
) -> Run:
    """Serve arrivals, which are ordered by time, until all of them have ended.

    clock, run: objects of the cores.
    then: returns the arrivals that a request's end causes, such as a conversation's next turn.
    refused: returns the arrivals that a request's refusal causes."""
    run.listeners = [core.listener for core in cores]
    choice = CoreChoice(len(cores), routing.block_size)
    world = _World(cores, arrivals, clock, run, choice, routing.cores_of, refused)
    return world.run(then, progress)


class _World:
    def __init__(
        self,
        cores: Sequence[SimulatedCore],
        arrivals: Iterable[Incoming],
        clock: FakeClock,
        run: Run,
        choice: CoreChoice,
        cores_of: CoresOf | None,
        refused: NextArrival,
    ) -> None:
        self._cores_of: CoresOf = cores_of or (lambda request_id: range(len(cores)))
        self._cores, self._clock, self._run, self._choice = cores, clock, run, choice
        self._arrivals, self._refused = iter(arrivals), refused
        self._next = next(self._arrivals, None)
        self._more: list[tuple[float, int, Arrival]] = []  # arrivals caused by other requests
        self._loads = [OpenLoad() for _ in cores]
        self._wake_s: list[float | None] = [None] * len(cores)
        self._num_more = 0

    def run(self, then: NextArrival, progress: Callable[[int], None]) -> Run:
        while (now := self._due_s()) is not None:
            if now > self._clock.now_s:
                self._clock.now_s = now
            self._take_arrivals(now)
            for number, core in enumerate(self._cores):
                wake_s = self._wake_s[number]
                if wake_s is None or wake_s > now:
                    continue
                core.turn()
                if core.listener.ended:
                    self._end(number, core.listener.take_ended(), now, then, progress)
                self._wake_s[number] = core.next_s()
        self._check()
        self._run.duration_s = self._clock.now_s
        return self._run

    def _due_s(self) -> float | None:
        """Return the time of the next event."""
        due_s = None if self._next is None else self._next.at_s
        if self._more and (due_s is None or self._more[0][0] < due_s):
            due_s = self._more[0][0]
        for wake_s in self._wake_s:
            if wake_s is not None and (due_s is None or wake_s < due_s):
                due_s = wake_s
        return due_s

    def _take_arrivals(self, now: float) -> None:
        while True:
            coming: Incoming | None = self._next
            if self._more and (coming is None or self._more[0][0] < coming.at_s):
                if self._more[0][0] > now:
                    return
                self._add(heapq.heappop(self._more)[2])
                continue
            if coming is None or coming.at_s > now:
                return
            self._next = next(self._arrivals, None)
            if isinstance(coming, Arrival):
                self._add(coming)
                continue
            for number, core in enumerate(self._cores):
                core.control(coming.control)
                self._wake_s[number] = core.next_s()

    def _add(self, arrival: Arrival) -> None:
        request, number = arrival.request, 0
        served = Served(arrival.at_s, num_prompt=len(request.prompt_token_ids))
        if len(self._cores) > 1:
            loads = {core: self._loads[core].total for core in self._cores_of(request.request_id)}
            number = self._choice.choose(request, loads)
            self._loads[number].add(request)
        core = self._cores[number]
        try:
            core.add(request, arrival.num_output, served)
        except RequestError:
            self._loads[number].remove(request.request_id)
            self._push(self._refused(request.request_id, self._clock.now_s))
        self._wake_s[number] = core.next_s()

    def _push(self, caused: Caused) -> None:
        for arrival in as_list(caused):
            heapq.heappush(self._more, (arrival.at_s, self._num_more, arrival))
            self._num_more += 1

    def _end(
        self,
        number: int,
        ended: list[str],
        now: float,
        then: NextArrival,
        progress: Callable[[int], None],
    ) -> None:
        for request_id in ended:
            self._loads[number].remove(request_id)
            self._push(then(request_id, now))
        progress(len(ended))

    def _check(self) -> None:
        """Raise EngineError if a request never ended: a bug of the scheduler or the simulation."""
        left = [name for core in self._cores for name in core.listener.open]
        if left:
            raise EngineError(f"{len(left)} requests were never served, {left[0]!r} among them.")


def as_list(caused: Caused) -> list[Arrival]:
    """Return the arrivals that a request's end or refusal causes."""
    if caused is None:
        return []
    return [caused] if isinstance(caused, Arrival) else caused
