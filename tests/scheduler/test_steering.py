"""Requests whose priority changes, and requests that are paused and resumed."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from quire.base.messages import GrammarReady, Steer
from quire.scheduler.core.queue import Fifo
from quire.scheduler.core.sequence import State
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler_machine import FULL, STATES, WINDOW, SchedulerMachine
from tests.support.scheduler.plain_scheduler import add, answer, scheduler_of, step
from tests.support.scheduler.state_machines import FEW, run_machine


def steer(scheduler: Scheduler, name: str, now: float = 0.0, **fields: float) -> float | None:
    """Steer a request. Return when the scheduler next has something due."""
    decisions = scheduler.control(Steer(name, **fields), now)  # type: ignore[arg-type]
    scheduler.check_invariants()
    return decisions.next_s


@pytest.mark.parametrize("n", [1, 3])
def test_a_paused_request_computes_no_tokens_and_holds_no_blocks(n: int) -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "a", 8, n=n, temperature=float(n > 1))
    for _ in range(3):
        assert step(scheduler)
    [*members] = scheduler.lifecycle.sequences["a"].members
    known = [member.num_known_tokens for member in members]
    assert steer(scheduler, "a", pause_s=30.0) == 30.0
    assert step(scheduler, 1.0) == {} and scheduler.num_running == 0
    assert scheduler.memory.kv.pools[0].num_used == 0
    assert [member.state for member in members] == [State.PARKED] * n
    assert steer(scheduler, "a", pause_s=0.0) is None
    assert step(scheduler, 2.0) and scheduler.num_running == n
    assert [member.num_known_tokens for member in members] == [num + 1 for num in known]


def test_a_pause_ends_when_its_time_is_over() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "a", 4)
    step(scheduler)
    assert steer(scheduler, "a", pause_s=9.0) == 9.0
    assert steer(scheduler, "a", now=1.0, pause_s=2.0) == 3.0  # the last one counts
    assert step(scheduler, 2.9) == {} and step(scheduler, 3.0)


def test_tokens_of_plans_in_flight_arrive_during_a_pause() -> None:
    scheduler = scheduler_of(Fifo, pipeline_depth=2)
    add(scheduler, "a", 4)
    step(scheduler)
    plan = scheduler.schedule(0.0).plan
    assert plan is not None
    steer(scheduler, "a", pause_s=9.0)
    assert scheduler.schedule(0.0).plan is None
    scheduler.update(answer(plan), 0.0)
    assert scheduler.lifecycle.sequences["a"].num_known_tokens == 6
    scheduler.check_invariants()
    steer(scheduler, "a", pause_s=0.0)
    assert step(scheduler)
    assert scheduler.lifecycle.sequences["a"].num_known_tokens == 7


def test_a_paused_request_may_time_out_or_wait_for_its_grammar() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "waits", 4, grammar="x")
    add(scheduler, "late", 4, timeout_s=5.0)
    step(scheduler)
    for name in ("waits", "late", "unknown"):
        steer(scheduler, name, pause_s=60.0)
    scheduler.control(GrammarReady("waits"), 1.0)
    assert step(scheduler, 6.0) == {} and list(scheduler.lifecycle.sequences) == ["waits"]
    steer(scheduler, "waits", now=7.0, pause_s=0.0)
    assert list(step(scheduler, 8.0)) == ["waits"]


def test_a_new_priority_moves_a_waiting_request() -> None:
    scheduler = scheduler_of(Fifo, max_num_seqs=1)
    for name in ("runs", "first", "second"):
        add(scheduler, name, 4, max_tokens=2)
    step(scheduler)
    steer(scheduler, "second", priority=-1)
    order = [name for _ in range(6) for name in step(scheduler)]
    assert list(dict.fromkeys(order)) == ["runs", "second", "first"]


def test_a_new_priority_changes_which_row_is_preempted() -> None:
    scheduler = scheduler_of(Fifo, blocks=9)
    add(scheduler, "old", 12, max_tokens=20)
    add(scheduler, "new", 12, max_tokens=20)
    step(scheduler)
    steer(scheduler, "old", priority=5)
    rows = scheduler.rows
    assert [each.request.request_id for each in rows.sequences()] == ["new", "old"]
    while scheduler.num_running == 2:
        step(scheduler)
    assert [each.request.request_id for each in rows.sequences()] == ["new"]
    assert scheduler.lifecycle.sequences["old"].num_preemptions == 1


class SteeredMachine(SchedulerMachine):
    """Random programs with pauses and priorities at any point."""

    groups = (FULL, WINDOW)

    @rule(
        pick=st.integers(0, 50),
        priority=st.sampled_from([None, -1, 0, 2]),
        pause_s=st.sampled_from([None, 0.0, 5.0, 5.0]),
    )
    def steer(self, pick: int, priority: int | None, pause_s: float | None) -> None:
        if alive := [name for name in self.requests if name not in self.reason]:
            self.core.control(Steer(alive[pick % len(alive)], priority, pause_s))

    def teardown(self) -> None:
        for name in getattr(self, "requests", ()):
            self.core.control(Steer(name, pause_s=0.0))
        super().teardown()


class SteeredStatesMachine(SteeredMachine):
    groups = (FULL, STATES)


@FEW
@pytest.mark.parametrize("machine", [SteeredMachine, SteeredStatesMachine])
def test_steering_changes_no_tokens(machine: type[SteeredMachine], max_examples: int) -> None:
    run_machine(machine, max_examples)
