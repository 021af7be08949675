"""The scheduler's machine with a model in stages, which learn tokens only from plans."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from quire.base.plan import Plan
from quire.scheduler.core.queue import Fifo
from quire.scheduler.policy.srtf import Srtf
from quire.scheduler.policy.two_level import TwoLevel
from tests.scheduler.test_chunked_machine import CHUNKS, LATENTS
from tests.scheduler.test_scheduler_machine import FULL, STATES, WINDOW, SchedulerMachine
from tests.support.scheduler.plain_scheduler import add, answer, scheduler_of, step
from tests.support.scheduler.staged_device import EarlierStage, Stage, StagedExecutor
from tests.support.scheduler.state_machines import FEW, run_machine


class StagedMachine(SchedulerMachine):
    num_stages = 2

    @initialize(
        depth=st.sampled_from([1, 2, 3, 3, 3]),
        budget=st.one_of(st.integers(1, 24), st.integers(25, 60)),
        rows=st.integers(1, 5),
        spare=st.integers(0, 12),
        caching=st.booleans(),
        lazy=st.booleans(),
        mode=st.sampled_from(["recompute", "swap"]),
        policy=st.sampled_from([Fifo, Srtf, TwoLevel]),
        threshold=st.sampled_from([0, 0, 1, 5]),
        tier=st.sampled_from([None, None, 0, 2, 7, 60]),
    )
    def start(self, **drawn) -> None:  # type: ignore[override]
        super().start(stores=0, **drawn)
        self.takes_grammars = True  # only the last stage waits for masks

    def make_executor(self, sizes, lazy):  # type: ignore[no-untyped-def]
        num = self.num_stages
        stages = [EarlierStage(*sizes) for _ in range(num - 1)] + [Stage(*sizes)]
        for number, stage in enumerate(stages):
            stage.stage, stage.num_stages, stage.curses = number, num, stages[0].curses
        self.device = stages[-1]
        return StagedExecutor(stages, ahead=0 if lazy else num - 1)


class ThreeStagesMachine(StagedMachine):
    num_stages = 3
    groups = (FULL, WINDOW)


class StagedStatesMachine(StagedMachine):
    groups = (FULL, STATES)


class StagedChunkedMachine(StagedMachine):
    groups = (LATENTS, CHUNKS)


@FEW
@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(StagedMachine, marks=pytest.mark.slow),
        ThreeStagesMachine,
        StagedStatesMachine,
        pytest.param(StagedChunkedMachine, marks=pytest.mark.slow),
    ],
)
def test_stages_change_no_tokens(machine: type, max_examples: int) -> None:
    run_machine(machine, max_examples)


def test_decoding_rows_take_turns_in_staged_plans() -> None:
    """Each plan has at most its share of the rows, and no row with a pending token. It contains the
    last token of each of its rows."""
    scheduler = scheduler_of(Fifo, budget=64)
    scheduler.rows.num_stages, scheduler.depth = 2, 3
    for name in "abcde":
        add(scheduler, name, 6)
    while not all(s.num_output_tokens for s in scheduler.lifecycle.sequences.values()):
        step(scheduler)
    add(scheduler, "f", 40)
    plans: list[Plan] = []
    while (plan := scheduler.schedule(0.0).plan) is not None:
        plans.append(plan)
    assert [len(plan.rows) for plan in plans] == [4, 2], "three of six, one of them with a prompt"
    assert not set(plans[0].sample_rows.tolist()) & set(plans[1].sample_rows.tolist())
    for plan in plans:
        known = scheduler.rows.table.tokens[plan.rows, plan.last_positions]
        assert plan.last_ids.tolist() == known.tolist()
        assert (plan.last_positions < scheduler.rows.table.known[plan.rows]).all()
    scheduler.update(answer(plans[0]), 0.0)
    again = scheduler.schedule(0.0).plan
    assert again is not None and again.rows.tolist() == plans[0].rows.tolist()[:3]
