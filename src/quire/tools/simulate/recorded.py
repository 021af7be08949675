"""Use a recording as a workload and as measured steps.

The recording is replayed once. Its requests, with arrival times and output lengths, become the
workload. Its plans with their durations become the input of a fit. Without tokens, prompts are
built from their blocks' digests: equal digests give equal tokens, so shared prefixes stay shared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from quire.base.clock import FakeClock
from quire.base.errors import ConfigError
from quire.base.events import Event, Finished, Planned
from quire.base.messages import AdapterReady, Control, GrammarReady, MeasuredRates, Request
from quire.base.plan import Plan
from quire.engine.recording.calls import ADD, CONTROL, SCHEDULE, UPDATE
from quire.engine.recording.files import Segment, read_recording
from quire.scheduler.scheduler import Scheduler
from quire.tools.replay import Outcome, Step, replay_all, restored
from quire.tools.simulate.arrivals import STOP, Arrival, Message
from quire.tools.simulate.replica import Replica
from quire.tools.simulate.run import ANY_VOCABULARY, Incoming, Run, run_all
from quire.tools.step_fitting import Fitted, Measured, fit_steps
from quire.tools.traces import OWN
from quire.tools.workloads import token_ids_of

MAX_OUTPUT = 1 << 30  # output length of a request that something else ends


@dataclass
class RecordedStep:
    """A plan, with the times of its creation and of its result."""

    plan: Plan
    planned_s: float
    taken_s: float = 0.0
    duration_s: float = 0.0


@dataclass
class RecordedRequest:
    """A request and its outcome."""

    at_s: float
    request: Request
    num_output: int = 0
    num_sequences: int = 1
    reason: str = ""
    digests: list[bytes] = field(default_factory=list)


@dataclass
class Recorded:
    """The contents of a recording. `controls` are messages with their times."""

    has_tokens: bool
    block_size: int
    depth: int
    steps: list[RecordedStep] = field(default_factory=list)
    requests: list[RecordedRequest] = field(default_factory=list)
    controls: list[tuple[float, Control]] = field(default_factory=list)
    outcome: Outcome = field(default_factory=Outcome)
    first: Segment | None = None

    @property
    def begins_s(self) -> float:
        return self.requests[0].at_s if self.requests else 0.0

    @property
    def copy_bytes_per_s(self) -> float:
        rates = [each for _, each in self.controls if isinstance(each, MeasuredRates)]
        return max((each.copy_bytes_per_s for each in rates), default=0.0)

    def measured(self) -> list[Measured]:
        """Return the steps for a fit.

        The host's time is known only between two plans that share a row, with no step in flight."""
        found, last_s = list[Measured](), 0.0
        for step, after in zip(self.steps, [*self.steps[1:], None], strict=True):
            idle_s, last_s = max(0.0, step.planned_s - last_s), step.taken_s
            host_s = None
            if after is not None and self.depth == 1 and step.duration_s > 0:
                fresh = {start.row for start in after.plan.started}
                if set(step.plan.rows.tolist()) & set(after.plan.rows.tolist()) - fresh:
                    host_s = after.planned_s - step.planned_s - step.duration_s
            found.append(Measured(step.plan, step.duration_s, host_s, idle_s))
        return found

    def fit(self, model: str = "", device: str = "") -> Fitted:
        """Fit step times. Raises ConfigError for too few steps."""
        return fit_steps(self.measured(), self.copy_bytes_per_s, model, device)

    def prompt(self, place: int, vocab_size: int) -> list[int]:
        """Return a request's prompt, or substitute tokens with the same shared prefixes."""
        each = self.requests[place]
        known = each.request.prompt_token_ids
        if self.has_tokens:
            return known
        size = self.block_size
        blocks = each.digests[: len(known) // size]
        parts = [(int.from_bytes(digest[:6], "little") % OWN, size) for digest in blocks]
        left = len(known) - len(blocks) * size
        if left:
            parts.append((OWN + place, left))
        return token_ids_of(parts, vocab_size)


def is_recording(path: Path) -> bool:
    """Return whether a path is a recording's directory or one of its segments."""
    if path.is_dir():
        return True
    try:
        with path.open("rb") as file:
            return file.read(15) == b"quire recording"
    except OSError:
        return False


def read_recorded(path: Path) -> Recorded:
    """Read a recording. Raises ConfigError, and EngineError if it cannot be replayed."""
    found: list[Recorded] = []
    by_step: dict[int, RecordedStep] = {}
    by_id: dict[str, RecordedRequest] = {}
    by_arrival: dict[int, RecordedRequest] = {}
    num_arrivals = 0

    def show(segment: Segment, step: Step, scheduler: Scheduler) -> None:
        nonlocal num_arrivals
        if not found:
            settings = segment.header["settings"]
            depth = settings.get("pipeline_depth") or 1
            has_tokens = bool(segment.header["has_tokens"])
            found.append(Recorded(has_tokens, scheduler.memory.block_size, depth, first=segment))
        recorded, call = found[0], step.call
        if call.kind == ADD and not call.is_refused:
            request = RecordedRequest(call.now, call.value)
            recorded.requests.append(request)
            by_id[call.value.request_id] = by_arrival[num_arrivals] = request
            num_arrivals += call.value.params.num_samples
        elif call.kind == CONTROL:
            recorded.controls.append((call.now, call.value))
        elif call.kind == SCHEDULE and step.plan is not None:
            made = by_step[step.plan.step_id] = RecordedStep(step.plan, call.now)
            recorded.steps.append(made)
        elif call.kind == UPDATE and call.value.step_id in by_step:
            made = by_step.pop(call.value.step_id)
            made.taken_s, made.duration_s = call.now, call.value.duration_s
        for arrival, digests in call.digests:
            if arrival in by_arrival:
                by_arrival[arrival].digests += digests
        for event in step.events:
            if isinstance(event, Finished) and event.request_id in by_id:
                ended = by_id.pop(event.request_id)
                ended.num_output, ended.reason = event.num_output_tokens, event.reason
                ended.num_sequences = max(1, event.num_sequences)

    outcome = replay_all(read_recording(path), show)
    outcome.note_difference()
    if not found or not found[0].requests:
        raise ConfigError(f"no request came in the recording {path}.")
    found[0].outcome = outcome
    found[0].steps = [each for each in found[0].steps if each.taken_s]
    return found[0]


class RecordedWork:
    """The answered requests of a recording, optionally scaled to another mean rate.

    exact: includes all requests and control messages, at the recorded times."""

    name = "a recording"

    def __init__(
        self,
        recorded: Recorded,
        vocab_size: int,
        rate_per_s: float | None = None,
        exact: bool = False,
        max_requests: int | None = None,
    ) -> None:
        self._recorded, self._exact, self._vocab_size = recorded, exact, vocab_size
        places = range(len(recorded.requests))
        usable = [i for i in places if exact or _is_usable(recorded.requests[i])]
        self._places = usable[:max_requests]
        if not self._places:
            raise ConfigError("no request of the recording was answered within it.")
        times = [recorded.requests[i].at_s - recorded.begins_s for i in self._places]
        span_s = times[-1] - times[0]
        own_rate = len(times) / span_s if span_s > 0 else float("inf")
        self.num = len(times)
        self.rate_per_s = own_rate if rate_per_s is None else rate_per_s
        scale = 1.0 if rate_per_s is None or span_s <= 0 else own_rate / rate_per_s
        self._times = [(at_s - times[0] * (not exact)) * scale for at_s in times]

    def arrivals(self) -> Iterator[Incoming]:
        coming: list[tuple[float, int, int | Control]] = [
            (at_s, 1, i) for at_s, i in zip(self._times, self._places, strict=True)
        ]
        if self._exact:
            begins_s = self._recorded.begins_s
            coming += [(at_s - begins_s, 0, each) for at_s, each in self._recorded.controls]
        for at_s, _, each in sorted(coming, key=lambda item: item[0]):
            if not isinstance(each, int):
                if not isinstance(each, GrammarReady | AdapterReady):
                    yield Message(at_s, each)
                continue
            yield self._arrival(at_s, each)

    def then(self, request_id: str, now: float) -> Arrival | None:
        return None

    def refused(self, request_id: str, now: float) -> Arrival | None:
        return None

    def _arrival(self, at_s: float, place: int) -> Arrival:
        each = self._recorded.requests[place]
        own = {"request_id": f"{place}"} if not self._exact else {}
        prompt = self._recorded.prompt(place, self._vocab_size)
        request = msgspec.structs.replace(
            each.request, prompt_token_ids=prompt, stop_token_ids=(STOP,), eos_token_ids=(),
            grammar="", is_held_back=False, awaits_adapter=False, received_s=0.0, core_id=None,
            **own,
        )  # fmt: skip
        num = -(-each.num_output // each.num_sequences)
        if self._exact and each.reason not in ("stop", "length"):
            num = MAX_OUTPUT
        return Arrival(at_s, request, max(1, num))


def _is_usable(each: RecordedRequest) -> bool:
    """Return whether a request can be repeated: it is plain, and was answered."""
    request = each.request
    is_plain = not (request.is_open or request.params.use_beam_search) and request.pin_s is None
    return is_plain and each.num_output > 0


class RecordedTimes:
    """The recorded times, for a scheduler that makes the recorded plans."""

    def __init__(self, recorded: Recorded) -> None:
        begins_s = recorded.begins_s
        self.copy_bytes_per_s = 0.0  # the recorded messages contain it
        self._planned_s = {e.plan.step_id: e.planned_s - begins_s for e in recorded.steps}
        self._taken_s = {e.plan.step_id: e.taken_s - begins_s for e in recorded.steps}
        self._last_s = max(self._taken_s.values(), default=0.0)

    def plans_s(self, step_id: int, free_s: float) -> float:
        return self._planned_s.get(step_id, free_s)

    def carry_out(self, plan: Plan, begins_s: float, idle_s: float) -> tuple[float, float]:
        return self._taken_s.get(plan.step_id, max(begins_s, self._last_s)), 0.0


def simulate_as_recorded(recorded: Recorded) -> tuple[list[Plan], Run]:
    """Simulate a recording from an engine's start at its own times; return plans and run.

    A correct simulation makes the recorded plans, except for token ids. Raises ConfigError."""
    if recorded.first is None or recorded.first.header["new"] is None:
        raise ConfigError("the recording does not begin with the engine's start.")
    clock, run, plans = FakeClock(), Run(), list[Plan]()

    def listen(event: Event) -> None:
        if isinstance(event, Planned) and event.plan is not None:
            plans.append(event.plan)

    scheduler = restored(recorded.first)
    replica = Replica(scheduler, RecordedTimes(recorded), clock, 0, run.by_id, ANY_VOCABULARY)
    replica.core.subscribe(listen)
    work = RecordedWork(recorded, ANY_VOCABULARY, exact=True)
    run_all([replica], work.arrivals(), clock, run)
    return plans, run
