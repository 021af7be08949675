"""A plan derived from the last plan is the plan that would have been made without the last one
(`Planner._repeat` in `scheduler/core/planning.py`)."""

from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.base.messages import Abort, Draft, Drafted, Fork
from quire.base.plan import Plan, StepResult
from quire.engine.recording.calls import plan_fields
from quire.scheduler.core.planning import Planner
from quire.scheduler.core.plans import Decoding
from quire.scheduler.decisions import Decisions
from quire.scheduler.policy.policies import make_policy
from quire.scheduler.scheduler import Scheduler
from tests.support.scheduler.fake_device import make_request
from tests.support.scheduler.plain_scheduler import add, answer, scheduler_of

STOP = 7  # never sampled, except by the random runs


class Repeats:
    """Number of plans that a planner derived from the last one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, planner: Planner) -> None:
        self.num = 0
        repeat = planner._repeat

        def counting(last: Decoding, now: float) -> Plan | None:
            plan = repeat(last, now)
            self.num += plan is not None
            return plan

        monkeypatch.setattr(planner, "_repeat", counting)


def scheduler_with(
    depth: int = 1, blocks: int = 400, rows: int = 8, policy: str = "fifo"
) -> Scheduler:
    return scheduler_of(make_policy(policy), 64, blocks, max_num_seqs=rows, pipeline_depth=depth)


def decode(scheduler: Scheduler, num_steps: int = 1) -> Plan:
    """Run steps with depth 1. Return the last plan."""
    for _ in range(num_steps):
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        scheduler.update(result_of(plan), 0.0)
        scheduler.check_invariants()
    return plan


def result_of(plan: Plan) -> StepResult:
    return answer(plan).replace(token_ids=np.full((len(plan.sample_rows), 1), 3, np.int32))


class Pair:
    """Two schedulers that get the same calls; the second one derives no plan from another."""

    def __init__(self, *settings: Any) -> None:
        self.both = scheduler_with(*settings), scheduler_with(*settings)
        self.both[1].planner._repeat = lambda last, now: None  # type: ignore[method-assign]

    def call(self, door: str, *arguments: Any) -> Decisions:
        """Call a door of both, assert that they decide the same, and return the decisions."""
        one, other = (getattr(each, door)(*arguments) for each in self.both)
        plans = [d.plan and plan_fields(d.plan, None) for d in (one, other)]
        assert plans[0] == plans[1]
        data = [
            msgspec.msgpack.encode(d.outputs, enc_hook=lambda a: a.tolist()) for d in (one, other)
        ]
        assert data[0] == data[1]
        assert (one.omitted, one.next_s) == (other.omitted, other.next_s)
        assert list(map(type, one.events)) == list(map(type, other.events))
        return one


@pytest.mark.parametrize(
    ("depth", "blocks", "rows", "policy"),
    [
        (1, 400, 8, "fifo"),
        (2, 400, 8, "fifo"),
        (3, 36, 8, "fifo"),
        (1, 400, 2, "srtf"),
        (2, 400, 2, "two-level"),
    ],
)
def test_repeated_plans_equal_newly_made_plans_in_random_runs(
    depth: int, blocks: int, rows: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests arrive, wait for rows, end by stop tokens and limits, are aborted, forked, given
    drafts, and (with few blocks) preempted."""
    pair, rng = Pair(depth, blocks, rows, policy), np.random.default_rng(depth)
    counted = Repeats(monkeypatch, pair.both[0].planner)
    flight, num_plans = deque[Plan](), 0
    for step in range(200):
        running = pair.both[0].rows.sequences()
        if rng.random() < 0.08 and step < 150:
            prompt = rng.integers(10, 60, rng.integers(1, 20)).tolist()
            stops = (STOP,) if rng.random() < 0.5 else ()
            request = make_request(
                f"r{step}", prompt, max_tokens=int(rng.integers(2, 60)), stops=stops,
                tenant=str(rng.integers(2)), priority=int(rng.integers(2)), temperature=0.0,
            )  # fmt: skip
            if running and rng.random() < 0.4:
                source, num = running[0], running[0].num_known_tokens - 1
                prompt = running[0].known_tokens[:num].tolist() + prompt
                fork = Fork(source.request.request_id, 0, num)
                request = msgspec.structs.replace(request, prompt_token_ids=prompt, fork=fork)
            pair.call("add", request, float(step))
        if running and rng.random() < 0.02:
            pair.call("control", Abort(running[-1].request.request_id), float(step))
        if running and rng.random() < 0.03 and not flight:
            drafts = Draft(running[0].request.request_id, 0, running[0].num_known_tokens, [11, 12])
            pair.call("control", Drafted((drafts,)), float(step))
        while len(flight) < depth and (plan := pair.call("schedule", float(step)).plan):
            flight.append(plan)
            num_plans += 1
        if flight:
            plan = flight.popleft()
            result = answer(plan)
            width = 1 + max((len(draft.token_ids) for draft in plan.drafts), default=0)
            tokens = rng.integers(5, 60, (len(plan.sample_rows), width)).astype(np.int32)
            pair.call("update", result.replace(token_ids=tokens), float(step))
            if step % 5 == 0:
                pair.both[0].check_invariants()
    assert num_plans / 4 < counted.num < num_plans - 20


