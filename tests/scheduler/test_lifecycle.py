"""Events of an admitted request, and of a preempted one."""

from collections.abc import Iterator

import msgspec
import pytest

from quire.base.events import Finished, Preempted, Queued
from quire.base.messages import Abort
from quire.scheduler.core.lifecycle import TRANSITIONS
from quire.scheduler.core.sequence import Sequence, State
from tests.scheduler.test_step_results import scheduler_of, step
from tests.support.scheduler.fake_device import make_request


def test_an_added_request_emits_a_queued_event() -> None:
    scheduler = scheduler_of()
    request = make_request("r", [1, 2, 3], max_tokens=5, tenant="mine")
    request = msgspec.structs.replace(request, received_s=0.5)
    assert scheduler.add(request, 2.0).events == [Queued(2.0, "r", 3, 5, 0.5, "mine")]


def test_a_preempted_request_emits_an_event_with_its_lost_tokens() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("r", list(range(9)), max_tokens=9), 0.0)
    step(scheduler, 5)
    step(scheduler, 5)
    rows = scheduler.lifecycle.preempt(scheduler.lifecycle.sequences["r"], "other", 3.0)
    assert rows == {0}
    assert scheduler.lifecycle.events[-1] == Preempted(3.0, "r", "other", 10, False)


def test_an_aborted_beam_search_ends_with_its_number_of_results() -> None:
    scheduler = scheduler_of()
    beams = {"n": 2, "beam_width": 3, "use_beam_search": True, "temperature": 0.0}
    scheduler.add(make_request("r", [1, 2, 3], max_tokens=5, **beams), 0.0)
    [event] = scheduler.control(Abort("r"), 1.0).events
    assert isinstance(event, Finished) and event.num_sequences == 2


def test_an_open_prompt_that_is_parked_emits_a_preempted_event() -> None:
    """Its row is taken: its computed tokens are lost, and none of them is in host memory."""
    scheduler = scheduler_of()
    scheduler.add(make_request("r", list(range(9)), max_tokens=9), 0.0)
    step(scheduler, 5)
    sequence = scheduler.lifecycle.sequences["r"]
    scheduler.lifecycle.park_running(sequence, "other", 3.0)
    assert scheduler.lifecycle.events[-1] == Preempted(3.0, "r", "other", 9, False)
    assert (sequence.num_swapped_tokens, sequence.num_preemptions) == (0, 0)


@pytest.mark.parametrize("state", [State.SWAPPED, State.PARKED, State.WAITING])
def test_only_a_swapped_sequence_waits_again_without_its_host_blocks(state: State) -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("r", [1, 2, 3]), 0.0)
    sequence = scheduler.lifecycle.sequences["r"]
    sequence.state = state
    scheduler.lifecycle.forget_swapped(sequence)
    assert sequence.state is (State.WAITING if state is State.SWAPPED else state)


class NotIterable(dict[str, Sequence]):
    """Requests that may be looked up, but not iterated over."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all requests are walked")

    values = items = keys = __iter__  # type: ignore[assignment]


def test_a_view_does_not_iterate_over_requests() -> None:
    """Metrics and the status line ask for it between two steps."""
    scheduler = scheduler_of()
    for number in range(3):
        scheduler.add(make_request(f"r{number}", [1, 2, 3], max_tokens=2, seed=number), 0.0)
    assert [found.request.request_id for found in scheduler.requests()] == ["r0", "r1", "r2"]
    scheduler.lifecycle.sequences = NotIterable(scheduler.lifecycle.sequences)
    assert scheduler.view().num_waiting == 3
    with pytest.raises(AssertionError, match="walked"):
        scheduler.requests()


def test_a_wrong_transition_asserts() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("r", [1, 2, 3]), 0.0)
    sequence, lifecycle = scheduler.lifecycle.sequences["r"], scheduler.lifecycle
    lifecycle.end(sequence, "abort", 0.0)
    with pytest.raises(AssertionError, match="r: ENDED to WAITING"):
        lifecycle.unpark(sequence)
    assert sequence.state is State.ENDED


def test_the_table_of_transitions_is_complete() -> None:
    """A sequence can end from every state in between, never leaves ENDED or returns to NEW."""
    assert {one for one, other in TRANSITIONS if other is State.ENDED} == set(State) - {
        State.NEW,
        State.ENDED,
    }
    assert not [pair for pair in TRANSITIONS if pair[0] is State.ENDED or pair[1] is State.NEW]
