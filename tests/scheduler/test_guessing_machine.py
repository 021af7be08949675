"""The scheduler's state machine where guesses are made before every plan, for all that run."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from quire.scheduler.fifo import Fifo
from tests.scheduler.programs import FEW_OR_MANY, run_machine
from tests.scheduler.test_scheduler_machine import FULL, STATES, WINDOW, SchedulerMachine


class GuessingMachine(SchedulerMachine):
    """One plan at a time."""

    @initialize(
        budget=st.integers(4, 60),
        rows=st.integers(1, 5),
        spare=st.integers(0, 9),
        caching=st.booleans(),
        lazy=st.booleans(),
        mode=st.sampled_from(["recompute", "swap"]),
        tier=st.sampled_from([None, 2, 60]),
        stores=st.integers(0, 1),
        guesses=st.tuples(st.integers(1, 9), st.integers(1, 5)),
    )
    def start(self, guesses, **drawn) -> None:  # type: ignore[override]
        super().start(depth=1, policy=Fifo, threshold=0, **drawn)
        self.num_guesses, self.wrong_at = guesses

    @rule()
    def plan(self) -> None:
        number = self.scheduler.planner.next_step_id
        self.draft(self.num_guesses, number % (2 * self.wrong_at))
        super().plan()


class GuessingStateMachine(GuessingMachine):
    groups = (STATES,)


class GuessingHybridMachine(GuessingMachine):
    groups = (FULL, STATES, WINDOW)


@FEW_OR_MANY
@pytest.mark.parametrize("machine", [GuessingMachine, GuessingStateMachine, GuessingHybridMachine])
def test_guesses_change_no_tokens(machine: type, max_examples: int) -> None:
    run_machine(machine, max_examples)