def test_decoding_rows_repeat_their_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_with()
    for name in "ab":
        add(scheduler, name, 5)
    counted = Repeats(monkeypatch, scheduler.planner)
    first, second = decode(scheduler), decode(scheduler)
    assert counted.num == 0, "a plan with prompts is not repeated"
    third = decode(scheduler)
    assert counted.num == 1
    assert third.rows is second.rows and third.num_candidates is second.num_candidates
    assert third.computed_bound.tolist() == (second.computed_bound + 1).tolist() == [6, 6]
    assert first.started and not third.started


def test_a_released_row_is_listed_in_one_plan() -> None:
    scheduler = scheduler_with()
    for name, num in (("a", 2), ("b", 40), ("c", 40)):
        add(scheduler, name, 5, max_tokens=num)
    decode(scheduler, 2)  # the second one ends `a`
    assert [decode(scheduler).released.tolist() for _ in range(3)] == [[0], [], []]


@pytest.mark.parametrize("depth", [1, 2])
def test_no_row_is_planned_beyond_its_limit(depth: int) -> None:
    scheduler, flight, num_rows = scheduler_with(depth), deque[Plan](), list[int]()
    for name, num in (("a", 6), ("b", 9)):
        add(scheduler, name, 5, max_tokens=num)
    while scheduler.has_work:
        while plan := scheduler.schedule(0.0).plan:
            flight.append(plan)
            num_rows.append(len(plan.rows))
        scheduler.update(result_of(flight.popleft()), 0.0)
    assert num_rows == [2] * 6 + [1] * 3


def test_plans_are_repeated_while_requests_wait_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_with(rows=2)
    for name, num in (("a", 4), ("b", 9), ("c", 9)):
        add(scheduler, name, 5, max_tokens=num)
    counted = Repeats(monkeypatch, scheduler.planner)
    started = [len(decode(scheduler).started) for _ in range(6)]
    assert started == [2, 0, 0, 0, 1, 0] and counted.num == 2


def test_a_waiting_request_is_admitted_at_once() -> None:
    scheduler = scheduler_with()
    add(scheduler, "a", 5)
    decode(scheduler, 4)
    add(scheduler, "b", 5)
    assert [start.row for start in decode(scheduler).started] == [1]


def test_drafts_are_in_the_next_plan() -> None:
    scheduler = scheduler_with()
    add(scheduler, "a", 5)
    decode(scheduler, 4)
    scheduler.control(Drafted((Draft("a", 0, 9, [11, 12]),)), 0.0)
    plan = scheduler.schedule(0.0).plan
    assert plan is not None and plan.num_tokens.tolist() == [3]


def test_without_blocks_the_newest_row_is_preempted() -> None:
    scheduler = scheduler_with(blocks=8)
    for name in "ab":
        add(scheduler, name, 14, max_tokens=15)
    sizes = [len(decode(scheduler).rows) for _ in range(6)]
    assert sizes == [2, 2, 2, 1, 1, 1]
