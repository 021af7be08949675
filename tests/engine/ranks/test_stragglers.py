"""Which of the ranks that did not answer keeps the others, and when that counts."""

import threading
from collections.abc import Callable

import pytest

from quire.engine.observability.heartbeat import MIN_LIMIT_S, StepLimit
from quire.engine.ranks.messages import Beat
from quire.engine.ranks.rank_main import Beats
from quire.engine.ranks.stragglers import CONFIRM_S, SHARE, StragglerWatch


def lateness(*beats: Beat, in_stage: int = 2, expected_s: float = 0.0) -> StragglerWatch:
    made = StragglerWatch(len(beats), in_stage, StepLimit(expected_s), 0.0)
    for rank, beat in enumerate(beats):
        made.hear(rank, beat, 1.0)
    return made


@pytest.mark.parametrize(
    ("beats", "absent", "guilty"),
    [
        ([Beat(7, 30, ""), Beat(7, 29, "")], {0, 1}, 1),  # the other waits in an exchange
        ([Beat(7, 29, ""), Beat(6, 29, "")], {0, 1}, 1),  # it did not begin the step
        ([Beat(7, 9, ""), Beat(7, 4, "")], {0}, 0),  # the other is done
        ([Beat(7, 9, ""), Beat(7, 9, ""), Beat(7, 1, ""), Beat(7, 1, "")], {1, 2, 3}, 1),
        ([Beat(7, 9, ""), Beat(7, 9, ""), Beat(7, 5, ""), Beat(7, 4, "")], {2, 3}, 3),
    ],
)
def test_who_has_come_least_far_keeps_the_others(
    beats: list[Beat], absent: set[int], guilty: int
) -> None:
    """Exchanges are of a stage; who waits for the stage before is not to blame."""
    assert lateness(*beats).straggler(absent) == guilty


def test_of_two_that_are_as_far_it_is_the_silent_one() -> None:
    made = lateness(Beat(7, 5, ""), Beat(7, 5, ""))
    made.hear(0, Beat(7, 5, ""), 9.0)
    assert made.straggler({0, 1}) == 1


def test_one_late_look_is_not_enough_and_what_ends_is_counted_anew() -> None:
    made, limit = lateness(Beat(0, 0, "")), SHARE * MIN_LIMIT_S
    made.begin(100.0)
    assert not made.is_late(100.0 + limit, {0})
    assert not made.is_late(101.0 + limit, {0})
    made.end(101.1 + limit)
    assert not made.is_late(102.0 + limit, {0})
    made.begin(1000.0)
    assert not made.is_late(1e6, {0})  # the machine stood still
    assert made.is_late(1e6 + 2 * CONFIRM_S, {0})


def test_slow_steps_are_given_more() -> None:
    made = lateness(Beat(0, 0, ""), expected_s=30.0)
    assert not made.is_late(240.0, {0}) and not made.is_late(240.9, {0})
    assert not made.is_late(241.1, {0}) and made.is_late(241.2 + CONFIRM_S, {0})
    made.end(400.0)
    assert not made.is_late(3500.0, {0}) and not made.is_late(3501.0, {0})


def test_what_is_known_is_told() -> None:
    made = lateness(Beat(-1, 0, "MainThread at a.py:3 (f)"))
    text = made.describe(0, "step 0", 9.0)
    assert (
        "step 0 did not finish within 9.0 s" in text
        and "8.0 s ago: it had not begun a step" in text
    )
    assert text.endswith("MainThread at a.py:3 (f)")


def test_a_rank_tells_where_its_threads_are() -> None:
    class Gone(Exception):
        pass

    heard: list[Beat] = []
    come, done = threading.Event(), threading.Event()

    def send(beat: Beat) -> None:
        heard.append(beat)
        come.set()
        raise Gone

    thread = threading.Thread(target=done.wait, name="computes")
    thread.start()
    Beats(send, lambda: (12, 34), Gone)
    assert come.wait(10)
    done.set()
    thread.join()
    [beat] = heard
    assert (beat.number, beat.num_exchanges, beat.expert_pairs) == (-1, 12, 34)
    assert "MainThread at " in beat.where and "(wait)" in beat.where


def first_late_s(
    made: StragglerWatch, beat_at: Callable[[int], Beat | None], most_s: int = 200
) -> int:
    """Begin a step at 100 s, hear rank 1 each second, and return after how many it is late."""
    made.begin(100.0)
    for second in range(most_s):
        if (beat := beat_at(second)) is not None:
            made.hear(1, beat, 100.0 + second)
        if made.is_late(100.0 + second, {0, 1}):
            return second
    return most_s


def test_a_rank_that_makes_progress_is_slow_and_not_hung() -> None:
    made = lateness(Beat(7, 999, ""), Beat(7, 0, ""))
    assert first_late_s(made, lambda second: Beat(7, second, "")) == 200
    made = lateness(Beat(7, 999, ""), Beat(7, 0, ""))
    assert first_late_s(made, lambda second: Beat(7, min(second, 50), "")) == 60


def test_a_rank_that_gets_no_cpu_is_slow_and_not_hung() -> None:
    """A tenth of a core: the limit of 8 s of its own time is 80 s of wall time."""
    made = lateness(Beat(7, 9, ""), Beat(7, 3, ""))
    assert 75 < first_late_s(made, lambda second: Beat(7, 3, "", 0, 0.9 * second)) < 90


def test_a_hung_rank_is_late_in_todays_time_also_beside_one_that_is_starved() -> None:
    made = lateness(Beat(7, 9, ""), Beat(7, 3, ""))
    assert first_late_s(made, lambda second: Beat(7, 3, "")) == 10
    assert first_late_s(made, lambda second: None) == 10  # stopped: it sends nothing
    made.hear(0, Beat(7, 9, "", 0, 50.0), 99.0)
    assert first_late_s(made, lambda second: Beat(7, 3, "")) == 10
