"""Which of the ranks without a result is the straggler, and when it counts as late."""

import threading
from collections.abc import Callable

import pytest

from quire.engine.observability.heartbeat import MIN_LIMIT_S, StepLimit
from quire.engine.ranks.messages import Beat
from quire.engine.ranks.rank_main import Beats
from quire.engine.ranks.stragglers import CONFIRM_S, SHARE, StragglerWatch


def watch_of(*beats: Beat, in_stage: int = 2, expected_s: float = 0.0) -> StragglerWatch:
    made = StragglerWatch(len(beats), in_stage, StepLimit(expected_s), 0.0)
    for rank, beat in enumerate(beats):
        made.hear(rank, beat, 1.0)
    return made


@pytest.mark.parametrize(
    ("beats", "absent", "guilty"),
    [
        ([Beat(7, 30, ""), Beat(7, 29, "")], {0, 1}, 1),  # rank 0 waits in an exchange
        ([Beat(7, 29, ""), Beat(6, 29, "")], {0, 1}, 1),  # rank 1 did not begin the step
        ([Beat(7, 9, ""), Beat(7, 4, "")], {0}, 0),  # rank 1 is done
        ([Beat(7, 9, ""), Beat(7, 9, ""), Beat(7, 1, ""), Beat(7, 1, "")], {1, 2, 3}, 1),
        ([Beat(7, 9, ""), Beat(7, 9, ""), Beat(7, 5, ""), Beat(7, 4, "")], {2, 3}, 3),
    ],
)
def test_rank_with_least_progress_is_the_straggler(
    beats: list[Beat], absent: set[int], guilty: int
) -> None:
    """Exchanges are counted per stage. A rank that waits for the stage before is not to blame."""
    assert watch_of(*beats).straggler(absent) == guilty


def test_silent_rank_is_the_straggler_at_equal_progress() -> None:
    made = watch_of(Beat(7, 5, ""), Beat(7, 5, ""))
    made.hear(0, Beat(7, 5, ""), 9.0)
    assert made.straggler({0, 1}) == 1


def test_rank_is_late_only_if_confirmed_within_the_same_step() -> None:
    made, limit = watch_of(Beat(0, 0, "")), SHARE * MIN_LIMIT_S
    made.begin(100.0)
    assert not made.is_late(100.0 + limit, {0})
    assert not made.is_late(101.0 + limit, {0})
    made.end(101.1 + limit)
    assert not made.is_late(102.0 + limit, {0})
    made.begin(1000.0)
    assert not made.is_late(1e6, {0})  # the machine was suspended
    assert made.is_late(1e6 + 2 * CONFIRM_S, {0})


def test_slow_steps_extend_the_limit() -> None:
    made = watch_of(Beat(0, 0, ""), expected_s=30.0)
    assert not made.is_late(240.0, {0}) and not made.is_late(240.9, {0})
    assert not made.is_late(241.1, {0}) and made.is_late(241.2 + CONFIRM_S, {0})
    made.end(400.0)
    assert not made.is_late(3500.0, {0}) and not made.is_late(3501.0, {0})


def test_description_has_the_last_beat_and_its_stack() -> None:
    made = watch_of(Beat(-1, 0, "MainThread at a.py:3 (f)"))
    text = made.describe(0, "step 0", 9.0)
    assert (
        "step 0 did not finish within 9.0 s" in text
        and "8.0 s ago: it had not begun a step" in text
    )
    assert text.endswith("MainThread at a.py:3 (f)")


def test_beats_report_the_stacks_of_all_threads() -> None:
    class Gone(Exception):
        pass

    sent: list[Beat] = []
    sent_once, done = threading.Event(), threading.Event()

    def send(beat: Beat) -> None:
        sent.append(beat)
        sent_once.set()
        raise Gone

    thread = threading.Thread(target=done.wait, name="computes")
    thread.start()
    Beats(send, lambda: (12, 34), Gone)
    assert sent_once.wait(10)
    done.set()
    thread.join()
    [beat] = sent
    assert (beat.number, beat.num_exchanges, beat.expert_pairs) == (-1, 12, 34)
    assert "MainThread at " in beat.where and "(wait)" in beat.where


def first_late_s(
    made: StragglerWatch, beat_at: Callable[[int], Beat | None], max_s: int = 200
) -> int:
    """Begin a step at 100 s, hear rank 1 each second, and return the second at which it is late."""
    made.begin(100.0)
    for second in range(max_s):
        if (beat := beat_at(second)) is not None:
            made.hear(1, beat, 100.0 + second)
        if made.is_late(100.0 + second, {0, 1}):
            return second
    return max_s


def test_rank_with_progress_is_slow_not_hung() -> None:
    made = watch_of(Beat(7, 999, ""), Beat(7, 0, ""))
    assert first_late_s(made, lambda second: Beat(7, second, "")) == 200
    made = watch_of(Beat(7, 999, ""), Beat(7, 0, ""))
    assert first_late_s(made, lambda second: Beat(7, min(second, 50), "")) == 60


def test_starved_rank_is_slow_not_hung() -> None:
    """With a tenth of a core, its limit of 8 s CPU time is 80 s of wall time."""
    made = watch_of(Beat(7, 9, ""), Beat(7, 3, ""))
    assert 75 < first_late_s(made, lambda second: Beat(7, 3, "", 0, 0.9 * second)) < 90


def test_hung_rank_is_late_in_time_despite_a_starved_one() -> None:
    made = watch_of(Beat(7, 9, ""), Beat(7, 3, ""))
    assert first_late_s(made, lambda second: Beat(7, 3, "")) == 10
    assert first_late_s(made, lambda second: None) == 10  # a stopped rank sends no beats
    made.hear(0, Beat(7, 9, "", 0, 50.0), 99.0)
    assert first_late_s(made, lambda second: Beat(7, 3, "")) == 10
