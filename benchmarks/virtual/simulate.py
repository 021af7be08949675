"""Runs of the scheduler in virtual time: no model, a device whose steps take what a formula says.

The scheduler is the engine's own, so a run shows what it would decide; how long the steps take is
the formula's claim. A request ends with a stop token after as many tokens as were drawn for it,
which the scheduler cannot know beforehand.
"""

import heapq
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from quire.base.events import Admitted, Event, Finished, Preempted
from quire.base.messages import Request
from quire.base.plan import Plan, StepResult
from quire.base.sampling_params import RequestOutputKind, SamplingParams
from quire.scheduler.scheduler import Scheduler

STOP, OTHER = 1, 2


@dataclass(frozen=True)
class StepTime:
    """A step by its roofline, in seconds: it reads the weights once or computes all its tokens,
    whichever takes longer, and reads the keys and values of all contexts.

    weights_s: reading the weights; token_s: arithmetic of one token; context_s: reading what the
    cache has of one token; copy_s: moving one block to the host's memory or back.
    """

    weights_s: float
    token_s: float
    context_s: float
    copy_s: float = 0.0

    def of(self, num_tokens: int, num_context: int, num_moved: int = 0) -> float:
        compute_s = max(self.weights_s, self.token_s * num_tokens)
        return compute_s + self.context_s * num_context + self.copy_s * num_moved


# Llama-3.1-8B in 16 bits on an H200: 16 GB at 4.3 TB/s, half of 989 TFLOP/s, 131 kB per token.
LLAMA_8B = StepTime(16e9 / 4.3e12, 16e9 / 494e12, 131_072 / 4.3e12)

# P's first setting: OPT-13B in 16 bits on an A100: 26 GB at 1,555 GB/s; 26 GFLOP per token at half
# of 312 TFLOP/s; 0.82 MB of keys and values per token, whose blocks of 16 cross PCIe at 25 GB/s.
OPT_13B = StepTime(26e9 / 1555e9, 26e9 / 156e12, 0.82e6 / 1555e9, 16 * 0.82e6 / 25e9)


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes; it ends after num_output tokens, if nothing ends it before."""

    at_s: float
    request: Request
    num_output: int


@dataclass(slots=True)
class Served:
    """What became of a request; times since the run began."""

    arrived_s: float
    num_prompt: int = 0
    num_output: int = 0
    admitted_s: float = -1.0
    first_token_s: float = -1.0
    finished_s: float = -1.0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def wait_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_s - self.arrived_s


@dataclass(slots=True)
class Run:
    """by_id: all requests; used: mean share of the pool in use, over steps."""

    by_id: dict[str, Served] = field(default_factory=dict)
    duration_s: float = 0.0
    num_steps: int = 0
    used: float = 0.0
    most_used: int = 0
    num_lost_tokens: int = 0

    @property
    def num_output(self) -> int:
        return sum(served.num_output for served in self.by_id.values())

    @property
    def tokens_per_s(self) -> float:
        return self.num_output / self.duration_s

    @property
    def num_preemptions(self) -> int:
        return sum(served.num_preemptions for served in self.by_id.values())


def simulated_request(
    request_id: str, prompt_token_ids: list[int], max_tokens: int, tenant: str = ""
) -> Request:
    """A request that stops at the simulation's stop token."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY
    )
    return Request(request_id, prompt_token_ids, params, 0, (STOP,), tenant=tenant)


NextArrival = Callable[[str, float], Arrival | None]


def simulate(
    scheduler: Scheduler,
    arrivals: Seq[Arrival],
    step_time: StepTime,
    then: NextArrival = lambda request_id, now: None,
) -> Run:
    """Serve the arrivals one step after the other (depth 1) until all of them have ended.

    then: what comes because a request has ended, such as the next turn of a conversation.
    """
    run, outputs, now, used = Run(), {}, 0.0, 0.0
    queue = [(a.at_s, i, a) for i, a in enumerate(arrivals)]
    heapq.heapify(queue)
    num = len(queue)
    while queue or scheduler.has_work:
        while queue and queue[0][0] <= now:
            at_s, _, arrival = heapq.heappop(queue)
            scheduler.add(arrival.request, at_s)
            outputs[arrival.request.request_id] = arrival.num_output
            run.by_id[arrival.request.request_id] = Served(
                at_s, num_prompt=len(arrival.request.prompt_token_ids)
            )
        decisions = scheduler.schedule(now)
        plan = decisions.plan
        _take_events(run, decisions.events, now)
        if plan is None:
            assert queue, "the scheduler has work and plans nothing"
            now = queue[0][0]
            continue
        pool = scheduler.memory.kv.pools[0]
        used += pool.num_used / pool.num_blocks
        run.most_used = max(run.most_used, pool.num_used)
        num_context = int((plan.computed_bound + plan.num_tokens).sum())
        num_moved = sum(len(move.source) for move in plan.moves)
        result = _answer(scheduler, plan, outputs)
        now += step_time.of(plan.num_scheduled_tokens, num_context, num_moved)
        _take_first_tokens(run, scheduler, plan, now)
        events = scheduler.update(result, now).events
        run.num_steps += 1
        for request_id in _take_events(run, events, now):
            if (arrival := then(request_id, now)) is not None:
                heapq.heappush(queue, (arrival.at_s, num, arrival))
                num += 1
    run.duration_s, run.used = now, used / max(1, run.num_steps)
    return run


def _answer(scheduler: Scheduler, plan: Plan, outputs: dict[str, int]) -> StepResult:
    """The stop token for rows that get their last token, some other one for all others."""
    table, rows = scheduler.rows.table, plan.sample_rows
    tokens = np.full((len(rows), 1), OTHER, np.int32)
    for i, sequence in enumerate(table.sequences[rows]):
        if sequence.num_output_tokens + 1 >= outputs[sequence.request.request_id]:
            tokens[i] = STOP
    return StepResult(plan.step_id, tokens, np.ones(len(rows), np.int32))


def _take_first_tokens(run: Run, scheduler: Scheduler, plan: Plan, now: float) -> None:
    for sequence in scheduler.rows.table.sequences[plan.sample_rows]:
        served = run.by_id[sequence.request.request_id]
        if served.first_token_s < 0:
            served.first_token_s = now


def _take_events(run: Run, events: list[Event], now: float) -> list[str]:
    """Returns the requests that have ended."""
    ended = []
    for event in events:
        if isinstance(event, Admitted):
            served = run.by_id[event.request_id]
            if served.admitted_s < 0:
                served.admitted_s, served.num_cached_tokens = now, event.num_cached_tokens
        elif isinstance(event, Preempted):
            run.by_id[event.request_id].num_preemptions += 1
            run.num_lost_tokens += event.num_lost_tokens
        elif isinstance(event, Finished):
            served = run.by_id[event.request_id]
            served.finished_s, served.num_output = now, event.num_output_tokens
            ended.append(event.request_id)
    return ended
