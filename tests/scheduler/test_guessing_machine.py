"""The scheduler's state machine with drafts for all running rows before every plan."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from quire.base.messages import Draft, Drafted
from quire.scheduler.core.queue import Fifo
from tests.scheduler.test_chunked_machine import CHUNKS, LATENTS
from tests.scheduler.test_scheduler_machine import FULL, STATES, WINDOW, SchedulerMachine
from tests.support.scheduler.fake_device import make_request
from tests.support.scheduler.state_machines import FEW, run_machine


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
        drafts=st.tuples(st.integers(1, 9), st.integers(1, 5)),
    )
    def start(self, drafts, **drawn) -> None:  # type: ignore[override]
        super().start(depth=1, policy=Fifo, threshold=0, **drawn)
        self.num_drafts, self.wrong_at = drafts

    @rule()
    def plan(self) -> None:
        number = self.scheduler.planner.next_step_id
        self.draft(self.num_drafts, number % (2 * self.wrong_at))
        super().plan()


class GuessingStateMachine(GuessingMachine):
    groups = (STATES,)


class GuessingHybridMachine(GuessingMachine):
    groups = (FULL, STATES, WINDOW)


class GuessingChunkedMachine(GuessingMachine):
    """Rejected drafts may go back over the beginning of a chunk."""

    groups = (FULL, CHUNKS)


class GuessingLatentMachine(GuessingMachine):
    groups = (LATENTS,)


class DeviceGuessingMachine(SchedulerMachine):
    """Up to three plans in flight, with draft tokens of the device and sometimes of the host."""

    @initialize(
        depth=st.sampled_from([1, 2, 2, 3]),
        budget=st.integers(12, 60),
        rows=st.integers(1, 5),
        spare=st.integers(0, 12),
        caching=st.booleans(),
        lazy=st.booleans(),
        mode=st.sampled_from(["recompute", "swap"]),
        tier=st.sampled_from([None, 2, 60]),
        stores=st.integers(0, 1),
        drafts=st.tuples(st.sampled_from([1, 2, 3, 6]), st.integers(1, 4)),
    )
    def start(self, drafts, **drawn) -> None:  # type: ignore[override]
        super().start(policy=Fifo, threshold=0, **drawn)
        self.num_drafts, self.rests_at = drafts

    @rule(seed=st.integers(0, 3), length=st.integers(1, 4), num=st.integers(1, 3))
    def add_long(self, seed: int, length: int, num: int) -> None:
        """Add requests with answers so long that many plans verify drafts of them."""
        for _ in range(num):
            name = f"r{len(self.requests)}"
            request = make_request(name, self._tokens(seed)[:length], seed=len(self.requests))
            self.core.add(request)
            self.requests[name], self.output[name, 0] = request, []

    @rule()
    def plan(self) -> None:
        number = self.scheduler.planner.next_step_id
        if self.rests_at == 1 or number % self.rests_at:
            drafts = [
                Draft(s.request.request_id, s.index, 0, [-1] * self.num_drafts)
                for s in self.scheduler.rows.sequences()
            ]
            self.core.control(Drafted(drafts, on_device=True))
        super().plan()


class DeviceGuessingWindowMachine(DeviceGuessingMachine):
    groups = (WINDOW,)


class DeviceGuessingMixedMachine(DeviceGuessingMachine):
    groups = (FULL, WINDOW)


class DeviceGuessingChunkedMachine(DeviceGuessingMachine):
    groups = (CHUNKS,)


@FEW
@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(GuessingMachine, marks=pytest.mark.slow),
        pytest.param(GuessingStateMachine, marks=pytest.mark.slow),
        GuessingHybridMachine,
        GuessingChunkedMachine,
        pytest.param(GuessingLatentMachine, marks=pytest.mark.slow),
        pytest.param(DeviceGuessingMachine, marks=pytest.mark.slow),
        DeviceGuessingWindowMachine,
        DeviceGuessingMixedMachine,
        DeviceGuessingChunkedMachine,
    ],
)
def test_drafts_change_no_tokens(machine: type, max_examples: int) -> None:
    run_machine(machine, max_examples)
