"""Shared code of the baselines: a queue, a step in progress, and the end of requests."""

from collections import deque
from dataclasses import dataclass, field

from quire.base.clock import FakeClock
from quire.base.errors import RequestError
from quire.base.messages import Control, Request
from quire.tools.simulate.served import Ledger, Served
from quire.tools.step_times import Roofline, StepLoad


@dataclass
class Job:
    """A request. num: its sequences, all of which give num_output tokens."""

    request_id: str
    served: Served
    num_prompt: int
    num_output: int
    num: int

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_output


@dataclass
class Memory:
    """Uses of memory, in slots times seconds, while a request waited.

    live: keys and values.
    later: reserved for tokens that came.
    never: reserved for tokens that did not come.
    other: everything else, also free slots.
    """

    live: float = 0.0
    later: float = 0.0
    never: float = 0.0
    other: float = 0.0

    def add(self, live: float, promised: float, reserved: float, all_: float, for_s: float) -> None:
        """Add an interval. promised: slots that will be live before their sequences end."""
        self.live += live * for_s
        self.later += (promised - live) * for_s
        self.never += (reserved - promised) * for_s
        self.other += (all_ - reserved) * for_s

    @property
    def shares(self) -> dict[str, float]:
        parts = vars(self)
        total = sum(parts.values()) or 1.0
        return {name: value / total for name, value in parts.items()}


@dataclass
class Batches:
    """Requests and sequences that were computed, times seconds."""

    requests_s: float = 0.0
    busy_s: float = 0.0
    memory: Memory = field(default_factory=Memory)

    @property
    def mean(self) -> float:
        """Mean number of requests in a step."""
        return self.requests_s / (self.busy_s or 1.0)


class BaselineCore:
    """A `SimulatedCore` that does one thing at a time, which ends at a known moment."""

    def __init__(
        self,
        times: Roofline,
        clock: FakeClock,
        by_id: dict[str, Served],
        num_slots: int,
        max_model_len: int,
    ) -> None:
        self.listener = Ledger(0, by_id)
        self.batches = Batches()
        self.queue: deque[Job] = deque()
        self.times, self.clock = times, clock
        self.num_slots, self.max_model_len = num_slots, max_model_len
        self.ends_s: float | None = None  # of the step in progress

    def add(self, request: Request, num_output: int, served: Served) -> None:
        params, num_prompt = request.params, len(request.prompt_token_ids)
        num = params.beam_width or params.n if params.use_beam_search else params.n
        job = Job(request.request_id, served, num_prompt, num_output, num)
        self.listener.begin(request.request_id, served)
        if problem := self.problem(job):
            del self.listener.open[request.request_id]
            served.error = problem
            raise RequestError(problem)
        self.queue.append(job)

    def problem(self, job: Job) -> str:
        """Return why a request can never be served; empty if it can."""
        if job.num_tokens > self.max_model_len:
            return f"{job.num_tokens} tokens are more than {self.max_model_len}"
        return ""

    def control(self, message: Control) -> None:
        raise NotImplementedError("baselines take requests only")

    def turn(self) -> None:
        now = self.clock.now()
        if self.ends_s is not None:
            if now < self.ends_s:
                return
            self.ends_s = None
            self.end(now)
        self.ends_s = self.begin(now)

    def begin(self, now: float) -> float | None:
        """Begin with the next step; returns when it ends, or None if there is nothing to do."""
        raise NotImplementedError

    def end(self, now: float) -> None:
        """See to what the step that ends now gave."""
        raise NotImplementedError

    def next_s(self) -> float | None:
        if self.ends_s is not None:
            return self.ends_s
        return self.clock.now() if self.queue else None

    def admit(self, job: Job, now: float) -> None:
        """Note that a request is computed from now on."""
        job.served.admitted_s = now

    def finish(self, job: Job, now: float) -> None:
        """Note that a request has ended."""
        served = self.listener.open.pop(job.request_id)
        served.finished_s, served.num_output, served.reason = now, job.num_output, "length"
        if served.first_token_s < 0:
            served.first_token_s = now
        self.listener.ended.append(job.request_id)

    def seconds(self, load: StepLoad) -> float:
        return self.times.seconds_of(lambda window: load)
